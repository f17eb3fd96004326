"""Runs to judge, by name; and recorded trainings and losses of many shapes.

Each generator returns something with `windows(cuts)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rankscope.server.window import Window
from tests.support.runs.beside import beside
from tests.support.runs.chain import chain
from tests.support.runs.checkpoints import loaded_at
from tests.support.runs.courses import (
    answers,
    constant_answers,
    guessing,
    standing,
    thrown_away,
    weights,
    zero_at,
    zeros,
)
from tests.support.runs.in_vain import clipped, loading, reaching, stepped_twice, without_gradients
from tests.support.runs.layered import compressed, layered, noisy_gradients, odd_batches, stages
from tests.support.runs.liveness import failing, silence, stalled
from tests.support.runs.logged import logged
from tests.support.runs.memory import memory
from tests.support.runs.phases import (
    constant_score,
    dying,
    embeddings,
    given_targets,
    given_to_the_loss,
    learned_sooner,
    mixed,
    module_settings,
    next_tokens,
    one_class,
    phases,
    rare_class,
    score,
    silent,
    thrown_back,
    turns,
    unlike_targets,
)
from tests.support.runs.pulling import pulling
from tests.support.runs.pushes import pushes
from tests.support.runs.recurring import (
    blown_up,
    heavy_tails,
    margin_kept,
    running_away,
    skipping,
    stuck,
    teeth,
)
from tests.support.runs.replicas import apart
from tests.support.runs.reported import (
    frozen_written,
    renewed,
    set_back,
    skipped_gradients,
    state_changed,
)
from tests.support.runs.resizing import resized
from tests.support.runs.slow import slow
from tests.support.runs.timings import (
    averages,
    evaluated_nonfinite,
    left_plateau,
    norms,
    played,
    settled,
    timings,
)
from tests.support.runs.traces import Trace
from tests.support.runs.weighted import weighted
from tests.support.runs.written_over import written_over

TRACES = Path(__file__).parents[2] / "server" / "detectors" / "traces"


class Scenario(Protocol):
    def windows(self, cuts: Iterable[int] = ()) -> Iterator[Window]: ...


# --------------------------------------------------------------------------------------- recorded


def recorded(seed: int, *, trace: str) -> Trace:
    """A training that was recorded; it has its own seed."""
    return Trace.load(TRACES / f"{trace}.npz")


def noise(
    seed: int,
    *,
    steps: int = 400,
    ranks: int = 4,
    decay: float = 0.02,
    level: float = 0.05,
    sigma: float = 0.15,
) -> Trace:
    """A loss that falls exponentially to a level, with multiplicative noise on every rank."""
    random = np.random.default_rng(seed)
    course = 2.3 * np.exp(-decay * np.arange(steps)) + level
    loss = course * np.exp(sigma * random.standard_normal((ranks, steps)))
    return Trace("noise", seed, np.arange(steps), {"loss": loss})


def spikes(
    seed: int,
    *,
    at: Sequence[int],
    size: float = 30.0,
    rank: int | None = None,
    restarts: int | None = None,
    later: float = 1.0,
) -> Trace:
    """`noise` with single losses multiplied, on all ranks or on one.

    Args:
        restarts: steps after which the learning rate has come down to nothing and begins anew.
        later: the rate that it begins with from the second time on, over the first one.
    """
    trace = noise(seed)
    if restarts is not None:
        each = np.arange(trace.series["loss"].shape[1])
        rate = 0.05 * (1 + np.cos(np.pi * (each % restarts) / restarts)) + 1e-6
        rate[restarts:] *= later
        trace.series["lr"] = np.tile(rate, (len(trace.series["loss"]), 1))
    loss = trace.series["loss"]
    loss[slice(None) if rank is None else rank, list(at)] *= size
    return trace


def rising(seed: int, *, to: float, at: int = 150, sigma: float = 0.4) -> Trace:
    """A squared error that falls from 17 to 0.8, and climbs from one step on to another level."""
    random = np.random.default_rng(seed)
    each = np.arange(400)
    course = 16.2 * np.exp(-each / 10) + 0.8
    climb = np.clip((each - at) / 50, 0.0, 1.0)
    course = course * (to / 0.8) ** climb
    loss = course * np.exp(sigma * random.standard_normal((2, 400)))
    return Trace("rising", seed, each, {"loss": loss})


def rescaled(
    seed: int,
    *,
    at: int = 200,
    until: int = 400,
    factor: float = 1.0,
    gradient: float | None = None,
    rank: int | None = None,
    decay: float = 0.02,
    beside: str = "",
    worse: float = 0.0,
    learned: float = 0.0,
) -> Trace:
    """`noise` and the norm of its gradient, each multiplied from one step until another.

    Args:
        gradient: factor of the gradient norm; that of the loss by default.
        rank: the only one whose loss is multiplied.
        beside: an accuracy or share of the deviance, 0.6, that is posted at every fourth step.
        worse: by how much that is less from the one step until the other.
        learned: by how much it was less in the first 80 steps.
    """
    trace = noise(seed, decay=decay)
    loss = trace.series["loss"]
    noisy = np.random.default_rng(seed + 1).standard_normal(loss.shape)
    norm = np.sqrt(loss.mean(axis=0)) * np.exp(0.2 * noisy)
    loss[slice(None) if rank is None else rank, at:until] *= factor
    norm[:, at:until] *= factor if gradient is None else gradient
    trace.series["grad_norm_canary"] = norm
    if not beside:
        return trace
    answers = 0.6 + 0.02 * np.random.default_rng(seed + 2).standard_normal(loss.shape)
    answers[:, at:until] -= worse
    answers[:, :80] -= learned
    trace.series[beside] = answers
    posted = np.broadcast_to(trace.steps % 4 == 0, loss.shape).copy()
    return replace(trace, present={**trace.present, beside: posted})


def short_batches(
    seed: int,
    *,
    every: int = 7,
    size: int = 16,
    rest: int = 1,
    sigma: float = 1.0,
    odd: int | None = None,
    factor: float = 1.0,
) -> Trace:
    """Samples whose losses are log-normal; each epoch of `every` steps ends with `rest` of them.

    Args:
        odd: at this step the losses of rank 1 are multiplied by `factor`.
    """
    random = np.random.default_rng(seed)
    steps = np.arange(400)
    sizes = np.where(steps % every == every - 1, rest, size)
    course = 2.3 * np.exp(-0.02 * steps) + 0.05
    loss = np.array(
        [[random.lognormal(0.0, sigma, n).mean() for n in sizes.tolist()] for _ in range(2)]
    )
    loss *= course
    if odd is not None:
        loss[1, odd] *= factor
    seconds = 0.004 + 0.001 * random.random((2, 400))
    series = {"loss": loss, "step_seconds": seconds, "samples_per_second": sizes / seconds}
    return Trace("short_batches", seed, steps, series)


def swinging(
    seed: int,
    *,
    period: float,
    since: int = 150,
    growth: float = 1.0,
    size: float = 0.4,
    cosine: float | None = None,
    steps: int = 400,
) -> Trace:
    """A loss that swings by some share of its start from one step on.

    Args:
        cosine: of the gradients of consecutive steps; None where none is posted.
    """
    trace = noise(seed, level=1.0, steps=steps)
    if cosine is not None:
        scatter = 0.1 * np.random.default_rng(seed + 1).standard_normal((1, steps))
        shape = trace.series["loss"].shape
        trace.series["grad_cosine"] = np.broadcast_to(cosine + scatter, shape).copy()
    at = trace.steps
    swing = size * np.cos(2 * np.pi * at / period) * growth ** np.maximum(at - since, 0)
    trace.series["loss"][:] *= np.exp(np.where(at >= since, swing, 0.0))
    return trace


def changing_sign(seed: int) -> Trace:
    """A surrogate loss around 0, with jumps and swings."""
    random = np.random.default_rng(seed)
    loss = 0.1 * random.standard_normal((4, 400))
    loss[:, 200:] += 0.5 * np.cos(np.pi * np.arange(200))
    loss[:, 320] += 20
    return Trace("changing_sign", seed, np.arange(400), {"loss": loss})


def overflowing(seed: int, *, at: int = 200) -> Trace:
    """The gradient norm is infinite two steps before every rank's loss is NaN."""
    trace = noise(seed)
    norms = np.ones_like(trace.series["loss"])
    norms[:, at - 2 :] = np.inf
    trace.series["loss"][:, at:] = np.nan
    return Trace("overflowing", seed, trace.steps, {**trace.series, "grad_norm": norms})


