"""Inputs of another kind since a step, on every rank, with a loss that rose then. Pure.

No comparison of ranks shows what all of them read alike: batches are held against those before. Of
other data alone nobody need be told; that the loss rose at that very step says that the model does
not know them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.data.input_moments import (
    MOMENTS,
    NUMBERS,
    TOKENS,
    Batches,
    batches,
    far,
    scatter,
)
from rankscope.server.detectors.data.received import Received
from rankscope.server.detectors.data.rise import Rise
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.wording import if_several, number, percent, sentences
from rankscope.server.window import Float64, Window

# Observations that say what is usual, at least and at most, and the latest that are held against
# them: of 8 exchangeable ones all lie beyond 16 others, on one side, once in 700,000 times.
_LEAST, _BACK, _LATEST = 16, 64, 8


@dataclass(frozen=True, slots=True)
class Changed:
    """Inputs that are distributed otherwise than they were.

    Attributes:
        distance: of the means that differ most, in standard deviations of single samples; of
            tokens, of mean signs.
        before, after: median losses.
    """

    distance: float
    before: float
    after: float
    series: str


@dataclass(slots=True)
class Course:
    """How the inputs of one group of ranks are distributed, step by step.

    Attributes:
        past: what is usual, oldest first, moments float64 [12] and samples of all ranks.
        low, high: between which the moments of nearly all of these lie, float64 [12].
        taken: number of all that were usual.
        latest: what is held against it.
    """

    members: tuple[int, ...]
    series: str
    past: deque[tuple[Float64, float]] = field(default_factory=lambda: deque(maxlen=_BACK))
    latest: deque[tuple[int, Float64, float]] = field(default_factory=deque)
    low: Float64 = field(default_factory=lambda: np.full(MOMENTS, np.inf))
    high: Float64 = field(default_factory=lambda: np.full(MOMENTS, -np.inf))
    taken: int = 0
    rise: Rise = field(default_factory=Rise)
    watch: Watch[Changed] = field(default_factory=lambda: Watch(clear_after=2 * _LATEST))

    def take(self, read: Batches) -> None:
        """The next observation of all members."""
        self.rise.pass_to(read.step)
        samples = read.samples * len(self.members)
        self.latest.append((read.step, read.moments.mean(axis=0), samples))
        if len(self.latest) < _LATEST:
            return
        found = self._judged() if len(self.past) >= _LEAST else None
        if found is None:
            self.watch.good(read.step)
        else:
            self.watch.bad(read.step, found, first_step=self.rise.since).facts = found
        step, moments, samples = self.latest.popleft()
        # What was found does not become usual while it lasts.
        rise = self.rise
        if found is None and (rise.since < 0 or step < rise.since or rise.settled(read.step)):
            self.past.append((moments, samples))
            self.taken += 1
            if self.taken % _LATEST == 0:
                known = np.stack([values for values, _ in self.past])
                self.low, self.high = known.min(axis=0), known.max(axis=0)

    def _judged(self) -> Changed | None:
        newest = self.latest[-1][1]
        # Nearly every step stops here.
        if not ((newest < self.low) | (newest > self.high)).any():
            self.rise.forget()
            return None
        past = np.stack([moments for moments, _ in self.past])
        now = np.stack([moments for _, moments, _ in self.latest])
        distance = np.abs(now.mean(axis=0) - past.mean(axis=0)) / scatter(
            self.series, past[:, None], float(np.median([samples for _, samples in self.past]))
        )
        beyond = (now.min(axis=0) > past.max(axis=0)) | (now.max(axis=0) < past.min(axis=0))
        candidates = np.where(beyond & (distance > far(self.series)), distance, 0.0)
        if not candidates.any():
            self.rise.forget()
            return None
        self.rise.begin(self.latest[0][0])
        known = self.watch.current
        if known is not None and known.first_step == self.rise.since:
            return known.facts
        before, after, rose = self.rise.judged()
        return Changed(float(candidates.max()), before, after, self.series) if rose else None


@dataclass(slots=True)
class ChangedInputs:
    """Follows how the inputs of all ranks are distributed."""

    courses: dict[tuple[tuple[int, ...], str], Course] = field(default_factory=dict)

    def take(self, window: Window, received: Received) -> list[Finding]:
        """Goes through a window; what was found.

        Args:
            received: ranks that read no data.
        """
        findings = []
        for members in window.data_parallel:
            known = [received.since[rank] for rank in members if rank in received.since]
            until = min(known, default=math.inf)
            for series in (NUMBERS, TOKENS):
                course = self.courses.setdefault((members, series), Course(members, series))
                course.rise.lay(window)
                for read in batches(window, series, members):
                    if read.step < until:
                        course.take(read)
                if until <= window.last_step:
                    course.watch.good(window.last_step)
                course.rise.pass_to(window.last_step)
                for episode in course.watch.take(window.last_step):
                    findings.append(_finding(episode, window.world_size))
        return findings


def _finding(episode: Episode[Changed], world: int) -> Finding:
    facts, step = episode.facts, episode.first_step
    apart = (
        f"the share of tokens that a hash puts into one of two halves moved by "
        f"{percent(facts.distance / 2)}"
        if facts.series == TOKENS
        else f"their distribution moved by {number(facts.distance)} standard deviations of a "
        "single sample"
    )
    return episode.finding(
        kind="data.outlier",
        key="inputs:changed",
        severity="warning",
        title=f"All inputs are of another kind since step {step}, and the loss rose with them",
        stage="batch",
        cause=sentences(
            f"At step {step} the inputs{if_several(world, 'of every rank')} changed and stayed so: "
            f"{apart}. The loss went from {number(facts.before)} to {number(facts.after)} with it.",
            "Another preprocessing (mirrored, shifted, channels or columns in another order, other "
            "statistics or vocabulary), or other data than what the model has learned from.",
        ),
        remedy=(
            f"Print a batch of step {step - 1} and one of step {step} side by side, and compare "
            "which files, sources and transforms they come from: the next shard, epoch, stage of a "
            "curriculum or resume begins there. Where the change is meant, lower the learning rate "
            "for it."
        ),
        evidence={
            "distance": facts.distance,
            "moments": facts.series,
            "loss_before": facts.before,
            "loss_after": facts.after,
        },
    )
