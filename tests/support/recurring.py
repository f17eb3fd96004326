"""Losses and gradient norms that are large again and again, and losses that blow up and rest."""

from __future__ import annotations

import numpy as np

from tests.support.traces import Trace


def teeth(
    seed: int,
    *,
    metric: str = "loss",
    every: int = 4,
    share: float = 0.0,
    since: int = 0,
    factor: float = 10.0,
    decay: float = 0.02,
    level: float = 0.5,
    sigma: float = 0.15,
    steps: int = 400,
    ranks: int = 2,
) -> Trace:
    """A loss that falls, or a norm, that is multiplied at every so many steps.

    Args:
        share: of the steps, drawn at random, where `every` is 0.
        since: the first step at which it may be.
        factor: what it is multiplied by.
        decay, level: of the course; the course falls from 2.3 to the level.
    """
    random = np.random.default_rng(seed)
    at = np.arange(steps)
    course = 2.3 * np.exp(-decay * at) + level
    large = at % every == 0 if every else random.random(steps) < share
    values = course * np.where(large & (at >= since), factor, 1.0)
    noisy = values * np.exp(sigma * random.standard_normal((ranks, steps)))
    return Trace(f"teeth-{metric}", seed, at, {metric: noisy})


def blown_up(
    seed: int, *, at: int = 5, peak: float = 1e8, rest: float = 1e4, steps: int = 300
) -> Trace:
    """A loss of 2.3 that explodes, comes back a part of the way, and scatters there for ever."""
    random = np.random.default_rng(seed)
    since = np.arange(steps) - at
    high = rest + peak * np.exp(-np.clip(since, 0, None) / 10)
    course = np.where(since < 0, 2.3, high)
    loss = course * np.exp(np.where(since < 0, 0.05, 0.5) * random.standard_normal((2, steps)))
    return Trace("blown_up", seed, np.arange(steps), {"loss": loss})
