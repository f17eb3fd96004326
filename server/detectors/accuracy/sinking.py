"""Scores of some evaluations that are worse from one to the next, from the first one on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors.accuracy.constant import ConstantPolicy
from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.statistics import mann_kendall
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.detectors.policy import Observations, Share, Sigmas
from rankscope.server.detectors.profiles import OWN_GOAL

# Mann-Kendall Z of another score that gets better: of 7 values by chance 1 in 100.
_RISES = 2.3


@dataclass(frozen=True, slots=True)
class SinkingPolicy(ConstantPolicy):
    """Thresholds of `accuracy.stalled` for evaluations that sink; `apart_steps` of its parent.

    Attributes:
        sinking: evaluations before they are judged: fewer in order come so by chance.
        sinking_most: evaluations up to which they are judged so; of more means are compared.
        sinking_error: Mann-Kendall Z below 0: of 8 values only all in order, or two neighbours
            exchanged, reach it (13 of 40,320 orders have that or less).
        sunk: share of the first score that has been lost: what is over-trained loses less.
    """

    sinking: Observations = 8
    sinking_most: Observations = 120
    sinking_error: Sigmas = 3.0
    sunk: Share = 0.25


@dataclass(frozen=True, slots=True)
class Sunk:
    """Attributes: name, first and last score, how many there were, step of the first."""

    name: str
    first: float
    last: float
    observed: int
    since: int


def sunk(name: str, steps: list[int], values: list[float], policy: SinkingPolicy) -> Sunk | None:
    """Whether scores of evaluations, which lie apart, have become worse and worse.

    Args:
        steps: of the values, ascending.
    """
    many = len(values)
    if not policy.sinking <= many <= policy.sinking_most or values[0] <= 0:
        return None
    if steps[-1] - steps[0] < policy.apart_steps * (many - 1):
        return None
    # The first one is the best, or the second: what rises before it falls is another matter.
    if int(np.argmax(values)) > 1 or values[-1] > (1.0 - policy.sunk) * values[0]:
        return None
    if mann_kendall(values) > -policy.sinking_error:
        return None
    return Sunk(name, values[0], values[-1], many, steps[0])


def rises(values: list[float], policy: SinkingPolicy) -> bool:
    """Whether another score gets better: one is given up for the other then.

    It may be one evaluation behind: what is posted at one step is taken by name.
    """
    # Of many the newest are enough, and these cost little.
    newest = values[-policy.sinking_most :]
    return len(newest) >= policy.sinking - 1 and mann_kendall(newest) > _RISES


def finding(episode: Episode[Sunk]) -> Finding:
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
            "score takes another end of the scale for the better one."
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
