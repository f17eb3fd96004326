"""Scores of answers that are the same number at every evaluation: nothing that is learned shows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rankscope.server.detectors.accuracy.lost import LostPolicy
from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.detectors.policy import Count, Share, Steps
from rankscope.server.detectors.profiles import OWN_GOAL

# Parts of a name, one of which says that answers are counted. Not of rewards: those that are rare
# are 0 for long.
OF_ANSWERS = frozenset(
    "accuracy acc f1 auc auroc auprc map iou miou dice precision recall ndcg mrr".split()
)
# Observations in a row above 0, before a score that is 0 has come to be that.
_SEEN = 2
# Differences of means over the ranks that rounding makes.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class ConstantPolicy(LostPolicy):
    """Thresholds of `accuracy.stalled` for scores that never change.

    Attributes:
        same: observations, all of them the same number. What a model answers changes with each
            step that teaches it something, if only a little; with fewer, segmentations that begin
            with the background alone looked so.
        same_steps: steps that they extend over, at the least: as many evaluations, 20 steps apart.
        apart_steps: steps from one to the next, on average: what is logged more often holds the
            last evaluation's, or is of single batches. Half of the 20 above.
        fallen_loss: share of its start that the loss has lost by then: until something is learned
            there is nothing to be seen. A segmentation whose masks belonged to other images had
            lost three quarters.
        poor: score above which it may be all that is to be had: that of the larger of two classes.
    """

    same: Count = 8
    same_steps: Steps = 160
    apart_steps: Steps = 10
    poor: Share = 0.5
    fallen_loss: Share = 0.3


@dataclass(slots=True)
class Constant:
    """Attributes: name, value and number of observations of a score, and the first of them."""

    name: str
    value: float
    observed: int
    since: int


@dataclass(slots=True)
class Run:
    """The newest observations of a score that are one and the same number.

    Attributes:
        length: how many, from step `since` on.
        before: how many in a row before them were above 0.
    """

    value: float = math.nan
    length: int = 0
    since: int = -1
    before: int = 0
    _above: int = 0

    def push(self, step: int, value: float) -> None:
        """Takes the next observation."""
        if abs(value - self.value) <= _ROUNDING * abs(value):
            self.length += 1
        else:
            self.before = self._above
            self.value, self.length, self.since = value, 1, step
        self._above = self._above + 1 if value > 0 else 0

    def found(
        self, name: str, parts: frozenset[str], step: int, observed: int, policy: ConstantPolicy
    ) -> Constant | None:
        """A low number that it has been since it was first logged, or 0 that it has come to be.

        Args:
            parts: of the name, in lower case.
            observed: observations of the score so far.
        """
        lasts = step - self.since
        if self.length < policy.same or lasts < policy.same_steps or not parts & OF_ANSWERS:
            return None
        if lasts < policy.apart_steps * (self.length - 1) or self.value > policy.poor:
            return None
        lost = self.value == 0 and self.before >= _SEEN
        if self.length < observed and not lost:
            return None
        return Constant(name, self.value, self.length, self.since)


def finding(episode: Episode[Constant]) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    value = number(facts.value)
    return episode.finding(
        kind="accuracy.stalled",
        key=f"{OWN_GOAL}{facts.name} constant",
        severity="warning",
        title=f"`{facts.name}` has been exactly {value} since step {episode.first_step}",
        cause=(
            f"By its name `{facts.name}` is to rise, and it was {value} at each of "
            f"{count(facts.observed, 'observation')}, to the last digit. The model gives all "
            "samples one and the same answer (the background, the most frequent class), as where "
            "targets do not belong to their inputs; or what is evaluated is not what is trained (a "
            "copy that is never updated), or is compared with other targets."
        ),
        remedy=(
            "Look at the answers to one batch of the evaluation, and compute the score of a batch "
            "of the training in the same way."
        ),
        evidence={"series": facts.name, "value": facts.value, "observed": facts.observed},
    )
