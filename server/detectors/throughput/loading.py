"""Steps that begin later than they did on all ranks, because each waits for its data. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import change_point
from rankscope.server.detectors.mechanisms.wording import duration, if_several, percent, sentences
from rankscope.server.detectors.policy import Observations, Seconds, Share, Times
from rankscope.server.detectors.throughput.recurring import RecurringPolicy
from rankscope.server.detectors.throughput.slow_growth import Course
from rankscope.server.window import Float64

# Steps between two judgements.
_STRIDE = 8


@dataclass(frozen=True, slots=True)
class LoadingPolicy(RecurringPolicy):
    """When all ranks wait for data.

    Attributes:
        loading_factor: median time before the first forward pass over that before, from which on it
            is reported; so much more than the computing has grown, too: where a machine has too
            much to do both grow.
        loading_share: of a step, that it has grown by, at the least.
        loading_seconds: the same in seconds.
        loading_apart: the shortest fifth over the longest fifth before, at the least: one step of
            eight may have an average of the parameters before it.
        loading_size: steps that have to be so, and as many before them.
        loading_memory: steps before them, at the most.
    """

    loading_factor: Times = 1.5
    loading_share: Share = 0.25
    loading_seconds: Seconds = 0.003
    loading_apart: Times = 1.15
    loading_size: Observations = 24
    loading_memory: Observations = 256


@dataclass(slots=True)
class Slower:
    """What was seen: median seconds before the forward pass, and of a step.

    Attributes:
        creeps: it has grown all the time, and not at one step.
        world: number of ranks.
    """

    before: float
    now: float
    step: float
    creeps: bool
    world: int


@dataclass(slots=True)
class Loading(Condition[Slower]):
    """Follows the time before the first forward pass, the median over the ranks.

    Attributes:
        past, recent: number, seconds before the forward pass, of computing, of the whole of a step,
            and of waiting for a processor in it.
        begin: the first of them.
        course: of the seconds before the forward pass.
        world: number of ranks.
    """

    policy: LoadingPolicy
    past: deque[tuple[float, ...]] = field(default_factory=deque)
    recent: deque[tuple[float, ...]] = field(default_factory=deque)
    begin: list[tuple[float, ...]] = field(default_factory=list)
    course: Course = field(default_factory=Course)
    world: int = 1
    seen: int = 0
    watch: Watch[Slower] = field(default_factory=lambda: Watch(clear_after=64))

    def push(self, step: int, data: float, compute: float, length: float, queued: float) -> None:
        """Takes the next step's seconds; those of which one is not known do not count.

        Args:
            queued: that a rank has waited for a processor in it, wherever that was.
        """
        if not (math.isfinite(data) and math.isfinite(compute) and length > 0):
            return
        policy, one = self.policy, (float(step), data, compute, length, queued)
        if len(self.begin) < policy.loading_size:
            self.begin.append(one)
        self.course.push(data)
        self.seen += 1
        self.recent.append(one)
        if len(self.recent) > policy.loading_size:
            late = self.recent.popleft()
            # While it goes on, what was before stays the measure.
            if self.watch.open(step) is None:
                self.past.append(late)
        while len(self.past) > policy.loading_memory:
            self.past.popleft()
        if self.seen % _STRIDE == 0 and len(self.past) >= policy.loading_size:
            self._judge(step)

    def _judge(self, step: int) -> None:
        recent, past = np.array(self.recent), np.array(self.past)
        now = np.median(recent, axis=0)
        known = self.watch.open(step)
        if known is not None:
            # Nearer to what it was than to what it had become.
            facts = known.facts
            if now[1] ** 2 > facts.before * facts.now:
                facts.now, facts.step = max(facts.now, float(now[1])), float(now[3])
                self.watch.bad(step, facts)
            else:
                self.watch.good(step)
            return
        begin = np.array(self.begin)
        creeps = False
        if not self._longer(recent, past):
            creeps = self._longer(recent, begin) and self.course.creeps()
            if not creeps:
                self.watch.good(step)
                return
        before = begin if creeps else past
        facts = Slower(
            float(np.median(before[:, 1])),
            float(now[1]),
            float(now[3]),
            creeps=creeps,
            world=self.world,
        )
        rows = np.concatenate([past[-len(recent) :], recent])
        since = begin[0, 0] if creeps else rows[change_point(np.log(rows[:, 1] + 1e-6))[0], 0]
        self.watch.bad(step, facts, first_step=int(since))

    def _longer(self, recent: Float64, before: Float64) -> bool:
        """Whether the last steps wait longer for their data than some before, beyond doubt.

        What is waited for a processor in the last ones, and was not before, does not count: it may
        have been there.
        """
        policy = self.policy
        now, usual = np.median(recent, axis=0), np.median(before, axis=0)
        alone = recent[:, 1] - np.maximum(recent[:, 4] - usual[4], 0.0)
        own = float(np.median(alone))
        more = own - usual[1]
        if more < max(policy.loading_share * now[3], policy.loading_seconds):
            return False
        times, computing = own / max(usual[1], 1e-9), now[2] / max(usual[2], 1e-9)
        shortest, longest = np.quantile(alone, 0.2), np.quantile(before[:, 1], 0.8)
        return bool(
            times > policy.loading_factor * max(computing, 1.0)
            and shortest > policy.loading_apart * longest
        )

    def finding(self, episode: Episode[Slower]) -> Finding:
        """What is reported of an episode."""
        facts, step = episode.facts, episode.first_step
        more = facts.now - facts.before
        alike = if_several(facts.world, "on all ranks alike", before=", ")
        who = "Every rank" if facts.world > 1 else "The training"
        if facts.creeps:
            title = f"{who} waits longer and longer for its data: {duration(facts.now)} a step"
            how = (
                f"The time before the first forward pass of a step has grown from "
                f"{duration(facts.before)} to {duration(facts.now)} in the course of the run"
            )
            remedy = (
                "Look for what grows in the loop: a list that is gone through or copied at every "
                "step, a file that is read again from its start, results that are kept and added "
                "up, a cache without an end."
            )
        else:
            title = f"{who} waits {duration(more)} longer for its data since step {step}"
            how = (
                f"The time before the first forward pass of a step was {duration(facts.before)} "
                f"before step {step}, and is {duration(facts.now)} since then"
            )
            remedy = (
                "Look at the loader (`num_workers`, `prefetch_factor`, `pin_memory`), at what it "
                f"reads from step {step} on (another file system, files that are no longer cached, "
                "larger samples, another transform), and at what the loop does before its forward "
                "pass."
            )
        return episode.finding(
            kind="throughput.dropped",
            key="data",
            severity="warning",
            title=title,
            cause=sentences(
                f"{how}{alike}: {percent(more / facts.step)} of a step of "
                f"{duration(facts.step)}. What is computed in a step takes no longer.",
            ),
            remedy=remedy,
            evidence={
                "data_seconds_before": facts.before,
                "data_seconds": facts.now,
                "step_seconds": facts.step,
                "creeps": facts.creeps,
            },
        )
