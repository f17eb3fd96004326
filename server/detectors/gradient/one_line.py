"""Gradients of different batches that all lie on one line through zero, now one way, now the other.

A gradient of N numbers that has one direction at every step is that of one number: an input, or a
constant among them, that is so much larger than all others that it decides every output.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.wording import number, percent
from rankscope.server.detectors.policy import Observations, Policy, Share

SERIES = ("grad_cosine", "input_rms")


@dataclass(frozen=True, slots=True)
class OneLinePolicy(Policy):
    """Thresholds of gradients that lie on one line.

    Attributes:
        line_recent: number of most recent cosines that are judged.
        line_share: share of them that have to be near 1 or -1. Of gradients that change their
            direction by degrees none is -1; of batches that are drawn at random few are near 1.
        line_cosine: from which on a cosine is near 1, or below its negative near -1.
        line_turns: share of them that have to be near -1: of a slow descent all are near 1, of a
            step too large for one direction (period 2) nearly all are near -1.
        line_inputs: root mean square of the inputs from which on they are large: networks are
            initialised for 1, pixels up to 255 have 100.
    """

    line_recent: Observations = 64
    line_share: Share = 0.9
    line_cosine: Share = 0.98
    line_turns: Share = 0.15
    line_inputs: float = 30.0


@dataclass(slots=True)
class Line:
    """What was seen: shares of cosines near 1 or -1 and near -1, and the size of the inputs."""

    share: float
    turns: float
    inputs: float
    large: bool


@dataclass(slots=True)
class OneLine:
    """Follows the cosine of each gradient to the one before it."""

    policy: OneLinePolicy
    watch: Watch[Line] = field(default_factory=lambda: Watch(clear_after=64))
    _cosines: deque[tuple[int, float]] = field(init=False)
    _inputs: deque[float] = field(default_factory=lambda: deque(maxlen=16))

    def __post_init__(self) -> None:
        self._cosines = deque(maxlen=self.policy.line_recent)

    def push(self, step: int, row: dict[str, float]) -> None:
        """Takes what was posted of a step, by series."""
        if math.isfinite(row.get("input_rms", math.nan)):
            self._inputs.append(row["input_rms"])
        cosine = row.get("grad_cosine", math.nan)
        if not math.isfinite(cosine):
            return
        self._cosines.append((step, cosine))
        policy, n = self.policy, len(self._cosines)
        if n < policy.line_recent:
            return
        turns = sum(cosine < -policy.line_cosine for _, cosine in self._cosines) / n
        share = sum(abs(cosine) > policy.line_cosine for _, cosine in self._cosines) / n
        # The other way at nearly every step is a swing across a valley, with a rate too high.
        if share < policy.line_share or not policy.line_turns < turns < 1 - policy.line_turns:
            self.watch.good(step)
            return
        inputs = median(self._inputs)
        facts = Line(share, turns, inputs, inputs > policy.line_inputs)
        self.watch.bad(step, facts, first_step=self._cosines[0][0]).facts = facts


def finding(episode: Episode[Line]) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    inputs = (
        f" The inputs have a root mean square of {number(facts.inputs)}, where networks are "
        "initialised for 1: they are not normalised, or one of their columns is not."
        if facts.large
        else " Usual causes are an input, a feature or a target that is far larger than all "
        "others, or far from 0; a model of a single parameter has no other gradients."
    )
    evidence = {"share": facts.share, "turns": facts.turns}
    if math.isfinite(facts.inputs):
        evidence["input_rms"] = facts.inputs
    return episode.finding(
        kind="gradient.oscillating",
        key="line",
        severity="warning" if facts.large else "info",
        title=f"All gradients lie on one line, to and fro, since step {episode.first_step}",
        cause=(
            f"At {percent(facts.share)} of the steps the gradient has the direction of the one "
            f"before it or the opposite one ({percent(facts.turns)}), to 2 %: of all parameters "
            f"one combination is trained, and what the others could learn drowns in it.{inputs}"
        ),
        remedy=(
            "Print mean and standard deviation of each input column (and of the targets), and "
            "bring them to 0 and 1, with numbers from the training data: `StandardScaler`, "
            "`transforms.Normalize`, a batch norm before the first layer."
        ),
        evidence=evidence,
    )