def infinite_at_once(seed: int, *, times: float = 1e3) -> Trace:
    """A loss that is so many times as large at each step, and infinite from step 3 on."""
    trace = noise(seed, steps=60)
    trace.series["loss"][:, :3] = times ** np.arange(3)
    trace.series["loss"][:, 3:] = np.inf
    return trace


def two_sides(seed: int, *, ranks: int = 4, onset: int = 200) -> Trace:
    """Half of the ranks have another loss than the other half."""
    trace = noise(seed, ranks=ranks)
    trace.series["loss"][ranks // 2 :, onset:] += 1.5
    return trace


def unlike(
    seed: int,
    *,
    first: float = 0.13,
    last: float = 0.27,
    explained: Sequence[float] | None = None,
    sigma: float = 0.12,
) -> Trace:
    """Two ranks whose losses differ from the first step on, by a share of them that grows.

    Args:
        explained: share of the deviance that each rank's answers explain; None: it is not posted.
            With three, there is a third rank that is like the second one.
        sigma: of the logarithm of single losses.
    """
    ranks = 2 if explained is None else len(explained)
    trace = noise(seed, ranks=ranks, decay=0.002, level=1.0, sigma=sigma)
    half = np.linspace(first, last, len(trace.steps)) / 2
    trace.series["loss"][:] *= np.stack([1 + half, *[1 - half] * (ranks - 1)])
    if explained is not None:
        scatter = 0.1 * np.random.default_rng(seed + 1).standard_normal(trace.series["loss"].shape)
        trace.series["explained_deviance"] = np.array(explained)[:, None] + scatter
    return trace


GENERATORS: dict[str, Callable[..., Any]] = {
    generator.__name__: generator
    for generator in (
        recorded,
        beside,
        logged,
        noise,
        spikes,
        rising,
        rescaled,
        short_batches,
        swinging,
        changing_sign,
        overflowing,
        infinite_at_once,
        two_sides,
        unlike,
        apart,
        chain,
        silence,
        stalled,
        failing,
        layered,
        stages,
        odd_batches,
        noisy_gradients,
        compressed,
        timings,
        norms,
        pulling,
        averages,
        loaded_at,
        memory,
        evaluated_nonfinite,
        left_plateau,
        played,
        settled,
        pushes,
        resized,
        weights,
        weighted,
        answers,
        standing,
        constant_answers,
        guessing,
        thrown_away,
        frozen_written,
        skipped_gradients,
        state_changed,
        renewed,
        set_back,
        zeros,
        zero_at,
        heavy_tails,
        margin_kept,
        teeth,
        blown_up,
        running_away,
        skipping,
        stuck,
        learned_sooner,
        unlike_targets,
        phases,
        turns,
        given_targets,
        given_to_the_loss,
        mixed,
        constant_score,
        module_settings,
        next_tokens,
        one_class,
        rare_class,
        dying,
        silent,
        thrown_back,
        clipped,
        loading,
        reaching,
        stepped_twice,
        without_gradients,
        embeddings,
        score,
        written_over,
        slow,
    )
}
