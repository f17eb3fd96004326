"""Evaluations that normalise by statistics which hardly any batch has gone into yet."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.wording import count, listing, number, percent
from rankscope.server.window import Window

# Weight of what the statistics were made with (mean 0, variance 1), from which on it is most of
# them.
_MOSTLY = 0.5
# Steps before which an evaluation only tries whether it works.
_STEPS = 100
# An evaluation of other samples is mostly a little worse than training is.
_WORSE = 1.5
# Training losses that are compared with.
_RECENT = 20
_MOST_NAMES = 5
EVALUATIONS, TRAINING, PASSES = "eval/*loss", "loss", "micro_steps"


@dataclass(slots=True)
class Slow:
    """Attributes: share of the statistics that no batch has made, and after how many steps."""

    share: float
    steps: int


@dataclass(slots=True)
class SlowStatistics(Condition[Slow]):
    """Follows the evaluations of a model whose normalizations learn their statistics slowly.

    Attributes:
        momenta: name of a normalization -> its momentum.
    """

    momenta: dict[str, float] = field(default_factory=dict)
    watch: Watch[Slow] = field(default_factory=lambda: Watch(clear_after=0))
    _begins: int = -1
    _passes: float = 1.0
    _training: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def take(self, window: Window) -> None:
        """Goes through the evaluations of a window."""
        if self._begins < 0 and len(window.steps):
            self._begins = int(window.steps[0])
        if not self.momenta:
            return
        evaluations = [n for n in sorted(window.series) if fnmatchcase(n, EVALUATIONS)]
        for step, row in together(window, TRAINING, PASSES, *evaluations):
            if math.isfinite(row.get(TRAINING, math.nan)):
                self._training.append(row[TRAINING])
            self._passes = max(self._passes, row.get(PASSES, 1.0))
            losses = [row[name] for name in evaluations if math.isfinite(row.get(name, math.nan))]
            if losses and self._training:
                self._evaluated(step, max(losses))

    def _evaluated(self, step: int, loss: float) -> None:
        steps = step - self._begins + 1
        share = float((1 - max(self.momenta.values())) ** (steps * self._passes))
        worse = loss > _WORSE * median(list(self._training))
        if steps < _STEPS or share <= _MOSTLY or not worse:
            self.watch.good(step)
            return
        facts = Slow(share, steps)
        self.watch.bad(step, facts).facts = facts

    def finding(self, episode: Episode[Slow]) -> Finding:
        """What is reported of an episode."""
        facts, names = episode.facts, list(self.momenta)
        who = listing([f"`{name}`" for name in names], most=_MOST_NAMES)
        share = percent(facts.share)
        return episode.finding(
            kind="mode.settings",
            key="statistics",
            severity="warning",
            title=f"Evaluations normalise by statistics that are {share} those of no batch",
            cause=(
                f"The momentum of {who} is {number(max(self.momenta.values()))}: after "
                f"{count(facts.steps, 'step')} the running statistics, by which evaluations "
                f"normalise, are still {share} what {'it was' if len(names) == 1 else 'they were'} "
                "made with (mean 0, variance 1). Training normalises by each batch, and does not "
                "show it."
            ),
            remedy=(
                "PyTorch's momentum is the weight of the new batch: 0.1 is usual (Keras' 0.9), and "
                "None takes the mean over all."
            ),
            evidence={"share": facts.share, "slow": dict(self.momenta)},
        )
