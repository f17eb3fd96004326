"""An output in the shape of its input that is the same whatever the input: nothing goes through."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.layer.collapsed import CollapsedPolicy
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.statistics import BLOCK, mann_kendall
from rankscope.server.detectors.mechanisms.wording import number
from rankscope.server.detectors.policy import Observations, Share, Sigmas, Times

SERIES = ("reconstruction_spread",)
# Times of the spread below which reconstructions are alike, from which on they are unlike: more
# than random weights leave of the inputs.
_SPOKE = 5.0


@dataclass(frozen=True, slots=True)
class ReconstructionPolicy(CollapsedPolicy):
    """Thresholds of `layer.dead` for reconstructions that are all the same.

    Attributes:
        rebuilt: observations before they are judged: autoencoders begin with the mean of the data
            and stay there for a while, healthy ones too.
        rebuilt_recent: number of most recent ones, of which the median counts.
        rebuilt_alike: spread of their directions, as a share of that of the inputs' squares, below
            which they say nothing of the input. What a narrow code leaves out is noise and
            detail, and not 98 % of it; networks that have learned but the mean have two to four
            times as much, from their random weights.
        rebuilt_losses: number of most recent losses that have to stand still.
        rebuilt_falling: Mann-Kendall Z, below 0, from which on these losses still fall.
        rebuilt_growing: times of the spread of as many twice as long ago, from which on they are
            becoming unlike: a code begins to be used long before the loss shows it.
        rebuilt_least: share of what is alike that rounding leaves, whatever it grows by.
    """

    rebuilt: Observations = 160
    rebuilt_recent: Observations = 32
    rebuilt_alike: Share = 0.02
    rebuilt_losses: Observations = 100
    rebuilt_falling: Sigmas = 2.5
    rebuilt_growing: Times = 2.0
    rebuilt_least: Share = 0.05


@dataclass(slots=True)
class Same:
    """Attributes: spread of the reconstructions and of the inputs, the loss, now."""

    spread: float
    inputs: float
    loss: float


@dataclass(slots=True)
class ReconstructionState:
    """What is remembered of them.

    Attributes:
        since: step from which they have been alike; -1: they are not.
        spoke: whether they were unlike each other once.
    """

    policy: ReconstructionPolicy
    watch: Watch[Same] = field(default_factory=lambda: Watch(clear_after=32))
    counted: int = 0
    inputs: float = math.nan
    since: int = -1
    spoke: bool = False
    _latest: deque[float] = field(init=False)
    _losses: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self._latest = deque(maxlen=3 * self.policy.rebuilt_recent)
        self._losses = deque(maxlen=self.policy.rebuilt_losses)

    def push(self, step: int, row: dict[str, float]) -> None:
        """Takes what was posted of a step, by series."""
        if math.isfinite(row.get("input_spread", math.nan)):
            self.inputs = row["input_spread"]
        if math.isfinite(row.get("loss", math.nan)):
            self._losses.append(row["loss"])
        spread = row.get(SERIES[0], math.nan)
        if not math.isfinite(spread) or not math.isfinite(self.inputs):
            return
        self.counted += 1
        self._latest.append(spread)
        alike = self.policy.rebuilt_alike * self.inputs**2
        if self.since < 0 and (spread < alike or self.counted == 1):
            self.since = step
        # A network that has not begun to say anything of its input has not lost it later. What
        # random weights say of it is gone after some dozen steps.
        elif self.counted >= 2 * self.policy.rebuilt_recent:
            spread = self._spread()
            began = self.spoke or self._grows(spread, alike)
            if spread >= (alike if began else _SPOKE * alike):
                self.since, self.spoke = -1, True
        if self.counted >= self.policy.rebuilt:
            self._judge(step, alike)

    def _spread(self) -> float:
        """The median of the most recent ones."""
        return median(list(self._latest)[-self.policy.rebuilt_recent :])

    def _grows(self, spread: float, alike: float) -> bool:
        """Whether the spread is well above what it was two windows ago."""
        size = self.policy.rebuilt_recent
        if len(self._latest) < 3 * size:
            return False
        before = max(median(list(self._latest)[:size]), self.policy.rebuilt_least * alike)
        return spread > self.policy.rebuilt_growing * before

    def _judge(self, step: int, alike: float) -> None:
        policy, losses = self.policy, list(self._losses)
        spread = self._spread()
        if spread >= alike or self._grows(spread, alike) or len(losses) < policy.rebuilt_losses:
            self.watch.good(step)
            return
        if self.watch.open(step) is None:
            blocks = [median(losses[at : at + BLOCK]) for at in range(0, len(losses), BLOCK)]
            if mann_kendall(blocks) < -policy.rebuilt_falling:
                self.watch.good(step)
                return
        facts = Same(spread, self.inputs, median(losses))
        self.watch.bad(step, facts, first_step=max(self.since, 0)).facts = facts


def finding(episode: Episode[Same]) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    return episode.finding(
        kind="layer.dead",
        key="reconstruction",
        severity="warning",
        title=(
            "Outputs in the shape of the inputs are the same for all of them, since step "
            f"{episode.first_step}"
        ),
        cause=(
            "The model returns something in the shape of what it is given, and for all samples of "
            f"a batch nearly the same: the directions have a spread of {number(facts.spread)}, "
            f"while the inputs scatter by {number(facts.inputs)} of their size. The loss stands "
            f"still at {number(facts.loss)}. If it is a reconstruction, the code between both says "
            "nothing of the input (posterior collapse, in a variational autoencoder), or the "
            "output does not use it. Where the targets are something else (masks, later frames), "
            "they do not belong to these inputs, so that the mean of all is the best answer; masks "
            "that are empty on most samples look the same."
        ),
        remedy=(
            "Give the term that holds the code at its prior (KL, commitment, sparsity) less "
            "weight, warm it up from 0, or leave it some free bits; check that it is summed or "
            "averaged over the same things as the reconstruction. Else look for what cuts the "
            "decoder off: a detached code, dead units, a code of the wrong sample. Of other "
            "targets, show some inputs beside their targets. Nothing, if such outputs are meant to "
            "be nearly the same."
        ),
        evidence={
            "reconstruction_spread": facts.spread,
            "input_spread": facts.inputs,
            "loss": facts.loss,
        },
    )
