"""Targets that are many times as large as what the model puts out when it begins."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.wording import number

# Samples of the outputs' size over the targets' whose medians are compared, at first and at last.
_AROUND = 10
# Steps until then. Of 230 recorded regressions those that trained had come to a third of their
# targets by then at the least.
_PATIENCE = 100
# Outputs over targets: at first at the most (untrained networks of the same had 0.03 to 4), and
# after `_PATIENCE` steps, growing meanwhile by this factor: outputs that stay small are decayed,
# dead or not trained.
_AT_FIRST, _AT_LAST, _GROWING = 0.01, 0.1, 2.0
# Or outputs that small at first, and after `_PATIENCE` steps a loss so far above that of the best
# constant, as a share of the latter: all steps so far went into coming near the targets' mean.
_BEHIND = 0.5
# Outputs over targets that have come to them; what is far above has left them behind.
_REACHED = 1.5
# Root mean square of the targets, at the least: a last layer that begins at zero has small outputs,
# too, and is no fault of the targets'.
_LARGE = 30.0


@dataclass(frozen=True, slots=True)
class Reached:
    """Outputs over targets at first and last, steps between, and the targets' size.

    Attributes:
        explained: share of the targets' deviance that is explained at last; NaN for unknown.
    """

    first: float
    now: float
    steps: int
    size: float
    explained: float


@dataclass(slots=True)
class LargeTargets:
    """Follows `output_scale`, `target_size` and `explained_deviance` until it can be judged."""

    first_step: int = -1
    early: list[float] = field(default_factory=list)
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_AROUND))
    explained: deque[float] = field(default_factory=lambda: deque(maxlen=_AROUND))
    sizes: list[float] = field(default_factory=list)
    judged: bool = False
    watch: Watch[Reached] = field(default_factory=Watch)

    def push(self, step: int, scale: float, size: float, explained: float) -> None:
        """Takes a step's outputs over targets, the targets' size and what is explained of them."""
        if self.judged or not (math.isfinite(scale) and math.isfinite(size)):
            return
        self.first_step = step if self.first_step < 0 else self.first_step
        if len(self.early) < _AROUND:
            self.early.append(scale)
            self.sizes.append(size)
        self.latest.append(scale)
        if math.isfinite(explained):
            self.explained.append(explained)
        if step - self.first_step < _PATIENCE or len(self.early) < _AROUND:
            return
        self.judged = True
        first, now, size = median(self.early), median(self.latest), median(self.sizes)
        if self.first_step > 0 or size < _LARGE:
            return  # it goes on from what was trained before; or the targets are not large
        explained = median(self.explained) if self.explained else math.nan
        behind = explained < -_BEHIND and now <= _REACHED
        if first < _AT_FIRST and _GROWING * first < now and (now < _AT_LAST or behind):
            facts = Reached(first, now, step - self.first_step, size, explained)
            self.watch.bad(step, facts, first_step=self.first_step)


def finding(episode: Episode[Reached]) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    if facts.now < _AT_LAST:
        still = f"the outputs are still {number(facts.now)} of their size after {facts.steps} steps"
    else:
        times = number(1.0 - facts.explained)
        still = f"after {facts.steps} steps the loss is {times} times that of their mean"
    return episode.finding(
        kind="data.unscaled",
        key="targets",
        severity="warning",
        title=f"The targets are far too large: {still}",
        cause=(
            f"The targets have a root mean square of {number(facts.size)}. The model began with "
            f"outputs of {number(facts.first)} of that, and has come to {number(facts.now)} after "
            f"{facts.steps} steps: it is "
            "trained to reach the targets' scale, and has nothing left to tell one from another. "
            "Targets in their own units (prices, counts, milliseconds), or with an offset many "
            "times their scatter."
        ),
        remedy=(
            "Bring the targets to mean 0 and standard deviation 1 with numbers from the training "
            "data (`StandardScaler`, or their logarithm), and undo it for what is shown; or set "
            "the last layer's bias to their mean."
        ),
        evidence={
            "first": facts.first,
            "last": facts.now,
            "steps": facts.steps,
            "size": facts.size,
            **({"explained_deviance": facts.explained} if math.isfinite(facts.explained) else {}),
        },
    )
