"""What is large again and again, losses that blow up and rest, and steps that are all skipped."""

from __future__ import annotations

import numpy as np

from rankscope.server.window import Occurrence
from tests.support.runs.traces import Trace


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
    """A loss that falls, or a norm, that is multiplied at an interval of steps.

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


def running_away(
    seed: int, *, at: int = 90, grows: float = 0.35, lost: int = 0, back: int = 0, steps: int = 160
) -> Trace:
    """A loss that falls from 2.3 to 0.004, and grows by factors from one step on.

    Args:
        grows: its logarithm, a step.
        lost: step from which on it is not a number; 0: none.
        back: step from which on it is what it was; 0: none.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    course = np.log(0.004 + 2.3 * np.exp(-each / 8)) + grows * np.clip(each - at, 0, None)
    if back:
        course[back:] = np.log(0.004)
    loss = np.exp(course + 0.8 * random.standard_normal((2, steps)))
    if lost:
        loss[:, lost:] = np.nan
    return Trace("running away", seed, each, {"loss": loss})


def skipping(seed: int, *, at: int = 60, scale: float = 65536.0, again: int | None = None) -> Trace:
    """A loss scale that holds, until every step is skipped: then nothing has a number any more.

    Args:
        at: the step that does not come, or only late.
        again: this number of steps come after it all the same.
    """
    steps = np.arange(at + (again or 0))
    scales = np.where(steps < at, scale, scale / 2**16) * np.ones((2, 1))
    skipped = np.where(steps < at, 0.0, 16.0) * np.ones((2, 1))
    events = tuple(
        Occurrence(rank, at, "amp.skipping", "", {"skipped": count})
        for count in (16, 32)
        for rank in range(2)
    )
    series = {"amp_scale": scales, "steps_skipped": skipped}
    return Trace("skipping", seed, steps, series, events=events)


def stuck(
    seed: int,
    *,
    since: int = 0,
    until: int = 10_000,
    steps: int = 200,
    ranks: int = 2,
    rank: int | None = None,
    loop: int = 1,
    loader: int = 0,
    stored: int = 0,
    samples: int = 32,
    tokens: int = 0,
    shared: bool = False,
) -> Trace:
    """Ranks whose batches are new ones, but for some steps at which they have one and the same.

    Args:
        rank: the only one that has; None for all.
        loop: batches that come in turn then.
        loader: batches that the loader has; 0: it is not known.
        stored: samples in the memory that a batch is a view of; 0: not known.
        samples: of a batch.
        tokens: of a batch; 0: its samples are no sequences.
        shared: all ranks have the same batches.
    """
    random = np.random.default_rng(seed)
    at = np.arange(steps)
    batches = random.integers(1, 2**62, (ranks, steps), dtype=np.uint64)
    concerned = slice(None) if rank is None else slice(rank, rank + 1)
    held = batches[concerned, since : since + loop]
    for step in range(since, min(until, steps)):
        batches[concerned, step] = held[:, (step - since) % loop]
    if shared:
        batches[:] = batches[0]
    loss = 2.3 * np.exp(0.05 * random.standard_normal((ranks, steps)))
    series = {"loss": loss, "samples": np.full(loss.shape, float(samples))}
    if loader:
        series["loader_batches"] = np.full(loss.shape, float(loader))
    if stored:
        series["samples_stored"] = np.full(loss.shape, float(stored))
    if tokens:
        series["tokens"] = np.full(loss.shape, float(tokens))
    return Trace("stuck", seed, at, series, words={"batch": batches})


def heavy_tails(seed: int, *, since: int = 0, targets: bool = True, steps: int = 600) -> Trace:
    """A squared error and the gradient's norm, of batches of which one in 25 has an outlier.

    Args:
        since: the step from which on there are outliers.
        targets: these are in the targets; else nothing shows in them.
    """
    random = np.random.default_rng(seed)
    at = np.arange(steps)
    course = 2.0 * np.exp(-0.02 * at) + 0.2
    # The end of a Pareto distribution with exponent 1.5, cut: some are 30, some are 300.
    odd = (random.random((2, steps)) < 0.02) & (at >= since)
    outliers = np.where(odd, 30 * np.minimum(random.random((2, steps)) ** (-2 / 3), 10), 0.0)
    noise = np.exp(0.1 * random.standard_normal((2, steps)))
    loss = course * noise + outliers
    scatter = 2.0 * np.exp(0.1 * random.standard_normal((2, steps)))
    norms = np.sqrt(np.mean(loss, axis=0)) * np.exp(0.1 * random.standard_normal(steps))
    series = {
        "loss": loss,
        "target_deviance": scatter + (outliers if targets else 0.0),
        "grad_norm": np.tile(norms, (2, 1)),
    }
    return Trace("heavy tails", seed, at, series)


def margin_kept(seed: int, *, jump: float = 0.0, steps: int = 400) -> Trace:
    """Two ranks whose loss is exactly 0 at most steps, as of a margin that most samples keep.

    Args:
        jump: value of one loss of both ranks at step 300; 0 for none.
    """
    random = np.random.default_rng(seed)
    at = np.arange(steps)
    broken = random.random((2, steps)) < 0.1
    loss = np.where(broken, 0.005 * random.random((2, steps)), 0.0)
    loss[:, :10] += 0.3 * np.exp(-0.5 * at[:10])
    if jump:
        loss[:, 300] = jump
    return Trace("margin kept", seed, at, {"loss": loss})
