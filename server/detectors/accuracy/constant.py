"""Scores of answers that are the same number at every evaluation: nothing that is learned shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors.accuracy.lost import LostPolicy
from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.detectors.policy import Count, Share, Steps
from rankscope.server.detectors.profiles import OWN_GOAL
from rankscope.server.window import Float64

# Parts of a name, one of which says that answers are counted. Not of rewards: those that are rare
# are 0 for long.
_OF_ANSWERS = frozenset(
    "accuracy acc f1 auc auroc auprc map iou miou dice precision recall ndcg mrr".split()
)
_PARTS = re.compile(r"[a-z]+\d*")


@dataclass(frozen=True, slots=True)
class ConstantPolicy(LostPolicy):
    """Thresholds of `accuracy.stalled` for scores that never change.

    Attributes:
        same: observations, all of them the same number. What a model answers changes with each
            step that teaches it something, if only a little.
        same_steps: steps that they extend over, at the least.
        poor: score above which it may be all that is to be had.
    """

    same: Count = 6
    same_steps: Steps = 120
    poor: Share = 0.5


@dataclass(slots=True)
class Constant:
    """Attributes: name, value and number of observations of a score, and the first of them."""

    name: str
    value: float
    observed: int
    since: int


def constant(
    name: str, steps: list[int], values: Float64, policy: ConstantPolicy
) -> Constant | None:
    """A score that has been one and the same low number since it was first logged, or is now 0."""
    value = float(values[-1])
    if value > policy.poor or not set(_PARTS.findall(name.lower())) & _OF_ANSWERS:
        return None
    others = np.flatnonzero(values != value)
    first = int(others[-1]) + 1 if len(others) else 0
    same = len(values) - first
    if same < policy.same or steps[-1] - steps[first] < policy.same_steps or (first and value):
        return None
    return Constant(name, value, same, steps[first])


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
