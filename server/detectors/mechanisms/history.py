"""What detectors remember beside the series that they judge."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.mechanisms.statistics import mean_over_ranks
from rankscope.server.detectors.mechanisms.wording import number
from rankscope.server.window import Float64, Int64, Window

# Steps for which a rise of the rate that is over may still show: a block of ten losses, and two.
_JUST = 12


class RankHistory:
    """The last values of every rank, aligned, also while ranks still join.

    Args:
        size: number of observations remembered.
    """

    def __init__(self, size: int) -> None:
        self._rows: deque[tuple[int, Int64, Float64]] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._rows)

    def push(self, step: int, ranks: Int64, values: Float64) -> None:
        """Takes one observation: float64 [R], NaN where a rank is missing."""
        self._rows.append((step, ranks, values))

    def steps(self) -> Int64:
        """Steps of the observations, int64 [N]."""
        return np.array([step for step, _, _ in self._rows], dtype=np.int64)

    def matrix(self, ranks: Int64, *, last: int | None = None) -> Float64:
        """Values of the given ranks, float64 [N, R]; NaN where there was none.

        Args:
            ranks: all that have been pushed, or more; int64 [R], ascending.
            last: this many of the newest observations; all by default.
        """
        skipped = 0 if last is None else max(len(self._rows) - last, 0)
        columns = [
            values if len(known) == len(ranks) else _spread(values, known, ranks)
            for _, known, values in islice(self._rows, skipped, None)
        ]
        return np.stack(columns) if columns else np.empty((0, len(ranks)))


def _spread(values: Float64, known: Int64, ranks: Int64) -> Float64:
    wide = np.full(len(ranks), np.nan)
    wide[np.searchsorted(ranks, known)] = values
    return wide


# Of one learning rate to another one, up to which they are the same.
_SAME_RATE = 1.05


@dataclass(slots=True)
class Companions:
    """Learning rate and gradient norm around a fault of the loss: they distinguish causes.

    Attributes:
        highest: largest of the rates that are not remembered any more.
    """

    rates: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=256))
    norms: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=96))
    highest: float = 0.0
    _waiting: dict[str, deque[tuple[int, float]]] = field(default_factory=dict)

    def take(self, window: Window) -> None:
        """Lays a window's values ready; `pass_to` then lets them count step by step."""
        for metric in ("lr", "grad_norm"):
            steps, means = mean_over_ranks(window, metric)
            waiting = self._waiting.setdefault(metric, deque())
            waiting.extend(zip(steps.tolist(), means.tolist(), strict=True))

    def pass_to(self, step: int) -> None:
        """Lets everything up to and including a step count."""
        for metric, seen in (("lr", self.rates), ("grad_norm", self.norms)):
            waiting = self._waiting.get(metric)
            while waiting and waiting[0][0] <= step:
                if seen is self.rates and len(seen) == seen.maxlen:
                    self.highest = max(self.highest, seen[0][1])
                seen.append(waiting.popleft())

    def highest_rate(self, since: int) -> float:
        """The highest rate from a step on; NaN where none is known."""
        known = [rate for at, rate in self.rates if at >= since and math.isfinite(rate)]
        return max(known, default=math.nan)

    def raised_rate(self, onset: int, *, before: int, factor: float) -> Mapping[str, float] | None:
        """The rise of the learning rate that may be behind a fault.

        Args:
            onset: step since which there is fault.
            before: how many steps earlier the rise may lie.
            factor: the rate after it over that before it, at least.

        Returns:
            `lr_before`, `lr_after` and `lr_step`, where it rose so far.
        """
        inside = [(s, v) for s, v in self.rates if onset - before <= s <= onset + 1]
        if len(inside) < 2:
            return None
        # Of all rises the largest: a rate that falls again may end below where it rose from.
        lowest, most, now = inside[0][1], (0.0, 0.0, 0.0), inside[-1][1]
        for step, rate in inside[1:]:
            # A rise that is over, and not only just, has been survived.
            lasts = step >= onset - _JUST or now >= factor * lowest
            if lowest > 0 and lasts:
                most = max(most, (rate / lowest, lowest, rate))
            lowest = min(lowest, rate)
        times, before_it, after_it = most
        if times < factor:
            return None
        # The step at which the largest part of the rise happened.
        jumps = [(b[1] / a[1], b[0]) for a, b in zip(inside, inside[1:], strict=False) if a[1] > 0]
        return {"lr_before": before_it, "lr_after": after_it, "lr_step": max(jumps)[1]}

    def restarted(self, rise: Mapping[str, float] | None, *, before: int) -> bool:
        """Whether a rate was raised to no more than it had been, as by a warm restart.

        Args:
            rise: what `raised_rate` has returned.
            before: steps before the rise that are part of it.
        """
        if rise is None:
            return False
        earlier = [v for s, v in self.rates if s < rise["lr_step"] - before]
        # Schedules that are computed come back to their peak but for rounding, or one step late.
        return rise["lr_after"] <= _SAME_RATE * max(self.highest, *earlier, 0.0)

    def gradient_rose_first(self, onset: int) -> Mapping[str, float] | None:
        """The gradient norm's jump in the 8 observations before a fault.

        Returns:
            `grad_norm_step`, `grad_norm` and `grad_norm_usual`, where it rose to 3 times its
            median or more.
        """
        earlier = [(s, v) for s, v in self.norms if s < onset and math.isfinite(v)]
        if len(earlier) < 24:
            return None
        usual = float(np.median([v for _, v in earlier[:-8]]))
        jumped = [(s, v) for s, v in earlier[-8:] if v > 3 * usual]
        if not jumped:
            return None
        return {
            "grad_norm_step": jumped[0][0],
            "grad_norm": jumped[0][1],
            "grad_norm_usual": usual,
        }


