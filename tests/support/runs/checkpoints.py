"""Runs whose ranks load a checkpoint and say what they found in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankscope.server.window import Occurrence
from tests.support.runs.traces import Trace

STEPS = 60


def load(
    rank: int,
    step: int,
    differing: Sequence[str] = (),
    *,
    tensors: int = 10,
    loaded: bool = True,
) -> Occurrence:
    """What a rank says of a checkpoint: which of its tensors are not what was saved."""
    data = {
        "path": "run/step500.pt",
        "loaded": loaded,
        "tensors": tensors,
        "differing": len(differing),
        "names": list(differing),
        "saved": {"run": "run", "step": 500, "rank": 0, "world_size": 2},
    }
    return Occurrence(rank, step, "checkpoint", "", data)


def loaded_at(seed: int, *, differing: Sequence[str] = (), ranks: Sequence[int] = (1,)) -> Trace:
    """Two ranks load a checkpoint before step 3; in that of some of them tensors differ."""
    events = [load(rank, 3, differing if rank in ranks else ()) for rank in (0, 1)]
    series = {"loss": np.ones((2, STEPS))}
    return Trace("checkpoints", seed, np.arange(STEPS), series, events=tuple(events))
