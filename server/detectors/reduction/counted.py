"""Ranks that count wrongly in a reduction that gives an approximation.

Of compressed gradients no step gives the mean, and no single one shows what a rank counts. The
share of each rank's own gradient that comes out, the mean over some samples, does: the ranks
compress alike, so that a rank that is added twice, or lost, has twice the others' share, or none.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import change_point
from rankscope.server.detectors.mechanisms.wording import count, number, ranks
from rankscope.server.window import Float64, Reduction

# Samples of which the shares are the mean, and from one judgement to the next.
_SAMPLES, _STRIDE = 24, 8
# Standard errors by which a share has to differ from the others'. Some 100 judgements of up to 64
# ranks: 5 would do for one false alarm in 100 runs of normal shares.
_CERTAIN = 7.0
# Times the others' that a rank counts by a fault: lost, negated, halved, added again. What shards
# that are unlike make of the same compression lies anywhere.
_FAULTS = (-1.0, 0.0, 0.5, 2.0, 3.0)
# How near it has to be, relative (of a rank that is lost, to what one should count), and how far
# the others may lie from each other.
_NEAR, _LOST, _ALIKE = 0.2, 0.15, 0.15


@dataclass(slots=True)
class Counted:
    """Attributes: odd: rank -> times what the others count; ranks: all; alone: one is known to."""

    odd: dict[int, float]
    ranks: tuple[int, ...]
    alone: bool


@dataclass(slots=True)
class CountedShares(Condition[Counted]):
    """Follows the shares of the ranks of one replica class.

    Attributes:
        recent: step, shares over their mean, of the last samples.
        taken: samples so far.
    """

    members: tuple[int, ...] = ()
    recent: deque[tuple[int, Float64]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    taken: int = 0
    watch: Watch[Counted] = field(default_factory=lambda: Watch(clear_after=8))

    def observe(self, made: Reduction) -> None:
        """Takes the next reduction whose shares are known."""
        members = tuple(made.ranks.tolist())
        if not made.shares:
            return
        if members != self.members:
            self.members, self.taken = members, 0
            self.recent.clear()
        shares = np.array(made.shares)
        size = float(np.abs(shares).mean())
        if not size > 0:
            return
        self.recent.append((made.step, shares / size))
        self.taken += 1
        if len(self.recent) < _SAMPLES or self.taken % _STRIDE:
            return
        found = self._found()
        if found is None:
            self.watch.good(made.step)
            return
        self.watch.clear_after = max(8, made.step - self.recent[0][0])
        self.watch.bad(made.step, found, first_step=self._onset(found)).facts = found

    def _found(self) -> Counted | None:
        samples = np.stack([shares for _, shares in self.recent])
        mean = samples.mean(axis=0)
        error = samples.std(axis=0, ddof=1) / math.sqrt(len(samples))
        usual = float(np.median(mean)) if len(mean) > 2 else float(mean.max())
        if not usual > 0:
            return None
        times = mean / usual
        blur = np.hypot(error, float(np.median(error))) / usual
        far = (np.abs(times - 1.0) > _CERTAIN * blur) & (np.abs(times - 1.0) > 2 * _ALIKE)
        rest = ~far
        if not far.any() or 2 * far.sum() > len(far):
            return None
        if np.abs(times[rest] - 1.0).max() > _ALIKE:
            return None
        if not all(map(_is_fault, times[far].tolist())):
            return None
        odd = {self.members[row]: float(times[row]) for row in np.flatnonzero(far).tolist()}
        return Counted(odd, self.members, len(self.members) > 2)

    def _onset(self, found: Counted) -> int:
        """The sample from which on the share of the rank that stands out is what it is now."""
        odd = self.members.index(next(iter(found.odd)))
        rest = [row for row, rank in enumerate(self.members) if rank not in found.odd]
        times = [float(shares[odd] / shares[rest].mean()) for _, shares in self.recent]
        at, before, after = change_point(np.array(times))
        changed = abs(before - 1.0) < 0.5 * abs(after - 1.0)
        return self.recent[at if changed else 0][0]

    def finding(self, episode: Episode[Counted]) -> Finding:
        """What is reported of an episode."""
        facts, step = episode.facts, episode.first_step
        who = ranks(sorted(facts.odd))
        times = next(iter(facts.odd.values()))
        said = "nothing" if abs(times) <= _LOST else f"{number(times)} times as much as the others"
        if not facts.alone:
            said = f"{number(times)} times what the other one does"
        if abs(times) <= _LOST:
            why = "it is not added, or what it sends is empty"
        elif times < 0:
            why = "its sign is turned"
        else:
            why = "it is added more than once, or multiplied by a number of its own"
        return episode.finding(
            kind="reduction.wrong",
            key="shares",
            severity="warning",
            title=f"{who.capitalize()} counts {said} in the reduction since step {step}",
            ranks=tuple(sorted(facts.odd)) if facts.alone else facts.ranks,
            stage="reduced_gradient",
            cause=(
                "The reduction gives an approximation of the mean (something compresses it). Of "
                f"what is the ranks' own in their gradients, that of {who} comes out "
                f"{number(times)} times as much as that of the others, the mean of "
                f"{count(_SAMPLES, 'sample')}: before, or in, the reduction {why}."
            ),
            remedy=(
                f"Look at what {who} sends and how often it is added: each rank's compressed "
                "gradient once, divided by the number of ranks, and what is left over kept for "
                "the rank's own next step."
            ),
            evidence={
                "pattern": "shares",
                "odd": {str(rank): value for rank, value in sorted(facts.odd.items())},
                "ranks_in_it": len(facts.ranks),
            },
        )


def _is_fault(times: float) -> bool:
    """Whether a fault makes a rank count about so many times."""
    return any(abs(times - fault) <= (_NEAR * abs(fault) or _LOST) for fault in _FAULTS)
