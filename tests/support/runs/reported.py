"""Runs of healthy numbers in which ranks report single events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.server.window import Occurrence
from tests.support.runs.traces import Trace

STEPS = 300


def _run(
    name: str, seed: int, ranks: int, events: Sequence[Occurrence], **more: Mapping[str, Any]
) -> Trace:
    random = np.random.default_rng(seed)
    shape = (ranks, STEPS)
    series = {
        "loss": np.exp(-np.arange(STEPS) / 80) * (1 + 0.02 * random.standard_normal(shape)),
        "grad_norm": np.ones(shape) * (1 + 0.02 * random.standard_normal(STEPS)),
        **more.pop("series", {}),
    }
    return Trace(name, seed, np.arange(STEPS), series, events=tuple(events), **more)


def frozen_written(
    seed: int,
    *,
    at: Sequence[int] = (61,),
    ranks: Sequence[int] = (0, 1, 2),
    of: int = 3,
    between: Sequence[str] = (),
    before: Sequence[str] = (),
    explained: float = 0.0,
) -> Trace:
    """Some ranks find a frozen tensor changed at some steps, or layers that nobody trained."""
    data = {"tensors": ["base.weight"], "count": 1}
    events = [
        Occurrence(rank, step, "parameters.written", "", {**data, "unchanged_until": step - 1}, 0.0)
        for step in at
        for rank in ranks
    ]
    if between:
        untrained = {"tensors": list(between), "count": len(between)}
        events += [Occurrence(rank, 8, "layers.frozen", "", untrained, 0.0) for rank in ranks]
    series = {}
    if before:
        untrained = {"tensors": list(before), "count": len(before)}
        events += [Occurrence(rank, 8, "layers.untrained", "", untrained, 0.0) for rank in ranks]
        series["explained_deviance"] = np.full((of, STEPS), explained)
    return _run("frozen", seed, of, events, config={"frozen_tensors": 4}, series=series)


def state_changed(
    seed: int, *, at: int = 61, ranks: Sequence[int] = (0, 1, 2), again: int = 0
) -> Trace:
    """The optimizer's state of some ranks goes back; no two ranks hold the same.

    Args:
        again: a step at which it has done so eight times more.
    """
    data = {"how": "set back", "seen": at - 1, "before": 61.0, "after": 30.0}
    events = [Occurrence(rank, at, "optimizer.state", "", data, 0.0) for rank in ranks]
    if again:
        data = {"how": "set back", "seen": again - 1, "again": 8}
        events += [Occurrence(rank, again, "optimizer.state", "", data, 0.0) for rank in ranks]
    return _run("state", seed, 3, events)


def renewed(seed: int, *, since: int = 1) -> Trace:
    """Three ranks with a new optimizer at each step."""
    data = {"how": "reset", "seen": since - 1, "again": 8, "renewed": since}
    events = [Occurrence(rank, since + 7, "optimizer.state", "", data, 0.0) for rank in range(3)]
    return _run("renewed", seed, 3, events)


def set_back(
    seed: int,
    *,
    at: Sequence[int] = (60, 80, 100, 120),
    by: int = 5,
    ranks: Sequence[int] = (0, 1, 2),
    swapped: bool = False,
    same: bool = False,
    hurts: bool = False,
) -> Trace:
    """Parameters that are written before some steps.

    Args:
        at: the steps.
        by: they become what they were after the step so many before the last one.
        ranks: on which.
        swapped: they become what they never were, as averages do; `same`: each time the same, as a
            copy from before the first step.
        hurts: the loss is higher since.
    """
    random = np.random.default_rng(seed)
    after = random.integers(1, 2**63, STEPS, dtype=np.uint64) * np.ones((3, 1), dtype=np.uint64)
    between = np.zeros((3, STEPS), dtype=np.uint64)
    for step in at:
        for rank in ranks:
            never = 12345 if same else 12345 + step
            new = never if swapped else int(after[rank, step - 1 - by])
            between[rank, step] = (new - int(after[rank, step - 1])) % 2**64
    words = {"parameters": after, "outside_optimizer": between}
    losses = 1 + 0.1 * random.standard_normal((3, STEPS)) + hurts * (np.arange(STEPS) >= at[0])
    return _run("set_back", seed, 3, [], series={"loss": losses}, words=words)


def skipped_gradients(
    seed: int,
    *,
    at: Sequence[int] = (61, 80, 99, 118, 137),
    of: Sequence[Sequence[int]] = ((1,),),
    scaled: bool = False,
    falls: bool = True,
    posted: bool = True,
) -> Trace:
    """Steps are skipped because the gradients of some ranks are not finite.

    Args:
        at: the steps.
        of: the ranks, in turns.
        scaled: whether there is a loss scaler.
        falls: whether its scale falls each time, or doubles and falls back.
        posted: whether its scale is posted, as is done at steps that are not skipped.
    """
    events = []
    scale = np.full((3, STEPS), 65536.0)
    for turn, step in enumerate(at):
        suspects = of[turn % len(of)]
        for rank in range(3):
            names = ["head.weight"] if rank in suspects else []
            data = {"tensors": names, "count": len(names), "whole": True}
            data |= {"scaler": True} if scaled else {}
            events.append(Occurrence(rank, step, "gradient.skipped", "", data, 0.0))
        if falls:
            scale[:, step:] /= 2
        else:
            scale[:, step - 5 : step] *= 2
    series = {"amp_scale": scale} if scaled and posted else {}
    return _run("skipped", seed, 3, events, series=series)
