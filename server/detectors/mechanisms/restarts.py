"""Which restarts lie behind a step, for detectors that forget what was before them.

By step and not by when it was heard of: the answers must not depend on how steps are cut into
windows, nor differ when a run is evaluated again.
"""

from __future__ import annotations

import numpy as np

from rankscope.server.window import Int64, Window


def restarts(window: Window) -> Int64:
    """First steps of all processes that came after a rank's first one; int64, ascending."""
    later = [step for begins in window.begins.values() for step in begins[1:]]
    return np.sort(np.array(later, dtype=np.int64))


def passed(later: Int64, step: int) -> int:
    """How many of them have begun at a step."""
    return int(np.searchsorted(later, step, side="right"))
