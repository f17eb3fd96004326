"""Scores that had risen and have lost all of it again. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.statistics import BLOCK
from rankscope.server.detectors.mechanisms.wording import number
from rankscope.server.detectors.policy import Blocks, Observations, Policy, Share, Sigmas
from rankscope.server.detectors.profiles import OWN_GOAL
from rankscope.server.window import Float64

# Most blocks that a course is cut into: of longer ones each block is longer.
_MOST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class LostPolicy(Policy):
    """Thresholds of `accuracy.stalled` for scores that lose what they had gained.

    What is chance is judged by `lost_error`; the others say what shape of a course is a fall.

    Attributes:
        lost_scored: observations before a score is judged: eight blocks, of which the start, the
            rise and the fall take one at least each, and what is low since three.
        low: latest blocks, all of which have to be low: what dips for less comes back.
        left: share of what had been gained that may be left: a score that keeps more is worse, and
            not lost.
        near: share of the fall up to which a block is still near the best, or already near what the
            score has come to: between the quarters lies the fall itself.
        lost_error: standard errors by which it had risen; and fallen, times the root of the blocks
            that the fall took: of 600 random walks of 400 steps 13 do so, of 600 first-order
            autoregressions of 0.95 none.
    """

    lost_scored: Observations = 80
    low: Blocks = 3
    left: Share = 0.1
    near: Share = 0.25
    lost_error: Sigmas = 6.0


@dataclass(frozen=True, slots=True)
class Lost:
    """Attributes: name, levels at first, at best and now, the error of a block, since when."""

    name: str
    start: float
    best: float
    now: float
    error: float
    since: int


def lost(name: str, steps: list[int], values: Float64, policy: LostPolicy) -> Lost | None:
    """Whether a score is back where it began, or below, after it had risen.

    Args:
        steps: of the values, ascending; values: float64 [N], N as many.
    """
    size = max(BLOCK, math.ceil(len(values) / _MOST_BLOCKS))
    cut = len(values) % size  # the newest ones fill the last block
    blocks = values[cut:].reshape(-1, size).mean(axis=1)
    if len(blocks) < 2 * policy.low + 1:
        return None
    single = float(np.std(np.diff(values))) / math.sqrt(2 * size)
    best, now = float(blocks.max()), float(blocks[-policy.low :].max())
    start = float(values[:size].mean())
    if best <= max(start, now) or now > start + policy.left * (best - start):
        return None
    last = int(np.flatnonzero(blocks > best - policy.near * (best - now))[-1])
    took = int(np.argmax(blocks[last:] < now + policy.near * (best - now)))
    # How blocks scatter from one to the next, but for the fall itself.
    moves = np.delete(np.diff(blocks), np.arange(last, min(last + took, len(blocks) - 1)))
    error = max(single, float(np.sqrt(np.mean(moves**2))) / math.sqrt(2))
    rose = best - start > policy.lost_error * math.sqrt(2) * error
    fell = best - now > policy.lost_error * math.sqrt(max(took, 2)) * error
    if not (rose and fell and error > 0):
        return None
    since = steps[cut + (last + 1) * size]
    return Lost(name, start, best, float(blocks[-policy.low :].mean()), error, since)


def finding(episode: Episode[Lost]) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    name = facts.name
    best, now = number(facts.best), number(facts.now)
    return episode.finding(
        kind="accuracy.stalled",
        key=f"{OWN_GOAL}lost:{name}",
        severity="warning",
        title=f"`{name}` has fallen from {best} to {now} since step {episode.first_step}",
        cause=(
            f"By its name `{name}` is to rise. It rose from {number(facts.start)} to {best} and "
            f"has lost all of that since step {episode.first_step}: it is {now}, "
            f"{number((facts.best - facts.now) / facts.error)} standard errors below. What the "
            "steps minimise has made it worse since then: the sign of a loss or of an advantage, "
            "advantages or labels of other samples, a learning rate that was raised, or steps so "
            "large that the policy left what it knew."
        ),
        remedy=(
            f"Compare what changed around step {episode.first_step}: schedule, data, the sign of "
            "each term. Go on from a checkpoint before it, with a third of the learning rate or "
            "a bound on the change of the policy (clipping, a KL penalty)."
        ),
        evidence={
            "series": name,
            "start": facts.start,
            "best": facts.best,
            "now": facts.now,
            "standard_error": facts.error,
        },
    )