# Steps beside an onset at which the data may have become others: onsets are known by blocks of 10.
_BESIDE = 10
# Values before a step that show what was usual, at least and at most, and those since that are
# beyond all of them. Of 18 values that are drawn alike the last two are the largest with a chance
# of 1 in 153, and it is asked only where the loss has just left its course.
_USUAL, _MOST_USUAL, _SINCE = 16, 64, 2
# Beyond them by so much of their own size.
_BEYOND = 0.1


@dataclass(slots=True)
class Phases:
    """Steps from which on a training has other data: a new phase, and what says so.

    A loss that rises then has another task, and what it had reached before is no measure.
    """

    _series: dict[str, deque[tuple[int, float]]] = field(default_factory=dict)
    _marks: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=64))

    SERIES: ClassVar[Mapping[str, str]] = {
        "target_deviance": "the loss of the best constant answer to a batch's targets",
        "sample_elements": "the number of elements of a sample",
    }

    def take(self, window: Window) -> None:
        """Takes a window's marks and values."""
        self._marks.extend((e.step, e.text) for e in window.events if e.kind == "mark")
        for metric in self.SERIES:
            steps, means = mean_over_ranks(window, metric)
            known = self._series.setdefault(metric, deque(maxlen=512))
            known.extend(zip(steps.tolist(), means.tolist(), strict=True))

    def began(self, onset: int, now: int) -> str:
        """What says, as far as it is known at a step, that a phase has begun near another one."""
        for step, text in self._marks:
            if onset - _BESIDE <= step <= min(onset + 1, now):
                return f"A mark was set at step {step} (`{text[:80]}`)."
        for metric, known in self._series.items():
            points = [(step, value) for step, value in known if step <= now]
            for at, (step, _) in enumerate(points):
                if abs(step - onset) > _BESIDE or at < _USUAL or len(points) - at < _SINCE:
                    continue
                before = [value for _, value in points[max(at - _MOST_USUAL, 0) : at]]
                since = [value for _, value in points[at : at + _MOST_USUAL]]
                far = _BEYOND * max(abs(value) for value in before)
                if min(since) > max(before) + far or max(since) < min(before) - far:
                    return (
                        f"From step {step} on, {self.SERIES[metric]} is "
                        f"{number(float(np.median(since)))}; before, it was "
                        f"{number(float(np.median(before)))}."
                    )
        return ""


def rate_sentence(rise: Mapping[str, float] | None) -> str:
    """What to say of a rise of the learning rate; empty for none."""
    if rise is None:
        return ""
    return (
        f"The learning rate had been raised from {number(rise['lr_before'])} to "
        f"{number(rise['lr_after'])} (step {rise['lr_step']:.0f})."
    )
