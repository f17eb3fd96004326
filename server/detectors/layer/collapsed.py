"""Representations of all samples that have drawn together: the output says nothing of its input."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.layer.silent_rank import SilentRankPolicy
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.statistics import Progress
from rankscope.server.detectors.mechanisms.wording import number
from rankscope.server.detectors.policy import Number, Observations, Share, Times

SERIES = (
    *("output_spread", "outputs_compared", "output_halves"),
    *("explained_deviance", "target_deviance"),
)


@dataclass(frozen=True, slots=True)
class CollapsedPolicy(SilentRankPolicy):
    """Thresholds of `layer.dead` for outputs that are all the same.

    Attributes:
        recent: observations that the medians of outputs and losses are of, and which have to find
            it in a row.
        compared: observations before outputs are judged: representations draw together for some
            dozen steps at the beginning of a healthy training, too, before they spread.
        together: spread of the outputs' directions, as a share of that of the network that has
            learned nothing, below which the output has lost what it said of its input. A training
            that learns a representation enlarges it.
        narrow: the same, as it is: 0.1 is a mean cosine of 0.9 between any two samples.
        lowest: its ratio to its lowest so far up to which it does not spread again.
        gone: spread over what it was when it came below these, from which on it is going to
            nothing: the answers to targets that are alike keep the spread of the targets.
        as_loss: power of the spread by which the loss has fallen meanwhile, at least, and one over
            it at most: a loss that equal outputs make small goes with their spread.
        views: distance of the rows of an output to those half of it further, over that of any two,
            up to which the halves are views of the same samples, and compared: of samples that have
            nothing to do with each other it is 1, with an error of some tenths.
        shrunk: deviance of the targets over that at first, below which they are no data but outputs
            of the model that draw together with the others: the targets of a batch scatter alike
            from the first to the last.
        at_best: distance of the loss from its best, as a share of what it has come down by, up to
            which nothing has undone what was learned.
    """

    recent: Observations = 16
    compared: Observations = 100
    together: Share = 0.25
    narrow: Number = 0.1
    lowest: Times = 1.5
    gone: Share = 0.03
    as_loss: Number = 0.4
    views: Share = 0.6
    shrunk: Share = 0.1
    at_best: Share = 0.05


@dataclass(slots=True)
class Alike:
    """Attributes: spread of the outputs now and at first, of the inputs, and both losses."""

    spread: float
    at_first: float
    inputs: float
    loss_at_first: float
    loss: float


@dataclass(slots=True)
class CollapsedState:
    """What is remembered of the outputs.

    Attributes:
        drawn: of outputs that are not known to be compared with each other, their spread and the
            loss when they first had drawn together.
    """

    watch: Watch[Alike]
    first: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=deque)
    losses: deque[float] = field(default_factory=deque)
    first_halves: list[float] = field(default_factory=list)
    first_targets: list[float] = field(default_factory=list)
    targets: deque[float] = field(default_factory=deque)
    progress: Progress = field(default_factory=Progress)
    inputs: float = math.nan
    least: float = math.inf
    counted: int = 0
    in_a_row: int = 0
    supervised: bool = False
    drawn: tuple[float, float] | None = None

    def push(self, step: int, row: dict[str, float], policy: CollapsedPolicy) -> None:
        """Takes what was posted of a step.

        Args:
            row: the series by name, those of `SERIES` and `loss` and `input_spread`.
        """
        # A loss with targets of its own says by `explained_deviance` whether the answer is constant
        # and an answer may be nearly so because the targets are.
        self.supervised |= "explained_deviance" in row
        half = policy.recent // 2
        if math.isfinite(row.get("target_deviance", math.nan)):
            if len(self.first_targets) < half:
                self.first_targets.append(row["target_deviance"])
            _append(self.targets, row["target_deviance"], policy.recent)
        if len(self.first_halves) < half and math.isfinite(row.get("output_halves", math.nan)):
            self.first_halves.append(row["output_halves"])
        if math.isfinite(row.get("input_spread", math.nan)):
            self.inputs = row["input_spread"]
        loss = row.get("loss", math.nan)
        if math.isfinite(loss):
            self.progress.push(step, loss)
            _append(self.losses, loss, policy.recent)
        spread = row.get("output_spread", math.nan)
        if not math.isfinite(spread):
            return
        # Embeddings are compared with each other: of two views, two towers, or several samples. Of
        # one tensor of outputs, half may be compared with the other half, or all with targets.
        alone = row.get("outputs_compared", 0.0) < 2 and not (
            len(self.first_halves) == half and median(self.first_halves) <= policy.views
        )
        self.counted += 1
        if len(self.first) < half:
            self.first.append(spread)
        _append(self.recent, spread, policy.recent)
        if len(self.recent) == policy.recent:
            self.least = min(self.least, median(self.recent))
        if self.counted >= policy.compared and not (self.supervised and self._are_data(policy)):
            self._judge(step, policy, alone=alone)
        elif len(self.recent) == policy.recent:
            self._drawn(policy)

    def _are_data(self, policy: CollapsedPolicy) -> bool:
        """Whether the targets go on scattering as they did: what the model answers does not."""
        if len(self.targets) < policy.recent:
            return True
        return median(self.targets) > policy.shrunk * median(self.first_targets)

    def _drawn(self, policy: CollapsedPolicy) -> bool:
        """Whether the spread of the outputs goes to nothing, and the loss with it.

        They are compared with each other then, for all that one can see.
        """
        spread, loss = median(self.recent), median(self.losses)
        if spread >= min(policy.together * median(self.first), policy.narrow):
            self.drawn = None
            return False
        if self.drawn is None:
            self.drawn = spread, loss
        before, loss_before = self.drawn
        if not (0 < spread < policy.gone * before and 0 < loss < loss_before):
            return False
        power = math.log(loss_before / loss) / math.log(before / spread)
        return policy.as_loss <= power <= 1 / policy.as_loss

    def _judge(self, step: int, policy: CollapsedPolicy, *, alone: bool) -> None:
        spread, at_first, loss = median(self.recent), median(self.first), median(self.losses)
        scale = self.progress.scale
        # Inputs that are themselves alike have no other outputs; the spread of directions goes by
        # the square of what `input_spread` is.
        inputs = self.inputs**2 if math.isfinite(self.inputs) else 1.0
        drawn = spread < min(policy.together * min(at_first, inputs), policy.narrow)
        at_best = scale > 0 and loss - self.progress.best <= policy.at_best * scale
        compared = self._drawn(policy) or not alone
        if not (drawn and at_best and compared and spread <= policy.lowest * self.least):
            self.in_a_row = 0
            self.watch.good(step)
            return
        self.in_a_row += 1
        if self.in_a_row < policy.recent:
            return
        facts = Alike(spread, at_first, self.inputs, self.progress.start, loss)
        self.watch.bad(step, facts).facts = facts


def _append(values: deque[float], value: float, most: int) -> None:
    values.append(value)
    if len(values) > most:
        values.popleft()


def finding(episode: Episode[Alike]) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    return episode.finding(
        kind="layer.dead",
        key="collapsed",
        severity="critical",
        title="The representations have collapsed: the model's output is alike for all samples",
        cause=(
            f"The directions of the model's outputs have a spread of {number(facts.spread)}, after "
            f"{number(facts.at_first)} at first: any two samples have outputs of a mean cosine of "
            f"{number(1 - facts.spread)}. Meanwhile the loss has come from "
            f"{number(facts.loss_at_first)} to {number(facts.loss)}: it is as low as that because "
            "equal outputs agree, not because anything was learned of the inputs."
        ),
        remedy=(
            "Look at what is to keep outputs of different samples different: the stop-gradient "
            "(`detach()`) on the target branch together with a predictor on the other one, a "
            "momentum encoder that is not trained by the loss, negative pairs, or a term for "
            "variance. Start again from before; a collapsed model does not come back by itself."
        ),
        evidence={
            "output_spread": facts.spread,
            "output_spread_at_first": facts.at_first,
            "loss_at_first": facts.loss_at_first,
            "loss": facts.loss,
            **({"input_spread": facts.inputs} if math.isfinite(facts.inputs) else {}),
        },
    )
