"""Trainings whose steps come to little: no gradient, clipped, waiting, far from their targets."""

from __future__ import annotations

import math

import numpy as np

from tests.support.runs.traces import Trace


def without_gradients(
    seed: int,
    *,
    at: int = 40,
    until: int = 120,
    moves: float = 0.0,
    rank: int = -1,
    every: int = 1,
    sampled_every: tuple[int, int] = (1, 1),
    for_good: int = 10**9,
    normed: bool = True,
    made: bool = False,
    steps: int = 120,
) -> Trace:
    """Two ranks none of whose parameters has a gradient from one step until another.

    Args:
        moves: what the steps change all the same, over the parameters.
        rank: the only one to which that happens; -1 for both.
        every: it has one at every so many steps all the same; 1: at none.
        sampled_every: steps from one sample of a rank to its next.
        for_good: step from which on there is none whatever `every` says.
        normed: gradients are posted at all.
        made: so are those that the backward passes make, whatever comes of them.
    """
    random = np.random.default_rng(seed)
    shape, gone = (2, steps), (np.arange(steps) >= at) & (np.arange(steps) < until)
    gone &= (np.arange(steps) % every != every - 1) | (every == 1) | (np.arange(steps) >= for_good)
    updates = 1e-3 * np.exp(0.1 * random.standard_normal(shape))
    who = np.arange(2) == rank if rank >= 0 else np.ones(2, dtype=bool)
    updates[np.ix_(who, gone)] = moves
    series = {
        "loss": 1 + 0.05 * random.standard_normal(shape),
        "grad_norm": np.exp(0.2 * random.standard_normal(shape)),
        "update_ratio": updates,
    }
    if made:
        series["grad_norm_local"] = np.exp(0.2 * random.standard_normal(shape))
    sampled = np.arange(steps) % np.array(sampled_every)[:, None] == 0
    present = {
        "grad_norm": sampled & ~(who[:, None] & gone) & normed,
        "update_ratio": sampled,
    }
    return Trace("without gradients", seed, np.arange(steps), series, present)


def stepped_twice(seed: int, *, every: int = 2, norm: float = 1.0, steps: int = 120) -> Trace:
    """Two ranks whose optimizer steps once more after every so many steps, with what is there.

    Args:
        norm: of the gradient that is applied again, over that of the one before.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    again = (each % every == every - 1) & (each > 0)
    norms = np.exp(0.2 * random.standard_normal(steps))
    norms[again] = norm * norms[np.flatnonzero(again) - 1]
    series = {
        "loss": np.tile(1 + 0.05 * random.standard_normal(steps), (2, 1)),
        "grad_norm": np.tile(norms, (2, 1)),
        "grad_cosine": np.tile(np.where(again, 1.0, 0.3), (2, 1)),
    }
    present = {"loss": np.tile(~again, (2, 1))}
    return Trace("stepped twice", seed, each, series, present)


def clipped(
    seed: int,
    *,
    factor: float = 0.02,
    optimizer: str = "SGD",
    gained: float = 0.05,
    steps: int = 320,
) -> Trace:
    """Every gradient is clipped to so much of its length, while so much of the loss is gained."""
    random = np.random.default_rng(seed)
    shape = (2, steps)
    course = 1 - gained * np.linspace(0, 1, steps)
    series = {
        "loss": 2.3 * course + 0.02 * random.standard_normal(shape),
        "clip_coefficient": factor * np.exp(0.2 * random.standard_normal(shape)),
    }
    return Trace("clipped", seed, np.arange(steps), series, config={"optimizer": optimizer})


def loading(
    seed: int,
    *,
    at: int = 120,
    more: float = 0.03,
    creeps: bool = False,
    computes: float = 1.0,
    queued: float = 0.0,
    busier: bool = False,
    steps: int = 280,
) -> Trace:
    """Three ranks on a machine that others use, all of which wait for their data.

    Args:
        more: seconds that each waits longer from `at` on.
        creeps: it comes to that in the course of the run, and not at one step.
        computes: factor of the computing from `at` on.
        queued: seconds of each step that are waited for a processor, somewhere in it; `busier`: of
            those from `at` on alone.
    """
    random = np.random.default_rng(seed)
    shape, late = (3, steps), np.arange(steps) >= at
    slower = more * (np.linspace(0, 1, steps) if creeps else late)
    data = 0.002 * np.exp(0.3 * random.standard_normal(shape)) + slower
    # What it takes to compute varies by more than what is waited: the whole step shows nothing.
    compute = 0.02 * np.exp(0.7 * random.standard_normal((1, steps))) * np.where(late, computes, 1)
    series = {
        "data_seconds": data,
        "compute_seconds": np.repeat(compute, 3, axis=0),
        "step_seconds": data + compute + queued,
    }
    if queued:
        series["queued_seconds"] = np.where(late | (not busier), queued, 0.0) * np.ones(shape)
    return Trace("loading", seed, np.arange(steps), series)


def reaching(
    seed: int,
    *,
    first: float = 1e-4,
    last: float = 0.03,
    size: float = 5000.0,
    begin: int = 0,
    steps: int = 160,
    explained: float = math.nan,
) -> Trace:
    """Two ranks whose outputs grow from one share of their targets to another.

    Args:
        size: of the targets.
        explained: share of their deviance; NaN: not posted.
        begin: first step of the run.
    """
    random = np.random.default_rng(seed)
    course = np.geomspace(first, last, steps) * np.exp(0.1 * random.standard_normal((2, steps)))
    series = {"output_scale": course, "target_size": np.full((2, steps), size)}
    if math.isfinite(explained):
        series["explained_deviance"] = np.full((2, steps), explained)
    return Trace("reaching", seed, begin + np.arange(steps), series)
