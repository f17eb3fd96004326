"""Rewards and returns that are after hundreds of steps what they were at first. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors.accuracy.standing import StandingPolicy
from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.statistics import BLOCK, times_fewer
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.detectors.metric.score_names import REWARDS
from rankscope.server.detectors.policy import Observations, Sigmas, Times
from rankscope.server.detectors.profiles import OWN_GOAL
from rankscope.server.window import Float64

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class UnmovedPolicy(StandingPolicy):
    """Thresholds of `accuracy.stalled` for rewards that do not move.

    Attributes:
        unmoved: observations before they are judged: policies that learn at all show it earlier on
            tasks that a test waits for; those that explore for thousands of steps are told that
            nothing has come of it yet.
        unmoved_rise: what it may have risen by since then, by a line through all of it and two
            standard errors of that, over the scatter of single observations around it: so little
            is seen in none of them. Of rewards that rise by their own scatter in 400 steps 1 in 10
            is within it after 200, of those that rise by twice as much none.
        unmoved_wanders: ten times the variance of the means of ten in a row, over that within them,
            from which on it has risen and fallen: of independent values it is 1, of those that
            follow each other by half 2.5.
        unmoved_over: standard errors by which it has risen beyond chance, and is over.
    """

    unmoved: Observations = 200
    unmoved_rise: Sigmas = 0.75
    unmoved_wanders: Times = 4.0
    unmoved_over: Sigmas = 3.0


@dataclass(frozen=True, slots=True)
class Unmoved:
    """Attributes: name, mean, how many observations there were, step of the first."""

    name: str
    mean: float
    observed: int
    since: int


def unmoved(
    name: str,
    parts: frozenset[str],
    since: int,
    values: Float64,
    observed: int,
    policy: UnmovedPolicy,
    *,
    known: bool,
) -> Unmoved | None:
    """Whether a reward has no trend since it was first logged.

    Args:
        parts: of the name, in lower case.
        since: step of the first one.
        values: float64 [N], means of all `observed` ones.
        known: whether it was found before: it is over when it surely rises.
    """
    if observed < policy.unmoved or not parts & REWARDS or since > policy.begun:
        return None
    mean = float(values.mean())
    rise, scatter, fewer = _line(values)
    if scatter <= _ROUNDING * abs(mean):
        # One and the same number: nothing was met yet, or all there is from the start on.
        return Unmoved(name, mean, observed, since) if mean < 0 else None
    if _wanders(values, policy):
        return None
    error = scatter * math.sqrt(12 * fewer / len(values))
    most = policy.unmoved_over * error if known else policy.unmoved_rise * scatter - 2 * error
    if not -policy.unmoved_over * error < rise <= most:
        return None  # what falls is another finding
    if abs(mean) <= 2 * scatter * math.sqrt(fewer / len(values)):
        return None  # scaled to a mean of 0, or what one of two players wins of the other
    return Unmoved(name, mean, observed, since)


def _wanders(values: Float64, policy: UnmovedPolicy) -> bool:
    """Whether means of ten in a row differ by more than these ten do (analysis of variance)."""
    blocks = values[len(values) % BLOCK :].reshape(-1, BLOCK)
    within, between = blocks.var(axis=1, ddof=1).mean(), BLOCK * blocks.mean(axis=1).var(ddof=1)
    return bool(between > policy.unmoved_wanders * within)


def _line(values: Float64) -> tuple[float, float, float]:
    """By how much the line through values rises, how they scatter around it, and `times_fewer`."""
    at = np.linspace(-0.5, 0.5, len(values))
    rise = float(at @ values / (at @ at))
    left = values - values.mean() - rise * at
    return rise, float(left.std()), times_fewer(left)


def finding(episode: Episode[Unmoved]) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    mean = number(facts.mean)
    return episode.finding(
        kind="accuracy.stalled",
        key=f"{OWN_GOAL}{facts.name} unmoved",
        severity="warning",
        title=f"`{facts.name}` has stayed near {mean} since step {episode.first_step}",
        cause=(
            f"By its name `{facts.name}` is to rise. In {count(facts.observed, 'observation')} it "
            "has moved no further than chance moves it. The policy does not learn (its output is "
            "cut off from the loss, the bonus for entropy outweighs the reward, the advantages are "
            "all the same or belong to other actions), it has settled on one action in its first "
            "steps (a learning rate too high), or the reward is too rare to be met."
        ),
        remedy=(
            "Look at the probabilities of the actions, now and at the start: all alike, or one of "
            "them 1? Compare the sizes of the terms of the loss and of their gradients; try a "
            "tenth of the learning rate. If the task needs longer exploration, nothing."
        ),
        evidence={"series": facts.name, "mean": facts.mean, "observed": facts.observed},
    )
