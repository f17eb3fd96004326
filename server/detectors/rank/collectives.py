"""Collectives that are slow for all ranks alike. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.statistics import Spacing
from rankscope.server.detectors.mechanisms.wording import duration, number
from rankscope.server.detectors.policy import (
    Count,
    Observations,
    Seconds,
    Share,
    Steps,
    Times,
)
from rankscope.server.detectors.rank.lateness import LatenessPolicy, StepTimes


@dataclass(frozen=True, slots=True)
class CollectivesPolicy(LatenessPolicy):
    """When collectives are slow.

    Attributes:
        collective_skipped: samples at the beginning that are not counted: connections are made
            there.
        collective_usual: smallest number of samples that show what is usual.
        collective_factor: time of the collectives over the usual one, from which on it is reported.
        collective_own: largest growth of the ranks' own time meanwhile: where that grows too, the
            machine is busy.
        collective_queued: additional time over what ranks wait for a processor meanwhile, at the
            least: the threads that reduce wait for theirs as well.
        collective_busy: share of the time that ranks wait for a processor, of what they wait for it
            and have it, from which on that explains any time: the threads that reduce hand over to
            each other, rank after rank, and each of them waits.
        collective_least_seconds: smallest additional time.
        collective_least_share: smallest additional time as a share of the step.
        collective_looks: consecutive samples that have to exceed the limits.
        collective_steps: smallest number of steps over which these samples extend.
        collective_calm: samples without it after which it is over.
    """

    collective_skipped: Count = 2
    collective_usual: Observations = 5
    collective_factor: Times = 2.0
    collective_own: Times = 1.5
    collective_queued: Times = 2.0
    collective_busy: Share = 0.25
    collective_least_seconds: Seconds = 0.01
    collective_least_share: Share = 0.3
    collective_looks: Observations = 8
    collective_steps: Steps = 20
    collective_calm: Observations = 8


class Reduced(NamedTuple):
    """One sample.

    Attributes:
        seconds: that the last rank to arrive waits for the reduction.
        own: that the ranks take for themselves.
        length: of the step.
        queued: longest that one of the ranks waits for a processor.
        busy: median share of waiting in what a rank waits for a processor and has one; 0 of those
            that hardly wait.
    """

    step: int
    seconds: float
    own: float
    length: float
    queued: float
    busy: float = 0.0


@dataclass(slots=True, kw_only=True)
class SlowCollectives(Incident):
    """Collectives that are slow.

    Attributes:
        usual, now: seconds that the last rank to arrive waits: median before, and since then.
        step_seconds: median length of a step since then.
    """

    usual: float
    now: float
    step_seconds: float


@dataclass(slots=True)
class Collectives:
    """How long the reduction takes once all ranks are there, sample by sample.

    Attributes:
        tensors: number that is reduced; where another number is, nothing is usual yet.
    """

    tensors: int = 0
    samples: int = 0
    usual: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=64))
    slow: list[Reduced] = field(default_factory=list)
    quiet: int = -1
    spacing: Spacing = field(default_factory=Spacing)
    current: SlowCollectives | None = None
    ended: list[SlowCollectives] = field(default_factory=list)

    def reduces(self, tensors: int) -> None:
        """So many tensors are reduced: more of them take longer."""
        if self.tensors not in (0, tensors):
            self.samples = 0
            self.usual.clear()
            self.slow.clear()
        self.tensors = tensors

    def observe(self, sample: Reduced, policy: CollectivesPolicy, times: StepTimes) -> None:
        """Takes the next sample.

        Args:
            times: lengths of the steps so far, which show where they became longer.
        """
        step = sample.step
        self.samples += 1
        self.spacing.push(step)
        if self.samples <= policy.collective_skipped:
            return
        if self.current is not None and self.current.over(step):
            self.ended.append(self.current)
            self.current = None
        usual = math.nan
        if len(self.usual) >= policy.collective_usual:
            # What a busy machine does to single steps is in the upper half.
            usual = _lower_quartile([took for took, _ in self.usual])
        least = max(policy.collective_least_seconds, policy.collective_least_share * sample.length)
        if not (
            sample.seconds > policy.collective_factor * usual and sample.seconds - usual > least
        ):
            self.usual.append((sample.seconds, sample.own))
            self.slow.clear()
            self.quiet = step
            return
        most = max(policy.collective_looks, policy.collective_steps)
        self.slow = [*self.slow, sample][-most:]
        if self.current is None:
            if not self._is_slow(policy, usual):
                return
            # The first slow sample may have been slow long before, and no later.
            first = self.slow[0].step
            onset = times.rise(self.quiet, step)
            self.current = SlowCollectives(
                first_step=first if onset is None else min(first, onset),
                seen_step=step,
                last_step=step,
                clear_after=0,
                usual=usual,
                now=sample.seconds,
                step_seconds=sample.length,
            )
        current = self.current
        current.last_step = step
        current.clear_after = max(
            self.spacing.steps(policy.collective_calm), policy.collective_steps
        )
        current.now = median([slow.seconds for slow in self.slow])
        current.step_seconds = median([slow.length for slow in self.slow])

    def take(self) -> Iterator[SlowCollectives]:
        """What is to be reported after a window: what ended in it, and what has not."""
        yield from self.ended
        self.ended = []
        if self.current is not None:
            yield self.current

    def _is_slow(self, policy: CollectivesPolicy, usual: float) -> bool:
        """Whether it lasts, and neither the ranks nor their machine explain it."""
        lasts = self.slow[-1].step - self.slow[0].step
        if len(self.slow) < policy.collective_looks or lasts < policy.collective_steps - 1:
            return False
        own = median([slow.own for slow in self.slow])
        if own > policy.collective_own * median([own for _, own in self.usual]):
            return False
        if median([slow.busy for slow in self.slow]) > policy.collective_busy:
            return False
        more = median([slow.seconds for slow in self.slow]) - usual
        return more >= policy.collective_queued * median([slow.queued for slow in self.slow])


def finding_of_slow(incident: SlowCollectives) -> Finding:
    """The finding of one incident."""
    step = incident.first_step
    times = number(incident.now / incident.usual)
    return incident.finding(
        kind="collective.slow",
        severity="warning",
        title=f"Collectives take {times} times as long on every rank since step {step}",
        cause=(
            f"Once all ranks have their gradients, the reduction takes {duration(incident.now)} of "
            f"a step of {duration(incident.step_seconds)}, and took {duration(incident.usual)} "
            "before. All ranks wait alike: no rank computes longer than the others, what lies "
            "between them is slow."
        ),
        remedy=(
            "Look at the network: a link that fell back to a lower rate or loses packets, another "
            "job's traffic, an interface other than the one meant (`NCCL_SOCKET_IFNAME`, "
            "`GLOO_SOCKET_IFNAME`); or what runs between the last gradient and the step."
        ),
        evidence={
            "usual_seconds": incident.usual,
            "seconds": incident.now,
            "step_seconds": incident.step_seconds,
        },
    )


def _lower_quartile(values: Sequence[float]) -> float:
    """Interpolated, as numpy's; of some dozens several times as fast."""
    ordered = sorted(values)
    place = (len(ordered) - 1) / 4
    low = ordered[int(place)]
    return low + (ordered[min(int(place) + 1, len(ordered) - 1)] - low) * (place % 1)
