"""Scores that a user logs and that are to rise: rewards, returns, accuracies. Do they fall?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.accuracy import constant, lost, sinking, standing, unmoved
from rankscope.server.detectors.accuracy.constant import Constant, Run
from rankscope.server.detectors.accuracy.lost import Lost
from rankscope.server.detectors.accuracy.sinking import Evaluated
from rankscope.server.detectors.accuracy.unmoved import Unmoved, UnmovedPolicy
from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import Progress, mean_over_ranks, times_fewer
from rankscope.server.detectors.mechanisms.wording import number
from rankscope.server.detectors.metric.score_names import parts_of, rises
from rankscope.server.detectors.policy import Count, Observations, Share, Sigmas
from rankscope.server.detectors.profiles import OWN_GOAL
from rankscope.server.window import Float64, Window

# Values that are kept of one series: beyond that neighbours are averaged.
_MOST = 2048
# Series of a run that are judged.
_MOST_SERIES = 64


@dataclass(frozen=True, slots=True)
class FallingPolicy(UnmovedPolicy):
    """Thresholds of `accuracy.stalled` for scores that fall.

    Attributes:
        scored: observations before a score is judged, and again after each tenth more; the
            beginning is a quarter of them at most.
        fallen: consecutive judgements that have to find it: what wanders comes back.
        min_fall_error: standard errors that it has to lie below its beginning: by chance once in
            3.5 million.
        min_score_fall: fall that counts, as a share of the larger one of both levels.
    """

    scored: Observations = 120
    fallen: Count = 3
    min_fall_error: Sigmas = 5.0
    min_score_fall: Share = 0.05


@dataclass(slots=True)
class Fallen:
    """Attributes: name, level at the beginning and since then, the error of their distance.

    `since` is the place of the value from which on it had fallen by half.
    """

    name: str
    before: float
    after: float
    error: float
    since: int


@dataclass(slots=True)
class Scored:
    """One series, and how many observations each of its values is the mean of.

    Attributes:
        calm: steps without what was found, after which it is over.
        first_step: of its observations.
        in_a_row: judgements that found it to have fallen, one after the other.
        moved: standard errors by which it lies above its beginning; NaN where not judged.
    """

    calm: int
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    each: int = 1
    count: int = 0
    first_step: int = -1
    judged: int = 0
    in_a_row: int = 0
    moved: float = math.nan
    run: Run = field(default_factory=Run)
    watch: Watch[Fallen] = field(init=False)
    lost: Watch[Lost] = field(init=False)
    constant: Watch[Constant] = field(init=False)
    sunk: Watch[Evaluated] = field(init=False)
    stands: Watch[Evaluated] = field(init=False)
    unmoved: Watch[Unmoved] = field(init=False)

    def __post_init__(self) -> None:
        self.watch, self.lost = Watch(self.calm), Watch(self.calm)
        self.constant, self.unmoved = Watch(self.calm), Watch(self.calm)
        self.sunk, self.stands = Watch(self.calm), Watch(self.calm)

    def push(self, step: int, value: float) -> bool:
        """Takes the next one; returns whether there is a tenth more than when last judged."""
        self.count += 1
        self.first_step = step if self.first_step < 0 else self.first_step
        self.run.push(step, value)
        self.waiting.append(value)
        if len(self.waiting) < self.each:
            return False
        self.steps.append(step)
        self.values.append(sum(self.waiting) / self.each)
        self.waiting.clear()
        if len(self.values) >= _MOST:
            pairs = np.array(self.values[: len(self.values) // 2 * 2]).reshape(-1, 2)
            self.values, self.steps = pairs.mean(axis=1).tolist(), self.steps[1::2]
            self.each *= 2
        return 10 * self.count >= 11 * self.judged


class Scores:
    """All scores of a run."""

    def __init__(self, calm: int) -> None:
        self._calm = calm
        self._known: dict[str, Scored] = {}
        self._progress = Progress()

    def take(self, window: Window, policy: FallingPolicy) -> None:
        """Goes on with what was posted in a window, in the order of its steps."""
        losses = dict(zip(*(a.tolist() for a in mean_over_ranks(window, "loss")), strict=True))
        posted: list[tuple[int, str, float]] = []
        for name in sorted(window.series):
            if rises(name) and (name in self._known or len(self._known) < _MOST_SERIES):
                steps, means = mean_over_ranks(window, name)
                if len(steps):
                    self._known.setdefault(name, Scored(self._calm))
                posted += zip(steps.tolist(), [name] * len(steps), means.tolist(), strict=True)
        # In the order of the steps as well, before the scores of the same one.
        posted += [(step, "", loss) for step, loss in losses.items()]
        for step, name, value in sorted(posted, key=lambda one: one[:2]):
            if not name:
                if math.isfinite(value):
                    self._progress.push(step, value)
            elif math.isfinite(value):
                one = self._known[name]
                due = one.push(step, value)
                self._judge_constant(step, name, one, policy)
                self._judge_standing(step, name, one, policy)
                self._judge_sunk(step, name, one, policy)
                if due and one.count >= policy.lost_scored:
                    one.judged = one.count
                    one.moved = _moved(np.array(one.values))
                    self._judge_lost(step, name, one, policy)
                    self._judge_unmoved(step, name, one, policy)
                    if one.count >= policy.scored:
                        self._judge(step, name, one, policy)

    @property
    def learned(self) -> float:
        """Share of its start that the loss has lost; 0 where it is no measure of that."""
        start = self._progress.start
        return self._progress.scale / start if start > 0 else 0.0

    def _rises(self, but: Scored, policy: FallingPolicy) -> bool:
        """Whether another score rises.

        Of players against each other one wins what the other loses, and a term of a reward may be
        given up for the whole.
        """
        others = (one for one in self._known.values() if one is not but)
        return any(one.moved > policy.min_fall_error for one in others)

    def _judge_constant(self, step: int, name: str, one: Scored, policy: FallingPolicy) -> None:
        found = one.run.found(name, parts_of(name), step, one.count, policy)
        if found is None or not self.learned > policy.fallen_loss:
            one.constant.good(step)
            return
        one.constant.bad(step, found, first_step=found.since).facts = found

    def _judge_sunk(self, step: int, name: str, one: Scored, policy: FallingPolicy) -> None:
        found = sinking.sunk(name, one.first_step, step, one.values, one.count, policy)
        stands = one.stands.open(step) is not None
        if found is None or stands or self._others_rise(one, policy):
            one.sunk.good(step)
            return
        one.sunk.bad(step, found, first_step=found.since).facts = found

    def _judge_standing(self, step: int, name: str, one: Scored, policy: FallingPolicy) -> None:
        found = None
        if parts_of(name) & constant.OF_ANSWERS and one.constant.open(step) is None:
            since, values = one.first_step, one.values
            found = standing.stands(name, since, step, values, one.count, self.learned, policy)
        if found is None or self._others_rise(one, policy):
            one.stands.good(step)
            return
        one.stands.bad(step, found, first_step=found.since).facts = found

    def _others_rise(self, but: Scored, policy: FallingPolicy) -> bool:
        others = [other.values for other in self._known.values() if other is not but]
        return any(sinking.rises(values, policy) for values in others)

    def _judge_unmoved(self, step: int, name: str, one: Scored, policy: FallingPolicy) -> None:
        found = unmoved.unmoved(
            name,
            parts_of(name),
            one.first_step,
            np.array(one.values),
            one.count,
            policy,
            known=one.unmoved.open(step) is not None,
        )
        if found is None or self._rises(one, policy):
            one.unmoved.good(step)
            return
        one.unmoved.bad(step, found, first_step=found.since).facts = found

    def _judge_lost(self, step: int, name: str, one: Scored, policy: FallingPolicy) -> None:
        found = lost.lost(name, one.steps, np.array(one.values), policy)
        if found is None or self._rises(one, policy):
            one.lost.good(step)
            return
        one.lost.bad(step, found, first_step=found.since).facts = found

    def _judge(self, step: int, name: str, one: Scored, policy: FallingPolicy) -> None:
        found = _fallen(name, np.array(one.values), policy)
        if found is None or self._rises(one, policy):
            one.in_a_row = 0
            one.watch.good(step)
            return
        one.in_a_row += 1
        if one.in_a_row < policy.fallen:
            return
        one.watch.bad(step, found, first_step=one.steps[found.since]).facts = found

    def findings(self, last_step: int) -> list[Finding]:
        """Of all series, in the order of their names."""
        ordered = [self._known[name] for name in sorted(self._known)]
        return [
            *(_finding(episode) for one in ordered for episode in one.watch.take(last_step)),
            *(lost.finding(episode) for one in ordered for episode in one.lost.take(last_step)),
            *(constant.finding(e) for one in ordered for e in one.constant.take(last_step)),
            *(sinking.finding(e) for one in ordered for e in one.sunk.take(last_step)),
            *(standing.finding(e) for one in ordered for e in one.stands.take(last_step)),
            *(unmoved.finding(e) for one in ordered for e in one.unmoved.take(last_step)),
        ]


def _levels(values: Float64, size: int) -> tuple[float, float, float]:
    """Mean of the first `size` values and of the last three quarters, and the error of the first.

    The error of a mean of `size` values that follow each other: by the autocorrelation at lag 1 of
    what is left beside a trend, and by how the means of as many values scatter later, where that is
    more. Three quarters have so many more values that their own error is left out.
    """
    first, late = values[:size], values[len(values) // 4 :]
    left = _beside_trend(late)
    # Of a quick fall the beginning itself holds most: what it falls by is no scatter.
    single = max(float(left.std()), float(_beside_trend(first).std(ddof=2)))
    error = single * math.sqrt(times_fewer(left) / size)
    means = left[: len(left) // size * size].reshape(-1, size).mean(axis=1)
    return float(first.mean()), float(late.mean()), max(error, float(means.std(ddof=1)))


def _beside_trend(values: Float64) -> Float64:
    """What is left of values beside their line."""
    steps = np.arange(len(values))
    return values - np.polyval(np.polyfit(steps, values, 1), steps)


def _sizes(values: Float64) -> list[int]:
    """How many values may be the beginning: a quick fall leaves few of them, a slow one many."""
    return [size for size in (10, 20, 40, 80) if size <= len(values) // 4]


def _fallen(name: str, values: Float64, policy: FallingPolicy) -> Fallen | None:
    """How far a score lies below its beginning, where it has stayed there and does not rise."""
    for size in _sizes(values):
        before, after, error = _levels(values, size)
        fall = before - after
        least = policy.min_score_fall * max(abs(before), abs(after))
        if fall <= max(policy.min_fall_error * error, least):
            continue
        late = values[len(values) // 4 :]
        thirds = [float(part.mean()) for part in np.array_split(late, 3)]
        # A beginning that was lost may be regained: healthy policies dip while they explore.
        if max(thirds) < before - fall / 2 and thirds[2] < thirds[0] + error:
            since = _halfway(values[: len(values) // 4], before - fall / 2, size // 2)
            return Fallen(name, before, after, error, since)
    return None


def _halfway(values: Float64, half: float, size: int) -> int:
    """The first place from which on the mean of so many values is below half of the fall."""
    means = np.convolve(values, np.ones(size) / size, "valid")
    below = np.flatnonzero(means < half)
    return int(below[0]) if len(below) else len(values)


def _moved(values: Float64) -> float:
    """The most standard errors by which a score lies above its beginning."""
    moved = []
    for size in _sizes(values):
        before, after, error = _levels(values, size)
        if error > 0:
            moved.append((after - before) / error)
    return max(moved, default=math.nan)


def _finding(episode: Episode[Fallen]) -> Finding:
    facts = episode.facts
    was, now = number(facts.before), number(facts.after)
    sizes = (facts.before - facts.after) / facts.error if facts.error > 0 else math.inf
    return episode.finding(
        kind="accuracy.stalled",
        key=f"{OWN_GOAL}{facts.name}",
        severity="warning",
        title=f"`{facts.name}` has fallen from {was} to {now} and stays there",
        cause=(
            f"By its name `{facts.name}` is to rise. At the beginning it was {was}; about step "
            f"{episode.first_step} it had fallen by half, and it has been {now} on average, "
            f"{number(sizes)} standard errors below. What "
            "the steps minimise makes it worse: the loss has the wrong sign (a policy gradient "
            "minimises minus the logarithm of the probability times the advantage), advantages or "
            "labels belong to other samples, or steps are so large that they undo what was learned."
        ),
        remedy=(
            "Take one batch and a small step by hand: what got a high reward has to become more "
            "likely. Look at the signs of the loss and of the advantages, and at their baseline; "
            "if both are right, try a tenth of the learning rate."
        ),
        evidence={
            "series": facts.name,
            "before": facts.before,
            "after": facts.after,
            "standard_error": facts.error,
        },
    )
