"""Scores of some evaluations that are worse from one to the next, from the first one on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors.accuracy.constant import ConstantPolicy
from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.statistics import mann_kendall
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.detectors.policy import Observations, Share, Sigmas, Steps
from rankscope.server.detectors.profiles import OWN_GOAL

# Mann-Kendall Z of another score that gets better: of 7 values by chance 1 in 187.
_RISES = 2.3


@dataclass(frozen=True, slots=True)
class SinkingPolicy(ConstantPolicy):
    """Thresholds of `accuracy.stalled` for evaluations that sink; `apart_steps` of its parent.

    Attributes:
        sinking: evaluations before they are judged: fewer in order come so by chance.
        sinking_most: of more evaluations the first and so many of the newest are judged.
        begun: step by which the first one has to be there: a model that was trained before may
            well lose what it knew.
        sinking_error: Mann-Kendall Z below 0: of 8 values only all in order, or two neighbours
            exchanged, reach it (8 of 40,320 orders do).
        sunk: share of the first score that has been lost: what is over-trained loses less.
        surely: Mann-Kendall Z below 0 of what loses less, as of 11 evaluations in order:
            over-training has its best score later than at the very first one.
        slightly: share of the first score that it has lost then.
    """

    sinking: Observations = 8
    sinking_most: Observations = 120
    begun: Steps = 50
    sinking_error: Sigmas = 3.0
    sunk: Share = 0.25
    surely: Sigmas = 4.0
    slightly: Share = 0.05


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Attributes: name, first and last score, how many there were, step of the first."""

    name: str
    first: float
    last: float
    observed: int
    since: int


def sunk(
    name: str, since: int, step: int, values: list[float], observed: int, policy: SinkingPolicy
) -> Evaluated | None:
    """Whether scores of evaluations, which lie apart, have become worse and worse.

    Args:
        since, step: of the first and of the last one; observed: how many there were.
    """
    if observed < policy.sinking or since > policy.begun or values[0] <= 0:
        return None
    if step - since < policy.apart_steps * (observed - 1):
        return None
    if len(values) > policy.sinking_most:
        values = [values[0], *values[1 - policy.sinking_most :]]
    # The first one is the best, or the second: what rises before it falls is another matter.
    if int(np.argmax(values)) > 1 or values[-1] > (1.0 - policy.slightly) * values[0]:
        return None
    small = values[-1] > (1.0 - policy.sunk) * values[0]
    if mann_kendall(values) > -(policy.surely if small else policy.sinking_error):
        return None
    return Evaluated(name, values[0], values[-1], observed, since)


def rises(values: list[float], policy: SinkingPolicy) -> bool:
    """Whether another score gets better: one is given up for the other then.

    It may be one evaluation behind: what is posted at one step is taken by name.
    """
    # Of many the newest are enough, and these cost little.
    newest = values[-policy.sinking_most :]
    return len(newest) >= policy.sinking - 1 and mann_kendall(newest) > _RISES


def finding(episode: Episode[Evaluated]) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    first, last = number(facts.first), number(facts.last)
    return episode.finding(
        kind="accuracy.stalled",
        key=f"{OWN_GOAL}{facts.name} sinks",
        severity="warning",
        title=f"`{facts.name}` gets worse and worse: from {first} to {last}",
        cause=(
            f"By its name `{facts.name}` is to rise. It fell from one evaluation to the next, of "
            f"{count(facts.observed, 'evaluation')} since step {episode.first_step}. What the "
            "steps minimise makes it worse: a loss or one of its terms has the wrong sign (of a "
            "pair the worse one is ranked higher), targets belong to other samples, or the "
            "score takes another end of the scale for the better one. Of a model that was trained "
            "before, it forgets what it knew."
        ),
        remedy=(
            "Compute loss and score of one batch by hand, before and after a small step: as the "
            "loss falls the score has to rise. Look at the signs of all terms, and at what the "
            "score takes for right."
        ),
        evidence={
            "series": facts.name,
            "first": facts.first,
            "last": facts.last,
            "observed": facts.observed,
        },
    )
