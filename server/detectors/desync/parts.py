"""Ranks that hold parts of one model or optimizer between them, and what these read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rankscope.server.detectors.data.batches import batch_digests
from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.window import Window


def optimizer_dealt_out(window: Window, members: Sequence[int]) -> bool:
    """Whether each of these ranks steps with tensors of its own, and all of them with every tensor.

    A sharded optimizer written by hand (ZeRO 1): each rank's leaves out what the others hold, and
    their shares add up to the whole. A gradient counts on its owner then, and what a `reduce` to
    the owner leaves on the other ranks is nobody's.
    """
    shares = []
    for rank in members:
        held = (window.configs.get(rank) or {}).get("optimizer_tensors")
        share = held.get("share_of_trainable") if isinstance(held, Mapping) else None
        if not isinstance(share, int | float) or not 0 < share < 1:
            return False
        shares.append(float(share))
    return math.isclose(sum(shares), 1.0, rel_tol=1e-6)


def hold_parts(window: Window, incident: Divergence) -> bool:
    """Whether ranks differ that share one batch, and the model between them."""
    members = set(incident.ranks).union(*incident.groups)
    return not any(members <= set(together) for together in window.data_parallel)


def read_apart(window: Window, incident: Divergence) -> bool:
    """Whether these ranks were seen to read different batches at the step at which it began.

    Not asked of stages of a pipeline, which are given what the stage before has made: they hold
    tensors of other names, and not parts of the same ones.
    """
    members = {rank for group in incident.groups for rank in group}
    layouts = {(window.configs.get(rank) or {}).get("parameters_digest") for rank in members}
    digests = batch_digests(window) if len(layouts) == 1 else None
    column = np.flatnonzero(window.steps == incident.first_step)
    if digests is None or not len(column):
        return False
    rows = np.flatnonzero(np.isin(window.ranks, list(members)))
    there = digests.present[rows, column[0]]
    return len(set(digests.values[rows, column[0]][there].tolist())) > 1
