"""Averages of parameters (local SGD, federated averaging) in which ranks count wrongly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    listing,
    number,
    ranks,
    sentences,
)
from rankscope.server.window import Average, Float64, Window

# Share of what the ranks wrote by which their mean may move for rounding: single steps change
# parameters by 1e-4 of their size and more, of which float32 leaves 1e-7.
_EXACT = 0.02
# Averages in a row that moved nothing, or that the same weights explain, before it is a habit.
_HABIT = 3
# Those in a row that break the habit: one may be a checkpoint that is loaded.
_BROKEN = 2
# Weights, times the number of ranks, that are one.
_SAME = 0.02
# How far a multiple is from the mean at the least: `_EXACT` of what was written is more than this.
_UNSCALED = 1e-4
# What a rank may still count, times the number of ranks, that gave an old copy of all parameters.
_OLD = 0.1
# Rounds of the usual interval without it after which it is over.
_CLEAR = 4


@dataclass(slots=True)
class WrongAverage:
    """What was seen.

    Attributes:
        ranks: that are averaged.
        counts: rank -> times what the others count; empty where no weights explain it.
        share: how far the mean moved, over what ranks wrote.
        changed: whether it was right before.
        equal: whether the ranks are known to have as many samples each.
        scale: times the mean that they hold; 1 where it is none.
        earlier: ranks that gave what all held after the average before.
        observed: averages that were so.
    """

    ranks: tuple[int, ...]
    counts: Mapping[int, float]
    share: float
    changed: bool
    equal: bool
    scale: float = 1.0
    earlier: tuple[int, ...] = ()
    observed: int = 0


@dataclass(slots=True)
class _Streak:
    """Averages in a row that were wrong alike; `weights` empty: not explained by any."""

    weights: tuple[float, ...]
    scale: float
    since: int
    count: int = 1


@dataclass(slots=True)
class AveragedParameters(Condition[WrongAverage]):
    """Follows the averages of one replica class.

    Attributes:
        kept: averages in which all ranks counted the same, or by their numbers of samples.
        period: greatest common divisor of the steps between them; 0 before the second.
        last: step of the last of them; -1 for none.
    """

    kept: int = 0
    period: int = 0
    last: int = -1
    streak: _Streak | None = None
    watch: Watch[WrongAverage] = field(default_factory=Watch)

    def take(self, window: Window) -> None:
        """Goes through the averages of a window."""
        for made in window.averages:
            self._judge(window, made)

    def finding(self, episode: Episode[WrongAverage]) -> Finding:
        """What is reported of an episode."""
        return _finding(episode)

    def _judge(self, window: Window, made: Average) -> None:
        if made.apart:
            return  # not all ranks hold it: `desync.parameters` says which
        explained = made.left <= _EXACT and len(made.weights) == len(made.ranks)
        samples = _samples(window, made)
        outer = explained and made.earlier != 0 and _are_equal(made.weights)
        if made.share <= _EXACT or (explained and _are_counts(made.weights, samples)) or outer:
            self.kept += 1
            if self.last >= 0:
                self.period = math.gcd(self.period, made.step - self.last)
            self.last = made.step
            self.streak = None
            self.watch.clear_after = _CLEAR * max(self.period, 1)
            self.watch.good(made.step)
            return
        if self.period and (made.step - self.last) % self.period:
            return  # something else has written them: a checkpoint, a projection
        weights = tuple(float(w) * len(made.ranks) for w in made.weights) if explained else ()
        streak = self.streak
        if (
            streak is not None
            and _alike(streak.weights, weights)
            and abs(streak.scale - made.scale) <= _SAME * abs(streak.scale)
        ):
            streak.count += 1
        else:
            streak = self.streak = _Streak(weights, made.scale, made.step)
        changed = self.kept >= _HABIT
        earlier = _gave_earlier(made, weights)
        # An old copy of all parameters is no chance, however often it was given, nor is a multiple
        # of the mean in all tensors. What is not explained may be an outer optimizer, unless it was
        # not there before.
        certain = earlier or abs(made.scale - 1.0) > _SAME
        least = 1 if changed and certain else _BROKEN if changed else _HABIT
        if streak.count < least or not (changed or weights):
            return
        found = WrongAverage(
            made.ranks,
            _times(made.ranks, weights),
            made.share,
            changed,
            equal=samples is not None and float(np.ptp(samples)) == 0,
            scale=made.scale,
            earlier=earlier,
        )
        episode = self.watch.bad(made.step, found, first_step=streak.since)
        episode.facts.observed = streak.count


def _samples(window: Window, made: Average) -> Float64 | None:
    """Samples that each rank has in a step; None where one does not report them."""
    series = window.series.get("samples")
    if series is None:
        return None
    rows = np.flatnonzero(np.isin(window.ranks, made.ranks))
    column = int(np.searchsorted(window.steps, made.step))
    if column >= len(window.steps) or not series.present[rows, column].all():
        return None
    held: Float64 = series.values[rows, column]
    return held if (held > 0).all() else None


def _are_counts(weights: tuple[float, ...], samples: Float64 | None) -> bool:
    """Whether weights are the ranks' shares of the samples, and these differ."""
    if samples is None or float(np.ptp(samples)) == 0:
        return False
    shares = samples / samples.sum()
    return bool((np.abs(np.array(weights) - shares) * len(shares) <= _SAME).all())


