"""Earlier runs of a project as a run is held against them: their curves, in buckets of steps.

Buckets begin at multiples of their width, so that those of any two runs lie at the same steps. The
widths ascend by factors of four: whatever step a run has come to, at one of them a quarter of the
buckets or more lies before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

# Buckets of a curve at each width, and how many of them make one of the next width.
BUCKETS, FANOUT = 256, 4


@dataclass(frozen=True, slots=True)
class SettingBeside:
    """A setting in which a run differs from an earlier one; None where it has no such setting."""

    key: str
    own: Any
    theirs: Any


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Baselines:
    """What a run is held against, as it was when the run began.

    Attributes:
        of: id of the run that is held against them.
        runs: ids of the N baselines, that with the nearest settings first; empty: there are none.
        why: why there are none.
        last: last step that all of them have.
        curves: series -> width of a bucket -> float32 [N, `BUCKETS`]; NaN where nothing is
            recorded.
        elsewhere: N times, whether it ran on another kind of machine.
        differing: settings in which the run differs from the first of them.
        established: of these settings, those that were chosen for the training are the same in all
            baselines of the same model, of which there are several: the run leaves what the project
            does.
        unlike: names of these, where it does.
    """

    of: str = ""
    runs: tuple[str, ...] = ()
    why: str = ""
    last: int = -1
    curves: Mapping[str, Mapping[int, npt.NDArray[np.float32]]] = field(default_factory=dict)
    elsewhere: tuple[bool, ...] = ()
    differing: tuple[SettingBeside, ...] = ()
    unlike: tuple[str, ...] = ()
    established: bool = True


def widths(last: int) -> tuple[int, ...]:
    """Widths of buckets at which a curve is kept, ascending; by the widest they reach a step."""
    found = [1]
    while last >= BUCKETS * found[-1]:
        found.append(FANOUT * found[-1])
    return tuple(found)


def width_at(step: int) -> int:
    """The narrowest width by which the buckets reach a step."""
    return widths(step)[-1]
