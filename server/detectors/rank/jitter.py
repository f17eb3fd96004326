"""A rank that is late by much again and again, and in time in between. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rankscope.server.detectors.mechanisms.equal_distances import tail
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.statistics import Spacing
from rankscope.server.detectors.policy import (
    Number,
    Observations,
    Policy,
    Seconds,
    Share,
    Times,
)

# A step, its seconds, and by how many of them each rank was late.
_Sample = tuple[int, float, Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class JitterPolicy(Policy):
    """When a rank is late now and then.

    Attributes:
        jitter_samples: number of recent samples that are judged: a delay at every tenth step is
            among them six times.
        jitter_seconds: lateness that counts, at the least. It is more than what a scheduler takes.
        jitter_excess: the same as a share of the usual step.
        jitter_times: samples of these at which the rank was so late, from which on it is reported:
            326 healthy jobs of 2 to 4 ranks on 2 shared cores had 3 at the most.
        jitter_chance: probability, at the most, that any of the ranks has so many of all such
            delays where each delay strikes one of them at random: on a machine that has too much
            to do all ranks are late now and then. A run of 1,000 steps is judged 16 times.
        jitter_often: share of the samples since the first one, up to which it is now and then.
        jitter_lost: share of the time that is waited for it, from which on it is a warning.
        rare_samples: the same number of times among so many samples is reported where the rank is
            late by `rare_seconds` and `rare_excess` of the usual step: a pause at every fiftieth.
        rare_seconds: by so much a scheduler delays nobody.
        rare_excess: as `jitter_excess`.
        rare_lost: share of the time that is waited for it, at the least: by so much every step
            would be 1.5 times as long on average; to save now and then takes less.
    """

    jitter_samples: Observations = 64
    jitter_seconds: Seconds = 0.01
    jitter_excess: Share = 0.5
    jitter_times: Observations = 5
    jitter_chance: Number = 1e-3
    jitter_often: Share = 0.75
    jitter_lost: Share = 0.2
    rare_samples: Observations = 256
    rare_seconds: Seconds = 0.05
    rare_excess: Times = 4.0
    rare_lost: Share = 1 / 3


@dataclass(slots=True, kw_only=True)
class Jittering(Incident):
    """A rank that is late now and then.

    Attributes:
        rank: which.
        late_seconds: median of how late it was where it was.
        usual_seconds: median length of a step where it was not.
        times, samples: it was late at this many of so many.
        lost: share of the time of these that the others waited for it.
    """

    rank: int
    late_seconds: float = 0.0
    usual_seconds: float = 0.0
    times: int = 0
    samples: int = 0
    lost: float = 0.0

    def evidence(self) -> dict[str, float]:
        """What the findings of all kinds have in common."""
        return {
            "late_seconds": self.late_seconds,
            "step_seconds": self.usual_seconds,
            "lost_share": self.lost,
            "times": self.times,
            "samples": self.samples,
        }


@dataclass(slots=True)
class Jitter:
    """Follows how late single ranks are, sample by sample.

    Statistic:
        Of the last 64 samples, at how many a rank was late by more than half of a usual step; and
        whether that are too many of all ranks' delays for chance (binomial, times the ranks). Of
        the last 256 the same by more than four usual steps, where a third of the time is lost.

    Args:
        policy: thresholds.
    """

    policy: JitterPolicy
    current: Jittering | None = None
    _ranks: int = 0
    _spacing: Spacing = field(default_factory=Spacing)
    _samples: deque[_Sample] = field(init=False)
    _ended: list[Jittering] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._samples = deque(maxlen=self.policy.rare_samples)

    def observe(self, step: int, seconds: float, late: Mapping[int, float], ranks: int) -> None:
        """Takes the next sample.

        Args:
            step: of which it is.
            seconds: length of the step.
            late: rank -> by how many seconds it was late.
            ranks: number of ranks that are compared.
        """
        self._ranks = ranks
        self._spacing.push(step)
        if self.current is not None and self.current.over(step):
            self._ended.append(self.current)
            self.current = None
        self._samples.append((step, seconds, late))
        policy, every = self.policy, list(self._samples)
        newest = every[-policy.jitter_samples :]
        # Whether it was a burst or goes on shows when it is in time again.
        if sum(map(bool, (late for _, _, late in newest))) >= policy.jitter_times:
            least = _much(newest, policy.jitter_seconds, policy.jitter_excess)
            if self._report(newest, least, 0.0, step):
                return
        if late and max(late.values()) > policy.rare_seconds and len(every) > len(newest):
            least = _much(every, policy.rare_seconds, policy.rare_excess)
            self._report(every, least, policy.rare_lost, step)

    def forget(self) -> None:
        """Whoever was late so far is late all the time."""
        self._samples.clear()

    def take(self) -> Iterator[Jittering]:
        """What is to be reported after a window: what ended in it, and what has not."""
        yield from self._ended
        self._ended = []
        if self.current is not None:
            yield self.current

    # ------------------------------------------------------------------------------------- inside

    def _recurring(self, samples: list[_Sample], least: float) -> int | None:
        """The rank that is late by more than `least` seconds too often for chance."""
        policy = self.policy
        times = Counter(
            rank for _, _, late in samples for rank, seconds in late.items() if seconds > least
        )
        if not times:
            return None
        rank, most = times.most_common(1)[0]
        if most < policy.jitter_times:
            return None
        if self._ranks * tail(times.total(), most, 1 / self._ranks) > policy.jitter_chance:
            return None
        first = next(n for n, (_, _, late) in enumerate(samples) if late.get(rank, 0.0) > least)
        since = len(samples) - first
        return rank if most <= policy.jitter_often * since else None

    def _report(self, samples: list[_Sample], least: float, lost: float, step: int) -> bool:
        """Reports the rank that is late so often, if there is one; whether there is.

        Args:
            least: seconds of lateness that count.
            lost: share of the time that the others have to wait for it.
        """
        rank = self._recurring(samples, least)
        if rank is None:
            return False
        late = [(at, by[rank]) for at, _, by in samples if by.get(rank, 0.0) > least]
        whole = sum(seconds for _, seconds, _ in samples)
        share = min(sum(seconds for _, seconds in late) / whole, 1.0)
        if share < lost:
            return False
        first, last = late[0][0], late[-1][0]
        if self.current is None or self.current.rank != rank:
            if self.current is not None:
                self._ended.append(self.current)
            self.current = Jittering(
                first_step=first, seen_step=step, last_step=last, clear_after=0, rank=rank
            )
        current = self.current
        current.last_step = last
        current.clear_after = self._spacing.steps(
            self.policy.jitter_samples
            if len(samples) <= self.policy.jitter_samples
            else self.policy.rare_samples
        )
        since = [sample for sample in samples if sample[0] >= first]
        current.late_seconds = median([seconds for _, seconds in late])
        current.usual_seconds = median(
            [seconds for _, seconds, by in since if by.get(rank, 0.0) <= least]
        )
        current.times, current.samples = len(late), len(since)
        # Of all that is remembered: five slow steps are five of 64, not all of five.
        current.lost = share
        return True


def _much(samples: list[_Sample], seconds: float, excess: float) -> float:
    """Seconds of lateness that count: `seconds`, and `excess` times a usual step."""
    usual = median([length for _, length, late in samples if not late] or [0.0])
    return max(seconds, excess * usual)
