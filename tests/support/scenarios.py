"""Runs to judge, by name: recorded trainings, ranks that diverge, ranks that fall silent.

Each generator returns something with `windows(cuts)`. What is compared is computed from arrays that
really differ, by the server's own `compare` module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison import compare
from rankscope.server.window import Comparison, Occurrence, RankLiveness, Series, Window
from tests.support.chain import chain
from tests.support.courses import answers, constant_answers, thrown_away, weights, zero_at, zeros
from tests.support.layered import compressed, layered, noisy_gradients, odd_batches
from tests.support.logged import logged
from tests.support.phases import (
    dying,
    given_to_the_loss,
    mixed,
    one_class,
    phases,
    turns,
    unlike_targets,
)
from tests.support.pushes import pushes
from tests.support.recurring import blown_up, skipping, stuck, teeth
from tests.support.reported import frozen_written, set_back, skipped_gradients, state_changed
from tests.support.resizing import resized
from tests.support.timings import (
    averages,
    evaluated_nonfinite,
    left_plateau,
    norms,
    played,
    settled,
    timings,
)
from tests.support.traces import Trace
from tests.support.weighted import weighted

TRACES = Path(__file__).parents[1] / "server" / "detectors" / "traces"


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


def spikes(seed: int, *, at: Sequence[int], size: float = 30.0, rank: int | None = None) -> Trace:
    """`noise` with single losses multiplied, on all ranks or on one."""
    trace = noise(seed)
    loss = trace.series["loss"]
    loss[slice(None) if rank is None else rank, list(at)] *= size
    return trace


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
    steps: int = 400,
) -> Trace:
    """A loss that swings by some share of its start from one step on."""
    trace = noise(seed, level=1.0, steps=steps)
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


def two_sides(seed: int, *, ranks: int = 4, onset: int = 200) -> Trace:
    """Half of the ranks have another loss than the other half."""
    trace = noise(seed, ranks=ranks)
    trace.series["loss"][ranks // 2 :, onset:] += 1.5
    return trace


def unlike(seed: int, *, first: float = 0.13, last: float = 0.27) -> Trace:
    """Two ranks whose losses differ from the first step on, by a share of them that grows."""
    trace = noise(seed, ranks=2, decay=0.002, level=1.0, sigma=0.12)
    half = np.linspace(first, last, len(trace.steps)) / 2
    trace.series["loss"][:] *= np.stack([1 + half, 1 - half])
    return trace


# ------------------------------------------------------------------------------------------- apart

NAMES = ("embed.weight", "hidden.weight", "hidden.bias", "output.weight", "output.bias", "scale")
SHAPES = ((20, 16), (16, 16), (16,), (10, 16), (10,), (1,))
_TABLE = compare.LabelledTable(NAMES, SHAPES, ("parameters",) * len(NAMES))
_BUCKETS = 32
_COUNTS = tuple(int(np.prod(shape)) for shape in SHAPES)
_SIGNS = tuple(np.random.default_rng(n).choice([-1.0, 1.0], n) for n in _COUNTS)
_PLACES = tuple(np.arange(n) % _BUCKETS for n in _COUNTS)
_WEIGHTS = tuple(
    np.arange(1, 2 * n, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) for n in _COUNTS
)

Tensors = list[np.ndarray]


@dataclass
class _Model:
    """What one rank holds: parameters, momentum, and what it reports of them."""

    tensors: Tensors
    velocity: Tensors


def _words_of(values: Tensors) -> np.ndarray:
    return np.array(
        [
            (v.astype(np.float32).ravel().view(np.uint32).astype(np.uint64) * weight).sum()
            for v, weight in zip(values, _WEIGHTS, strict=True)
        ],
        dtype=np.uint64,
    )


def _print_of(step: int, stage: str, values: Tensors) -> wire.Fingerprint:
    sketches = np.zeros((len(values), _BUCKETS))
    for row, (tensor, signs) in enumerate(zip(values, _SIGNS, strict=True)):
        flat = tensor.astype(np.float32).astype(np.float64).ravel()
        sketches[row] = np.bincount(_PLACES[row], weights=signs * flat, minlength=_BUCKETS)
    return wire.Fingerprint(
        step=step, stage=stage, table="parameters", digests=_words_of(values), sketches=sketches
    )


def apart(
    seed: int,
    *,
    fault: str = "none",
    ranks: int = 4,
    rank: int = 2,
    at: int = 40,
    steps: int = 120,
    tensor: str = "hidden.weight",
    words_every: int = 1,
    prints_every: int = 16,
    dense: int = 8,
    synchronised_every: int = 0,
    repaired_at: int = -1,
    buffers: str = "",
    wrapped: bool = True,
) -> Trace:
    """Ranks that train a small model by momentum, and one of them (or all) leaves the others.

    With `buffers` each keeps running statistics, too: `alike`, of its `own` batches, or the `one`
    rank's are its own for ten steps. Where they are not `wrapped`, they say that nothing keeps them
    equal.

    Everything is a real float32 computation: gradients of noise around a quadratic, averaged unless
    the fault is that they are not.
    """
    random = np.random.default_rng(seed)
    target = NAMES.index(tensor)
    start = [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    models = [
        _Model([t.copy() for t in start], [np.zeros_like(t) for t in start]) for _ in range(ranks)
    ]
    everyone = np.arange(ranks, dtype=np.int64)
    statistics = [[np.zeros_like(t) for t in start] for _ in range(ranks)]
    found: list[Comparison] = []
    rates = np.full((ranks, steps), 0.05)
    norms = np.zeros((ranks, steps))

    def compare_now(step: int, stage: str, values: list[Tensors], *, tensorwise: bool) -> None:
        if tensorwise:
            prints = [_print_of(step, stage, v) for v in values]
            found.append(compare.compare_fingerprints(step, stage, everyone, prints, _TABLE))
        else:
            words = compare.fold(np.stack([_words_of(v) for v in values]))
            found.append(compare.compare_digests(step, stage, everyone, words))

    if fault == "start":
        models[rank].tensors = [
            random.standard_normal(shape).astype(np.float32) for shape in SHAPES
        ]
    compare_now(0, "start", [m.tensors for m in models], tensorwise=True)
    for step in range(steps):
        tensorwise = step < dense or step % prints_every == 0
        words = tensorwise or step % words_every == 0
        if fault in ("bitflip", "bitflip-unseen") and step == at:
            flat = models[rank].tensors[target].view(np.uint32).ravel()
            flat[random.integers(flat.size)] ^= np.uint32(1 << 20)
        if fault == "written" and step == at:
            models[rank].tensors[target] *= np.float32(0.99)
        if fault != "bitflip-unseen" and words:
            touched = fault in ("bitflip", "written") and step == at
            before = np.zeros(ranks, dtype=np.uint64)
            before[rank] = 12345 if touched else 0
            found.append(compare.compare_digests(step, "outside_optimizer", everyone, before))
        local = [
            [(0.05 * m + random.standard_normal(m.shape)).astype(np.float32) for m in model.tensors]
            for model in models
        ]
        mean = [np.mean([g[i] for g in local], axis=0, dtype=np.float32) for i in range(len(NAMES))]
        applied = [[g.copy() for g in mean] for _ in range(ranks)]
        if fault == "skipped" and step == at:
            applied[rank][target] = local[rank][target]
        if fault == "bypassed" and step >= at:
            applied = local
        if fault == "subgroups" and step >= at:
            half = ranks // 2
            for side in (range(half), range(half, ranks)):
                part = [
                    np.mean([local[r][i] for r in side], axis=0, dtype=np.float32)
                    for i in range(len(NAMES))
                ]
                for r in side:
                    applied[r] = [g.copy() for g in part]
        if synchronised_every and fault in ("none", "missed", "rate"):
            applied = local
        if fault == "rate" and step >= at:
            rates[rank, step:] = 0.02
        for r, model in enumerate(models):
            norms[r, step] = np.sqrt(
                sum(float((g.astype(np.float64) ** 2).sum()) for g in applied[r])
            )
            for i, gradient in enumerate(applied[r]):
                model.velocity[i] = np.float32(0.9) * model.velocity[i] + gradient
                if fault == "state" and r == rank and step == at:
                    model.velocity[i] = np.zeros_like(gradient)
                update = np.float32(rates[r, step]) * model.velocity[i]
                if fault == "drift" and r == rank and step >= at:
                    update = update * np.float32(1 + 2e-7)
                if fault == "step-skipped" and r == rank and step == at:
                    update = np.zeros_like(update)
                model.tensors[i] = (model.tensors[i] - update).astype(np.float32)
        if synchronised_every and step % synchronised_every == synchronised_every - 1:
            together = [
                np.mean([m.tensors[i] for m in models], axis=0, dtype=np.float32)
                for i in range(len(NAMES))
            ]
            for r, model in enumerate(models):
                if not (fault == "missed" and r == rank and step >= at):
                    model.tensors = [t.copy() for t in together]
        if step == repaired_at:
            for model in models:
                model.tensors = [t.copy() for t in models[(rank + 1) % ranks].tensors]
                model.velocity = [t.copy() for t in models[(rank + 1) % ranks].velocity]
        if tensorwise:
            compare_now(step, "reduced_gradient", applied, tensorwise=True)
        else:
            found.append(
                compare.compare_values(
                    step, "reduced_gradient", everyone, norms[:, step], tolerance=1e-6
                )
            )
        if fault == "state":
            words_of_state = compare.fold(np.stack([_words_of(m.velocity) for m in models]))
            found.append(compare.compare_digests(step, "optimizer_state", everyone, words_of_state))
        found.append(
            compare.compare_values(
                step, "hyperparameters", everyone, rates[:, step], tolerance=1e-12
            )
        )
        for r in range(ranks) if buffers else ():
            own = buffers == "own" or (buffers == "one" and r == rank and at <= step < at + 10)
            statistics[r] = [
                np.float32(0.9 if own else 0) * kept + np.float32(0.1) * new
                for kept, new in zip(statistics[r], local[r] if own else mean, strict=True)
            ]
        if words and buffers:
            compare_now(step, "buffers", statistics, tensorwise=tensorwise)
        if words:
            compare_now(step, "parameters", [m.tensors for m in models], tensorwise=tensorwise)
    course = (
        2.0
        * np.exp(-0.02 * np.arange(steps))
        * np.exp(0.1 * random.standard_normal((ranks, steps)))
    )
    return Trace(
        f"apart-{fault}",
        seed,
        np.arange(steps),
        {"loss": course, "lr": rates, "grad_norm": norms},
        comparisons=tuple(found),
        config={} if wrapped else {"data_parallel": {}},
    )


# ------------------------------------------------------------------------------------------ silent


@dataclass(frozen=True)
class Timeline:
    """Evaluations once a second; what each rank last said is a function of time.

    Attributes:
        seconds: how long it goes.
        lives: the ranks' lives at a time.
        away: times at which the server does not evaluate.
        told: events that are reported, with the time at which they come.
        step_seconds: what every rank says that a step takes.
    """

    world_size: int
    seconds: int
    lives: Callable[[float], list[RankLiveness]]
    away: range = range(0)
    told: tuple[tuple[float, Occurrence], ...] = ()
    step_seconds: float = 1.0

    def windows(self, cuts: Iterable[int] = ()) -> Iterator[Window]:
        """One a second; `cuts` mean nothing here."""
        evaluated = -1
        for second in range(self.seconds):
            if second in self.away:
                continue
            lives = self.lives(float(second))
            through = max([evaluated, *(life.last_step for life in lives)])
            steps = np.arange(evaluated + 1, through + 1, dtype=np.int64)
            evaluated = through
            ranks = np.array([life.rank for life in lives], dtype=np.int64)
            shape = len(ranks), len(steps)
            there = np.ones(shape, dtype=bool)
            yield Window(
                world_size=self.world_size,
                ranks=ranks,
                steps=steps,
                series={
                    "loss": Series(np.ones(shape), there),
                    "step_seconds": Series(np.full(shape, self.step_seconds), there),
                },
                liveness=tuple(lives),
                now=float(second),
                last_step=evaluated,
                events=tuple(event for at, event in self.told if int(at) == second),
            )


def silence(
    seed: int,
    *,
    ranks: int = 4,
    rank: int = 1,
    at: float = 60.0,
    back: float = 1e9,
    others: str = "wait",
    later: float = 0.0,
    seconds: int = 200,
    gap: float = 2.0,
    long_gap: float = 4.0,
    never: bool = False,
    away: Sequence[int] = (),
    hosts: int = 1,
    left: str = "",
) -> Timeline:
    """One rank says nothing more from a time on.

    Args:
        seed: not used; times are what they are.
        others: what the other ranks do: `wait` (heartbeats without progress), `go-on`, `fail`
            (3 s later), `finish` (at `at`), or `stop` (fall silent with it, or `later` seconds
            later).
        never: the rank is never heard of at all.
        away: first and last second of an absence of the server, in which no post arrives.
        left: state of two more ranks that the job had before it was started again without them.
    """
    pause = range(away[0], away[1]) if away else range(0)

    def posted(time: float, until: float) -> float:
        """Time of the last post up to `time`, if posts end at `until`."""
        last = min(time, until)
        last -= last % gap
        while int(last) in pause and last > 0:
            last -= gap
        return max(last, 0.0)

    def lives(time: float) -> list[RankLiveness]:
        found = []
        if left:
            found = [RankLiveness(r, 0.0, 0.0, 36, state=left) for r in (ranks, ranks + 1)]
        for r in range(ranks):
            suspects = r == rank
            if suspects and never:
                continue
            state, error = "running", ""
            until = 1e9
            if suspects or others == "stop":
                until = at if suspects else at + later
            elif others == "fail" and time >= at + 3:
                state, error, until = "failed", "RuntimeError: Connection closed by peer", at + 3
            elif others == "fail-before" and time >= at - 20:
                state, error, until = "failed", "ValueError: no more data", at - 20
            elif others == "finish" and time >= at:
                state, until = "finished", at
            if suspects and time >= back:
                until = 1e9
            stopped = at if others in ("wait", "fail", "finish", "stop") else 1e9
            step = int(10 * posted(time, min(until, stopped if time < back else 1e9)))
            if not suspects and others in ("wait", "fail"):
                # Its last report was lost with it; the others got as far as they could without it.
                step = min(
                    int(10 * posted(time, until)), int(10 * at) + 3 if time < back else 10**9
                )
            found.append(
                RankLiveness(
                    rank=r,
                    first_seen=0.0,
                    last_seen=posted(time, until),
                    last_step=step,
                    state=state,
                    error=error,
                    phase="backward",
                    host=f"node{r * hosts // ranks}",
                    heartbeat_seconds=2.0,
                    longest_gap=long_gap,
                    typical_gap=gap,
                )
            )
        return sorted(found, key=lambda life: life.rank)

    return Timeline(world_size=ranks, seconds=seconds, lives=lives, away=pause)


def stalled(
    seed: int,
    *,
    ranks: int = 4,
    rank: int = 1,
    elsewhere: str = "idle",
    waiting: str = "collective",
    back: float = 1e9,
    fails: float = 1e9,
    done: bool = False,
    first: int = 31,
    takes: float = 1.0,
    again: float = 1e9,
    seconds: int = 200,
) -> Timeline:
    """A step a second; from second 30 on all but one wait, in step 31.

    Args:
        elsewhere: phase of that one; `collective`: another one, `same`: where the others are.
        waiting: phase of the others.
        back: time from which on they all go on.
        fails: time at which the others' collective times out.
        done: it has said that it is done.
        first: the step in which they wait.
        takes: what a step takes, as the ranks report it, seconds.
        again: time at which all processes are replaced by new ones that begin ten steps earlier.
    """

    def lives(time: float) -> list[RankLiveness]:
        last = 30 if 30 <= time < back else int(min(time, 30) + max(time - back, 0))
        last = min(last, first - 1) if time < back else last
        anew = time >= again
        if anew:
            last = first - 10
        found = []
        for r in range(ranks):
            ended = "finished" if done and r == rank and time >= 31 else "running"
            state = "failed" if time >= fails and r != rank else ended
            began = again if anew else 0.0
            life = RankLiveness(r, began, time, last, state, error="timed out", attempt=int(anew))
            found.append(life)
        return found

    told = []
    for r in range(ranks):
        odd = r == rank and elsewhere != "same"
        place = "evaluate (train.py:40)" if odd else "reduce (train.py:12)"
        data = {"phase": elsewhere if odd else waiting, "step": first, "seconds": 10.0}
        if not (done and r == rank):
            told.append((41.0, Occurrence(r, first - 1, "stalled", place, data, 41.0)))
    return Timeline(
        world_size=ranks, seconds=seconds, lives=lives, told=tuple(told), step_seconds=takes
    )


def failing(
    seed: int,
    *,
    ranks: int = 3,
    errors: Mapping[int, str],
    after: Mapping[int, float] | None = None,
    finished: Sequence[int] = (),
    silent: Sequence[int] = (),
    at: float = 20.0,
    again: float = 1e9,
    seconds: int = 60,
) -> Timeline:
    """A step a second, until ranks fail in step 21.

    Args:
        errors: rank -> what it says that it failed of.
        after: rank -> seconds after `at`.
        finished: ranks that have ended before as they should.
        silent: ranks of which nothing is heard from then on.
        again: time at which those that failed are started again.
    """
    later = after or {}

    def lives(time: float) -> list[RankLiveness]:
        found = []
        for r in range(ranks):
            ends = at + later.get(r, 0.0) if r in errors else at
            state, error, seen, attempt = "running", "", time, 0
            if r in errors and time >= ends:
                state, error, seen = "failed", errors[r], ends
            elif r in finished and time >= at - 1:
                state, seen = "finished", at - 1
            elif r in silent and time >= at:
                seen = at
            if time >= again and state == "failed":
                state, error, seen, attempt = "running", "", time, 1
            last = int(min(time, at))
            found.append(RankLiveness(r, 0.0, seen, last, state, error=error, attempt=attempt))
        return found

    told = tuple(
        (
            at + later.get(r, 0.0),
            Occurrence(r, 21, "failed", "train (train.py:12)", {}, at + later.get(r, 0.0)),
        )
        for r in errors
    )
    return Timeline(world_size=ranks, seconds=seconds, lives=lives, told=told)


GENERATORS: dict[str, Callable[..., Any]] = {
    generator.__name__: generator
    for generator in (
        recorded,
        logged,
        noise,
        spikes,
        short_batches,
        swinging,
        changing_sign,
        overflowing,
        two_sides,
        unlike,
        apart,
        chain,
        silence,
        stalled,
        failing,
        layered,
        odd_batches,
        noisy_gradients,
        compressed,
        timings,
        norms,
        averages,
        evaluated_nonfinite,
        left_plateau,
        played,
        settled,
        pushes,
        resized,
        weights,
        weighted,
        answers,
        constant_answers,
        thrown_away,
        frozen_written,
        skipped_gradients,
        state_changed,
        set_back,
        zeros,
        zero_at,
        teeth,
        blown_up,
        skipping,
        stuck,
        unlike_targets,
        phases,
        turns,
        given_to_the_loss,
        mixed,
        one_class,
        dying,
    )
}
