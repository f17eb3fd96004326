"""Rises of the loss that no step can have made: what it is measured on has changed. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.desync.averaging_rounds import MARK
from rankscope.server.detectors.mechanisms.statistics import mean_over_ranks, rank_rows, shared
from rankscope.server.detectors.mechanisms.wording import number
from rankscope.server.detectors.profiles import TURNS
from rankscope.server.window import Float64, Int64, Window

# Losses before a rise. Norms of other steps than its own say nothing of it: a rate may have been
# raised.
_BACK = 8
# The rise, over the most that the step can have changed the loss by, and over the range of the
# losses before it: a batch differs from another one, and so does its gradient.
BEYOND, _CLEAR = 3.0, 3.0
# Relative difference of the ranks' norms up to which they hold the same: those of shards differ.
_ALIKE = 1e-3
# The gradient before it is reduced, and clipped by whatever hand.
_LOCAL = "grad_norm_local"
# Digest of what was written to the parameters between two steps: 0 for nothing.
_BETWEEN = "outside_optimizer"
# Rises that are remembered, and steps beside an onset at which one of them is its cause: onsets are
# known by blocks of 10.
_KEPT, _BESIDE = 32, 10


@dataclass(frozen=True, slots=True)
class Leap:
    """A rise from one step to the next.

    Attributes:
        step: at which the loss is higher.
        before, after: the loss, median of the steps before it and at it.
        reach: by how much the step before can have changed it, at most.
    """

    step: int
    before: float
    after: float
    reach: float


@dataclass(slots=True)
class Leaps:
    """Holds each rise of the mean loss against the step that was taken before it.

    By the mean value theorem a step changes the loss of a batch by no more than its length times
    the largest gradient on the way; the norms of the gradients before and after it stand for that
    one. Where the loss of the next batch rises by much more, and no parameters were written
    otherwise, what it is measured on has changed: the data, the targets, the loss itself, or the
    mode of the model. Of the players of a game nothing is said: the other one has moved, too.
    """

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_BACK))
    gradients: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_BACK))
    updates: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_BACK))
    games: bool = False
    found: deque[Leap] = field(default_factory=lambda: deque(maxlen=_KEPT))
    written: int = -1
    _waiting: deque[tuple[int, str, float]] = field(default_factory=deque)

    _NORMS: ClassVar[tuple[str, ...]] = ("grad_norm", "grad_norm_preclip", _LOCAL)
    SERIES: ClassVar[tuple[str, ...]] = (*_NORMS, "update_norm", MARK)

    def take(self, window: Window) -> None:
        """Lays a window's values ready; `pass_to` then lets them count step by step."""
        laid: list[tuple[int, str, float]] = []
        self.games |= any(event.kind == TURNS for event in window.events)
        for metric in (*self._NORMS, "update_norm"):
            steps, norms = _norms(window, metric)
            laid += zip(steps.tolist(), [metric] * len(steps), norms.tolist(), strict=True)
        marks, between = window.series.get(MARK), window.digests.get(_BETWEEN)
        if marks is not None:
            laid += [(step, MARK, 1.0) for step in window.steps[marks.present.any(axis=0)].tolist()]
        if between is not None:
            written = (between.present & (between.values != 0)).any(axis=0)
            laid += [(step, MARK, 1.0) for step in window.steps[written].tolist()]
        steps, means = mean_over_ranks(window, "loss")
        laid += zip(steps.tolist(), ["loss"] * len(steps), means.tolist(), strict=True)
        # Of one step the loss comes last: its gradient, and what was written, are known then.
        self._waiting.extend(sorted(laid, key=lambda one: (one[0], one[1] == "loss")))

    def pass_to(self, step: int) -> None:
        """Lets everything up to and including a step count."""
        while self._waiting and self._waiting[0][0] <= step:
            at, metric, value = self._waiting.popleft()
            if metric == "loss":
                self._hold(at, value)
            elif metric == MARK:
                self.written = at
            elif math.isfinite(value):
                known = self.updates if metric == "update_norm" else self.gradients
                known.append((at, value))

    def near(self, onset: int) -> Leap | None:
        """The largest rise beside an onset; None for none."""
        found = () if self.games else self.found
        beside = [leap for leap in found if abs(leap.step - onset) <= _BESIDE]
        return max(beside, key=lambda leap: leap.after - leap.before, default=None)

    def at(self, step: int) -> Leap | None:
        """The rise at a step that has counted; None for none."""
        found = () if self.games else self.found
        return next((leap for leap in found if leap.step == step), None)

    def _hold(self, step: int, loss: float) -> None:
        before = list(self.losses)
        if not math.isfinite(loss):
            return
        self.losses.append(loss)
        reach = self.reach(step)
        if len(before) < _BACK or not reach > 0:
            return
        highest = max(before)
        if loss - highest > max(BEYOND * reach, _CLEAR * (highest - min(before))):
            self.found.append(Leap(step, float(np.median(before)), loss, reach))

    def reach(self, step: int) -> float:
        """By how much the update before a step can have changed its loss; NaN where not known.

        Nor is it where something else has written the parameters, as the other player of a game.
        """
        if self.games or step - self.written <= 1:
            return math.nan
        updates = [value for at, value in self.updates if at == step - 1]
        gradients = [value for at, value in self.gradients if step - 1 <= at <= step]
        return max(updates) * max(gradients) if updates and gradients else math.nan


def _norms(window: Window, metric: str) -> tuple[Int64, Float64]:
    """Steps, int64 [N], and the norm at each, float64 [N], that several detectors ask for."""
    known = window.derived.get(("norms", metric))
    if known is None:
        steps, rows = rank_rows(window, metric)
        norms = _largest(rows) if metric == _LOCAL else _whole(rows)
        known = shared(window, "norms", metric, (steps, norms))
    return known[0], known[1]


def _whole(rows: Float64) -> Float64:
    """Norm of what all ranks hold together, float64 [N] of [N, R]: replicas' are alike."""
    rows = np.where(np.isfinite(rows), rows, np.nan)
    largest = _largest(rows)
    smallest = np.fmin.reduce(rows, axis=1, initial=np.nan)
    alike = largest - smallest <= _ALIKE * largest
    whole: Float64 = np.where(alike, largest, np.sqrt(np.nansum(rows**2, axis=1)))
    return np.where(np.isfinite(largest), whole, np.nan)


def _largest(rows: Float64) -> Float64:
    """Largest finite norm of each row, float64 [N] of [N, R]; NaN for none."""
    largest: Float64 = np.fmax.reduce(
        np.where(np.isfinite(rows), rows, np.nan), axis=1, initial=np.nan
    )
    return largest


def sentence(leap: Leap) -> str:
    """What to say of it."""
    return (
        f"From one step to the next, at step {leap.step}, the loss rose from {number(leap.before)} "
        f"to {number(leap.after)}, where the optimizer's step can have changed it by about "
        f"{number(leap.reach)} (its length times the gradient's). So it is what the loss is "
        "measured on that has changed: the data, their labels or targets, the loss function, or "
        "the mode of the model; or something else than the optimizer has written the parameters."
    )


REMEDY = (
    "Look at what the loop does differently from that step on: another source or file, labels that "
    "are shifted, joined or drawn anew, a preprocessing that is switched, a loss or a weight of it "
    "that changes, `train()` and `eval()`, a checkpoint that is loaded."
)
