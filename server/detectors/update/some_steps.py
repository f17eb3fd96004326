"""Steps without gradients now and then: part of the batches is for nothing. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.wording import percent

# Of the latest sampled steps, the share without gradients from which on a loop does it, and how
# often it comes and goes: one stretch, or two, is another matter.
_LATEST, _SHARE, _CHANGES = 32, 0.25, 6


@dataclass(slots=True)
class Some:
    """Share of the latest steps at which no parameter had a gradient."""

    share: float


@dataclass(slots=True)
class SomeSteps(Condition[Some]):
    """Follows whether gradients are there at some steps only, again and again.

    Attributes:
        latest: steps at which all ranks were sampled, and whether none had a gradient.
        turns_at: since when optimizers step in turns, each with gradients of its own.
    """

    latest: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=_LATEST))
    turns_at: float = math.inf
    watch: Watch[Some] = field(default_factory=lambda: Watch(clear_after=_LATEST))

    def take(self, step: int, *, without: bool, had: bool) -> None:
        """Takes the next sampled step; `had`: gradients have been seen at enough of them."""
        self.latest.append((step, without))
        share = sum(gone for _, gone in self.latest) / _LATEST
        changes = sum(a != b for (_, a), (_, b) in pairwise(self.latest))
        if step >= self.turns_at or share < _SHARE or changes < _CHANGES:
            self.watch.good(step)
            return
        if len(self.latest) < _LATEST or not had:
            return
        first = next(at for at, gone in self.latest if gone)
        self.watch.bad(step, Some(share), first_step=first).facts.share = share

    def finding(self, episode: Episode[Some]) -> Finding:
        """What is reported of an episode."""
        share = percent(episode.facts.share)
        return episode.finding(
            kind="update.missing",
            key="some steps without gradients",
            severity="warning",
            title=f"At {share} of the steps no parameter has a gradient: the optimizer steps in "
            "vain",
            stage="reduced_gradient",
            cause=(
                f"Since step {episode.first_step} no parameter had a gradient at {share} of the "
                "sampled steps when the optimizer stepped, and none was moved, though losses were "
                "computed: that part of the batches is for nothing. Gradients were set to None "
                "between `backward` and `step` (a `zero_grad` in the wrong place), or `backward` "
                "is called at some steps only and `step` at all of them."
            ),
            remedy=(
                "Call `zero_grad` right after `step`, or right before `backward`, and `step` only "
                "where gradients have been computed: of an accumulation at every n-th micro-batch."
            ),
            evidence={"share": episode.facts.share},
        )
