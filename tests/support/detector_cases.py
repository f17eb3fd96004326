"""Cases of all kinds, of `tests/server/detectors/cases`: runs, and what is said of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).parents[1] / "server" / "detectors" / "cases"
# A thousand cases take the loader that is written in Python three seconds.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def cases() -> dict[str, dict[str, Any]]:
    """Kind -> what its file says: `detector`, `cases`."""
    return {
        path.stem: yaml.load(path.read_text(encoding="utf-8"), _LOADER)
        for path in sorted(_FOLDER.glob("*.yaml"))
    }
