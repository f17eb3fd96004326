"""Figures from the times of a noisy machine.

Steps with and without the agent take turns, and the ratio of two neighbours is the most precise
figure.

For what cannot be said of pairs, every step's time is divided by the pace of its round, so that a
machine that is slow for a second is slow for both sides: the geometric mean of the medians of both.
(The plain median alone would be unfair: it would make the plain times keep closer together than the
others, and two equal arms would differ in their slow steps.) All uncertainty comes from drawing
whole rounds again: neighbouring steps are not independent.

The work of the agent's threads falls into steps of all arms. Each step knows whether it was hit by
it. Steps without the agent count only where they were not, and the hit steps of the agent's own
stand for all: they get the weight that hit steps have among the steps of all arms. For posts come
by the clock: with the agent alone there would be no more of them, but each would carry what is
recorded in all of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
# A step is slow when it takes this much longer than the plain median.
SLOW = 1.2
_DRAWS = 400
# Parts of a stretch of steps that are drawn again as a whole.
_PIECES = 40
_LEAST_STEPS = {"p99": 200, "p99.9": 2000}


@dataclass
class Steps:
    """Steps of one arm in one round.

    Attributes:
        seconds: of each step, [n].
        hit: whether a thread of the agent worked during the step, on any rank, [n].
        processor: processor time of rank 0's process in each step, without the agent's threads,
            [n]; empty where it was not measured.
        phases: processor time of rank 0's training thread in each part of each step, [n, parts];
            empty where it was not measured.
        sampled: whether the agent sampled the step on rank 0, [n]; empty where that is not known.
        worked: seconds that threads and uploaders of the agent worked during the step, those of
            all ranks together, [n]; empty where it was not measured.
    """

    seconds: Floats
    hit: Bools
    processor: Floats = field(default_factory=lambda: np.empty(0))
    phases: Floats = field(default_factory=lambda: np.empty((0, 0)))
    sampled: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    worked: Floats = field(default_factory=lambda: np.empty(0))


Round = dict[str, Steps]


def compared(rounds: Sequence[Round], arm: str, *, seed: int = 0) -> dict[str, Any]:
    """One arm against the plain one.

    Returns:
        For each figure its value and a 95 % interval: ratios of medians, of means, of the 99th and
        of the 99.9th percentile, and how many steps in a thousand are slower than `SLOW` times the
        plain median more than without it. A percentile that the steps are too few for is None. And
        `steps`, of the arm.
    """
    rounds = [r for r in rounds if arm in r]
    pace = [np.sqrt(np.median(_clean(r["plain"])) * np.median(_clean(r[arm]))) for r in rounds]
    plain = [r["plain"].seconds / unit for r, unit in zip(rounds, pace, strict=True)]
    other = [r[arm].seconds / unit for r, unit in zip(rounds, pace, strict=True)]
    hits = [{name: steps.hit for name, steps in r.items()} for r in rounds]

    def figures(chosen: npt.NDArray[np.int64]) -> dict[str, float]:
        hit_plain = np.concatenate([hits[i]["plain"] for i in chosen])
        a = np.concatenate([plain[i] for i in chosen])[~hit_plain]
        b = np.concatenate([other[i] for i in chosen])
        hit = np.concatenate([hits[i][arm] for i in chosen])
        if arm == "agent":
            every = np.concatenate([h for i in chosen for h in hits[i].values()])
            weights = _weights(hit, float(every.mean()))
        else:
            b, weights = b[~hit], np.ones(int((~hit).sum()))
        ones = np.ones(len(a))
        quantile = _quantile
        middle = quantile(a, ones, 0.5)
        slow = SLOW * middle
        return {
            "median": quantile(b, weights, 0.5) / middle,
            "mean": float(np.average(b, weights=weights) / a.mean()),
            "p99": quantile(b, weights, 0.99) / quantile(a, ones, 0.99),
            "p99.9": quantile(b, weights, 0.999) / quantile(a, ones, 0.999),
            "slow_per_1000": 1e3 * float(np.average(b > slow, weights=weights) - (a > slow).mean()),
        }

    count = sum(len(part) for part in other)
    result: dict[str, Any] = {"steps": count}
    return result | _with_intervals(figures, len(rounds), count, seed)


def paired(rounds: Sequence[Round], arm: str, *, seed: int = 0) -> dict[str, Any]:
    """The median of the ratios of neighbouring steps, one of an arm and one without it.

    Where step times have several modes, medians of all of them fall between two modes and move far
    with a small change in how often each occurs; neighbours are in the same mode more often than
    not, so that this is more precise for as many steps.

    Args:
        rounds: steps of the arms `plain` and `arm` in pairs.

    Returns:
        `value`, `low` and `high`; and `pairs`, their number. Hit steps of the arm weigh as in
        `compared`.
    """
    ratios = [np.log(r[arm].seconds / r["plain"].seconds) for r in rounds]
    hits = [{name: steps.hit for name, steps in r.items()} for r in rounds]

    def figures(chosen: npt.NDArray[np.int64]) -> dict[str, float]:
        clean = ~np.concatenate([hits[i]["plain"] for i in chosen])
        ratio = np.concatenate([ratios[i] for i in chosen])[clean]
        hit = np.concatenate([hits[i][arm] for i in chosen])[clean]
        every = np.concatenate([h for i in chosen for h in hits[i].values()])
        return {"ratio": float(np.exp(_quantile(ratio, _weights(hit, float(every.mean())), 0.5)))}

    count = sum(len(r) for r in ratios)
    result: dict[str, Any] = _with_intervals(figures, len(rounds), count, seed)["ratio"]
    return result | {"pairs": count}


def slow_alone(
    stretches: Sequence[Steps], samples: Sequence[npt.NDArray[np.int64]], *, seed: int = 0
) -> dict[str, Any]:
    """What steps of a training with the agent alone are slow because of it.

    The sharpest measure of slow steps there is: all others are the same training at the same time.

    Args:
        stretches: steps of a training with the agent, one after the other.
        samples: how many tiers it sampled at each step of each stretch, 0 for none, -1 where it did
            what a sample before had left over, [n].

    Returns:
        With 95 % intervals, in a thousand steps: `hit`, those during which its threads or its
        uploader ran; `slow`, those that take more than `SLOW` times the median because of that,
        which is the share of hit steps times (slow ones among them less slow ones among the
        others); `over_limit`, those with a sample of a kind that lengthens the median step by more
        than `SLOW` says; `overworked`, those in which its threads and uploaders worked longer than
        that on all ranks together: the others they cannot have lengthened that much, had they all
        worked one after the other while the training stood still. `hit_length`, the median of hit
        steps to that of those that are neither hit nor sampled: where times vary much, many of
        them are slow that would nearly have been slow by themselves. `sampled_length`, the same of
        steps with a sample of losses and rates alone; 1 where there is none. And `steps`.
    """
    parts: list[tuple[Floats, Bools, npt.NDArray[np.int64], Floats]] = []
    for steps, sample in zip(stretches, samples, strict=True):
        # Pieces of a stretch, each with the pace that the machine had then.
        for piece in np.array_split(np.arange(len(steps.seconds)), _PIECES):
            if not len(piece):
                continue
            seconds = steps.seconds[piece]
            plain = seconds[(sample[piece] == 0) & ~steps.hit[piece]]
            unit = np.median(plain if len(plain) else seconds)
            parts.append(
                (seconds / unit, steps.hit[piece], sample[piece], steps.worked[piece] / unit)
            )

    def figures(chosen: npt.NDArray[np.int64]) -> dict[str, float]:
        relative, hit, sample, worked = (
            np.concatenate([parts[i][k] for i in chosen]) for k in range(4)
        )
        is_slow, share = relative > SLOW, float(hit.mean())
        more = float(is_slow[hit].mean() - is_slow[~hit].mean()) if 0 < share < 1 else 0.0
        kinds = [(sample == k) & ~hit for k in (1, 2, 3, 4, 5, -1)]
        over_limit = sum(int(k.sum()) for k in kinds if k.any() and np.median(relative[k]) > SLOW)
        lengths = (float(np.median(relative[k])) if k.any() else 1.0 for k in (hit, kinds[0]))
        hit_length, sampled_length = lengths
        return {
            "hit": 1e3 * share,
            "slow": 1e3 * share * more,
            "over_limit": 1e3 * over_limit / len(sample),
            "overworked": 1e3 * float((worked > SLOW - 1).mean()),
            "hit_length": hit_length,
            "sampled_length": sampled_length,
        }

    count = sum(len(steps.seconds) for steps in stretches)
    result: dict[str, Any] = {"steps": count}
    return result | _with_intervals(figures, len(parts), count, seed)


def processor_share(
    rounds: Sequence[Round], background: float, phases: Sequence[str]
) -> dict[str, Any]:
    """Processor time of rank 0 with the agent, its threads included, to that without.

    What other processes take from this one is not in it, so it is the steadiest figure of all on a
    busy machine; what the agent makes the other rank wait is not in it either.

    Args:
        rounds: steps of the arms `plain` and `agent` in pairs.
        background: seconds of the agent's threads for each of its steps.
        phases: names of the parts of a step.

    Returns:
        `ratio` of the means; in microseconds by how much the two steps of a pair differ on the
        training thread where the agent does not sample, in the median: for each of `phases` and, as
        `step`, for all of them; `sampled_step`, the same where it samples, without what the steps
        before and after do for it; and `samples`, how many of its steps those are, in a thousand.
        None where there are no such steps. A part that the agent has no business in shows how much
        of the others is noise, and whether the agent's memory is in the training's way.
    """
    plain = [r["plain"].processor for r in rounds]
    more = [r["agent"].processor - r["plain"].processor for r in rounds]
    parts = [r["agent"].phases - r["plain"].phases for r in rounds]
    samples = [r["agent"].sampled for r in rounds]

    def figures(chosen: npt.NDArray[np.int64]) -> dict[str, float]:
        extra = np.concatenate([more[i] for i in chosen])
        each = 1e6 * np.concatenate([parts[i] for i in chosen])
        whole = float(np.concatenate([plain[i] for i in chosen]).mean())
        sampled = np.concatenate([samples[i] for i in chosen])
        each = np.column_stack([each.sum(axis=1), each])
        seen, passed = (
            np.median(each[rows], axis=0) if rows.any() else np.full(len(phases) + 1, np.nan)
            for rows in (sampled, ~sampled)
        )
        return {
            "ratio": 1 + (float(extra.mean()) + background) / whole,
            "samples": 1e3 * float(sampled.mean()),
            "sampled_step": float(seen[0]),
            **dict(zip(("step", *phases), passed.tolist(), strict=True)),
        }

    return _with_intervals(figures, len(rounds), len(rounds), 0)


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    values = 1e6 * np.asarray(seconds)
    return {"median_us": float(np.median(values)), "p99_us": float(np.quantile(values, 0.99))}


def _with_intervals(
    figures: Callable[[npt.NDArray[np.int64]], dict[str, float]], rounds: int, steps: int, seed: int
) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    drawn = [figures(draw.integers(rounds, size=rounds)) for _ in range(_DRAWS)]
    result: dict[str, Any] = {}
    for name, value in figures(np.arange(rounds)).items():
        if np.isnan(value) or steps < _LEAST_STEPS.get(name, 0):
            result[name] = None
            continue
        low, high = np.nanquantile([d[name] for d in drawn], [0.025, 0.975])
        result[name] = {"value": value, "low": float(low), "high": float(high)}
    return result


def _clean(steps: Steps) -> Floats:
    clean = steps.seconds[~steps.hit]
    return clean if len(clean) else steps.seconds


def _weights(hit: Bools, share: float) -> Floats:
    """Weights that give hit steps the share that they would have in a run of the agent alone."""
    seen = float(hit.mean())
    if not 0 < seen < 1 or share >= 1:
        return np.ones(len(hit))
    return np.where(hit, share / seen, (1 - share) / (1 - seen))


def _quantile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(reached, share * reached[-1])]])
