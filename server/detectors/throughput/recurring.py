"""Steps that take far longer than those between them, at equal distances. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.recurrence import detrended, folded
from rankscope.server.detectors.mechanisms.statistics import known_median
from rankscope.server.detectors.mechanisms.wording import duration, number, percent
from rankscope.server.detectors.policy import Policy, Seconds, Share
from rankscope.server.window import Float64

# Steps that are folded, and the steps from one judgement to the next.
_SIZES, _STRIDE = (64, 256), 16
# Share of these that has to be timed: at a step with an evaluation in it nothing is.
_TIMED = 0.8


@dataclass(frozen=True, slots=True)
class RecurringPolicy(Policy):
    """Thresholds of long steps at equal distances.

    Attributes:
        recurring_lost: share of all time that goes into what these steps take longer, from which on
            they are reported: by so much every step would be 1.5 times as long on average. What the
            agent itself adds to the steps it samples is a fifth of the time at most.
        recurring_seconds: what such a step takes longer, at the least: a process that has lost its
            core gets it back after some milliseconds.
    """

    recurring_lost: Share = 1 / 3
    recurring_seconds: Seconds = 0.01


@dataclass(slots=True)
class LongSteps:
    """What is known of them.

    Attributes:
        period: in steps; `of_it`: how many steps of a period are long.
        usual, long: seconds of the steps between them, and of theirs.
        lost: share of all time that goes into what they take longer.
        in_data: share of what they take longer that lies before the first forward pass; NaN where
            that is not known.
        since_start: whether they began in the first steps that are folded.
    """

    period: int
    of_it: int
    usual: float
    long: float
    lost: float
    in_data: float
    since_start: bool
    first_step: int = -1

    @property
    def severity(self) -> str:
        """Info for what was so from the start on: a loop, or an optimizer, may be made so."""
        return "info" if self.since_start else "warning"


@dataclass(slots=True)
class Recurring:
    """Follows the lengths of steps.

    Args:
        policy: thresholds.
    """

    policy: RecurringPolicy
    watch: Watch[LongSteps] = field(default_factory=lambda: Watch(clear_after=max(_SIZES)))
    _steps: deque[tuple[int, float, float]] = field(
        default_factory=lambda: deque(maxlen=max(_SIZES))
    )
    _first: int = -1
    _judged: int = -1

    def push(self, step: int, seconds: float, data_seconds: float) -> None:
        """Takes a step that was timed; what lies before its first forward pass may be NaN."""
        if self._first < 0:
            self._first = step
        # Judged by the numbers of the steps, whichever of them were timed.
        if self._judged >= 0 and step // _STRIDE > self._judged:
            self._judge(step // _STRIDE * _STRIDE)
        self._judged = step // _STRIDE
        self._steps.append((step, seconds, data_seconds))

    def _judge(self, end: int) -> None:
        """Folds the steps before one."""
        found, folds = None, False
        for size in _SIZES:
            rows = np.array([row for row in self._steps if row[0] >= end - size])
            if end - size < self._first or len(rows) < _TIMED * size:
                continue
            folds = True
            found = self._fold(rows, end - size, size) or found
        if not folds:
            return
        last = self._steps[-1][0]
        if found is None:
            self.watch.good(last)
            return
        found.since_start = found.first_step < self._first + min(_SIZES)
        episode = self.watch.open(last)
        if episode is not None:
            # When it began is known best by the window that found it first.
            found.since_start = episode.facts.since_start
        self.watch.bad(last, found, first_step=found.first_step).facts = found

    def _fold(self, rows: Float64, start: int, size: int) -> LongSteps | None:
        policy = self.policy
        places = rows[:, 0].astype(np.int64) - start
        values = np.full(size, float(np.median(np.log(rows[:, 1]))))
        values[places] = np.log(rows[:, 1])
        period = folded(detrended(size) @ values)
        if period is None:
            return None
        table = np.full((-(-size // period.length), period.length), np.nan)
        table.reshape(-1)[places] = rows[:, 1]
        by_place = known_median(table)
        usual = float(np.nanmedian(np.sort(by_place)[: (period.length + 1) // 2]))
        more = np.where(
            by_place - usual > max(policy.recurring_seconds, usual), by_place - usual, 0
        )
        long = np.flatnonzero(more > 0)
        lost = float(more.sum() / by_place.sum())
        # Where most steps are long it is the short ones that are odd.
        if not len(long) or 2 * len(long) > period.length or not lost > policy.recurring_lost:
            return None
        those = rows[np.isin(places % period.length, long)]
        data = known_median(rows[~np.isin(places % period.length, long), 2][:, None])[0]
        longest = float(np.median(those[:, 1]))
        return LongSteps(
            period=period.length,
            of_it=len(long),
            usual=usual,
            long=longest,
            lost=lost,
            in_data=float(known_median(those[:, 2:])[0] - data) / (longest - usual),
            since_start=False,
            first_step=self._onset(those, period.length, 0.5 * (usual + longest)),
        )

    def _onset(self, those: Float64, period: int, limit: float) -> int:
        """The first of the steps, a period apart, that are all longer: some before a window's."""
        known = {at: seconds for at, seconds, _ in self._steps}
        step = int(those[np.argmax(those[:, 1] > limit), 0])
        while known.get(step - period, 0.0) > limit:
            step -= period
        return step


def title(facts: LongSteps) -> str:
    """What happens."""
    when = f"Of every {facts.period} steps {facts.of_it} {'takes' if facts.of_it == 1 else 'take'}"
    return (
        f"{when} {number(facts.long / facts.usual)} times as long as the others: "
        f"{percent(facts.lost)} of the time goes there"
    )


def cause_and_remedy(episode: Episode[LongSteps]) -> tuple[str, str]:
    """What it may be, and what to look at."""
    facts = episode.facts
    where = ""
    if math.isfinite(facts.in_data):
        where = (
            " Most of it lies before the first forward pass: in the loader, or in what the loop "
            "does between two steps."
            if facts.in_data > 0.5
            else " Most of it lies in the forward and backward pass, or in what follows them "
            "before the optimizer has stepped."
        )
    cause = (
        f"Steps take {duration(facts.usual)}, and with a period of {facts.period} steps from step "
        f"{episode.first_step} on {duration(facts.long)}.{where}"
    )
    remedy = (
        f"Look for what the loop does every {facts.period} steps: logging, saving, an evaluation, "
        "clearing caches, a loader that runs dry or starts its workers anew (prefetch more, keep "
        "them with `persistent_workers`). Do it less often, or beside the training. If the "
        "loop is meant to work so (it collects new samples between rounds of steps), nothing "
        "is wrong."
    )
    return cause, remedy