def _are_equal(weights: tuple[float, ...]) -> bool:
    """Whether all ranks count the same, as where an outer optimizer takes its step to the mean."""
    return (max(weights) - min(weights)) * len(weights) <= _SAME


def _gave_earlier(made: Average, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Ranks that count nothing where what all held before counts as much as they should."""
    if not weights or not made.earlier:
        return ()
    who = tuple(rank for rank, w in zip(made.ranks, weights, strict=True) if abs(w) <= _OLD)
    due = len(who) / len(made.ranks)
    return who if 0 < due < 1 and abs(made.earlier - due) <= _OLD else ()


def _alike(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return len(one) == len(other) and all(
        abs(a - b) <= _SAME for a, b in zip(one, other, strict=True)
    )


def _times(members: tuple[int, ...], weights: tuple[float, ...]) -> dict[int, float]:
    """Rank -> times what most count, of those that count otherwise."""
    if not weights:
        return {}
    usual = float(np.median(weights))
    usual = usual if abs(usual) > _SAME else float(np.mean(weights))
    times = {rank: weight / usual for rank, weight in zip(members, weights, strict=True)}
    return {rank: value for rank, value in times.items() if abs(value - 1.0) > 2 * _SAME}


def _finding(episode: Episode[WrongAverage]) -> Finding:
    facts, step = episode.facts, episode.first_step
    odd = facts.earlier or tuple(facts.counts)
    said = listing(
        [
            f"{ranks([rank])} counts {_count_of(times)}"
            for rank, times in sorted(facts.counts.items())
        ],
        most=4,
    )
    if facts.earlier:
        who, several = ranks(facts.earlier), len(facts.earlier)
        title = (
            f"{who.capitalize()} gave old parameters into the average "
            f"{'before' if facts.observed == 1 else 'since'} step {step}"
        )
        cause = (
            f"What the ranks hold after an average of their parameters has nothing of what {who} "
            f"{agree(several, 'has')} learned since the average before, and that older one in its "
            "place: a copy of the weights that was not brought up to date, or weights that were "
            "loaded back."
        )
    elif abs(facts.scale - 1.0) > _UNSCALED:
        title = (
            f"The average of the parameters is {number(facts.scale)} times the ranks' mean "
            f"{'before' if facts.observed == 1 else 'since'} step {step}"
        )
        cause = (
            "What the ranks hold after an average of their parameters is a multiple of the mean of "
            f"what they held before: {number(facts.scale)} times, in all tensors alike. The sum "
            "was divided by another number than that of the ranks that take part, or a rank gave "
            "nothing (zeros)."
        )
    elif facts.counts:
        title = f"In the average of the parameters {said} since step {step}"
        cause = (
            f"What the ranks hold after an average of their parameters is a weighted sum of what "
            f"they held before, in which {said}: its parameters are added more than once, or not "
            "at all, or are weighted by a number that is not the same for all."
        )
    else:
        title = f"The average of the parameters is not the ranks' mean since step {step}"
        cause = (
            "What the ranks hold after an average of their parameters is no sum of what they held "
            f"before: it lies {number(facts.share)} of what ranks were moved by from their mean. "
            "A rank has contributed other parameters than it trains (an old copy, a snapshot, "
            "those of another round), the sum was divided by another number than that of the "
            "ranks, or something was added."
        )
    return episode.finding(
        kind="reduction.wrong",
        key="averages",
        severity="warning" if facts.changed or facts.equal else "info",
        title=title,
        ranks=odd or facts.ranks,
        stage="outside_optimizer",
        cause=sentences(
            cause,
            "An average leaves the mean of all ranks where it was, whatever each of them has "
            "learned; at the averages before it did."
            if facts.changed
            else "That was so from the first averages on, and may be meant.",
            f"It was seen at {count(facts.observed, 'average')}.",
        ),
        remedy=(
            f"Look at what {ranks(odd or facts.ranks)} gives into the average: the parameters of "
            "now, once, divided by the number of ranks that take part. An all-reduce of the "
            "parameters themselves (`dist.all_reduce(p); p /= world_size`) needs no copy."
        ),
        evidence={
            "pattern": "averages",
            "odd": {str(rank): times for rank, times in facts.counts.items()},
            "share": facts.share,
            "scale": facts.scale,
            "observed": facts.observed,
        },
    )


def _count_of(times: float) -> str:
    if abs(times) <= 2 * _SAME:
        return "nothing"
    return f"{number(times)} times"
