"""Momentum that keeps every step for longer than the training can bear."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.configured import finite, parameter_groups
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.wording import number

# Momentum of SGD from which on a gradient is followed for 50 steps and more: 0.9 to 0.95 is usual.
_HEAVY = 0.98
# Times that the norm of all parameters has come to what it was: steps that follow the loss take
# hundreds of steps to double it, from torch's own initialisation.
_GROWN = 3.0
# Times the steps for which a gradient is followed, within which they grow so by that alone.
_HORIZON = 4.0
# Norms whose median is taken.
_AROUND = 5


@dataclass(frozen=True, slots=True)
class Carried:
    """What was seen: the momentum, the norm of the parameters at first and now, and the rate."""

    momentum: float
    first: float
    now: float
    rate: float


@dataclass(slots=True)
class Momentum:
    """Follows the size of the parameters under a heavy momentum.

    Attributes:
        zeros: the weights began at zero: beside that any size is large.
    """

    momentum: float = 0.0
    rate: float = math.nan
    begin: int = -1
    zeros: bool = False
    first: list[float] = field(default_factory=list)
    newest: list[float] = field(default_factory=list)
    watch: Watch[Carried] = field(default_factory=lambda: Watch(clear_after=50))

    def configured(self, config: Mapping[str, Any]) -> None:
        """Takes what the optimizer was made with; with another momentum all begins anew."""
        found = 0.0
        for group in parameter_groups(config):
            # What a step adds is made smaller by as much.
            dampened = (finite(group.get("dampening")) or 0.0) > 0
            found = max(found, 0.0 if dampened else finite(group.get("momentum")) or 0.0)
        if found != self.momentum:
            self.momentum, self.begin, self.zeros = found, -1, False
            self.first, self.newest = [], []

    def take(self, step: int, row: Mapping[str, float]) -> None:
        """Takes a step's values."""
        norm = row.get("weight_norm", math.nan)
        if self.begin < 0:
            self.begin, self.rate = step, row.get("lr", math.nan)
        self.zeros |= row.get("initial_gain") == 0
        if self.momentum < _HEAVY or self.zeros or not (math.isfinite(norm) and norm > 0):
            return
        horizon = _HORIZON / max(1 - self.momentum, 1e-6)
        if step - self.begin > horizon and self.watch.open(step) is None:
            return  # parameters grow in the course of any long training
        if len(self.first) < _AROUND:
            self.first.append(norm)
        self.newest = [*self.newest[1 - _AROUND :], norm]
        first, now = median(self.first), median(self.newest)
        if now > _GROWN * first:
            facts = Carried(self.momentum, first, now, self.rate)
            self.watch.bad(step, facts, first_step=self.begin).facts = facts
        else:
            self.watch.good(step)


def finding(episode: Episode[Carried]) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    steps = 1 / (1 - facts.momentum) if facts.momentum < 1 else math.inf
    kept = "for ever" if math.isinf(steps) else f"for {steps:,.0f} steps"
    times = "without end" if math.isinf(steps) else f"{steps:,.0f} times its rate"
    return episode.finding(
        kind="lr.too_high",
        key="momentum",
        severity="warning",
        title=f"A momentum of {number(facts.momentum)} carries the parameters away",
        cause=(
            f"The optimizer follows each gradient {kept} and comes to {times}: the parameters have "
            f"grown from {number(facts.first)} to {number(facts.now)}, since what was right at one "
            "step is followed long after it has become wrong. The loss swings or stays above what "
            "it could come to. 0.9 is usual, 0.99 needs a tenth of the learning rate."
        ),
        remedy=(
            "Train anew with a momentum of 0.9"
            + (f" at the learning rate of {number(facts.rate)}" if facts.rate > 0 else "")
            + ", or divide the rate by as much as the momentum multiplies the steps."
        ),
        evidence={
            "sign": "momentum",
            "momentum": facts.momentum,
            "first": facts.first,
            "now": facts.now,
        },
    )
