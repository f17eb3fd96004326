"""Evaluations that normalise by statistics which hardly any batch has gone into yet."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
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
    """What was seen.

    Attributes:
        share: of the statistics that no batch has made, most of all, after so many `steps`.
        momenta: name -> momentum of the normalizations of which that is more than a half.
    """

    share: float
    steps: int
    momenta: dict[str, float]


@dataclass(slots=True)
class SlowStatistics(Condition[Slow]):
    """Follows the evaluations of a model whose normalizations learn their statistics slowly.

    Attributes:
        momenta: rank -> name of a normalization -> its momentum, as the rank said last.
    """

    momenta: dict[int, dict[str, float]] = field(default_factory=dict)
    watch: Watch[Slow] = field(default_factory=lambda: Watch(clear_after=0))
    _begins: int = -1
    _passes: float = 1.0
    _training: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def take(self, window: Window, said: Mapping[int, Mapping[int, dict[str, float]]]) -> None:
        """Goes through the evaluations of a window.

        Args:
            said: step -> rank -> momenta of its slow normalizations, of none where it is empty.
        """
        if self._begins < 0 and len(window.steps):
            self._begins = int(window.steps[0])
        waiting = deque(sorted(said.items()))
        evaluations = [n for n in sorted(window.series) if fnmatchcase(n, EVALUATIONS)]
        for step, row in together(window, TRAINING, PASSES, *evaluations):
            while waiting and waiting[0][0] <= step:
                self.momenta |= waiting.popleft()[1]
            if math.isfinite(row.get(TRAINING, math.nan)):
                self._training.append(row[TRAINING])
            self._passes = max(self._passes, row.get(PASSES, 1.0))
            losses = [row[name] for name in evaluations if math.isfinite(row.get(name, math.nan))]
            if losses and self._training:
                self._evaluated(step, min(losses))
        for _, more in waiting:
            self.momenta |= more

    def _evaluated(self, step: int, loss: float) -> None:
        steps = step - self._begins + 1
        momenta = {name: m for held in self.momenta.values() for name, m in held.items()}
        shares = {n: float((1 - m) ** (steps * self._passes)) for n, m in momenta.items()}
        slow = {name: momenta[name] for name, share in shares.items() if share > _MOSTLY}
        worse = loss > _WORSE * median(list(self._training))
        if steps < _STEPS or not slow or not worse:
            self.watch.good(step)
            return
        facts = Slow(max(shares[name] for name in slow), steps, slow)
        self.watch.bad(step, facts).facts = facts

    def finding(self, episode: Episode[Slow]) -> Finding:
        """What is reported of an episode."""
        facts, names = episode.facts, list(episode.facts.momenta)
        who = listing([f"`{name}`" for name in names], most=_MOST_NAMES)
        share = percent(facts.share)
        return episode.finding(
            kind="mode.settings",
            key="statistics",
            severity="warning",
            title=f"Evaluations normalise by statistics that are {share} those of no batch",
            cause=(
                f"The momentum of {who} is {number(min(facts.momenta.values()))}: after "
                f"{count(facts.steps, 'step')} the running statistics, by which evaluations "
                f"normalise, are still {share} what {'it was' if len(names) == 1 else 'they were'} "
                "made with (mean 0, variance 1). Training normalises by each batch, and does not "
                "show it."
            ),
            remedy=(
                "PyTorch's momentum is the weight of the new batch: 0.1 is usual (Keras' 0.9), and "
                "None takes the mean over all."
            ),
            evidence={"share": facts.share, "slow": dict(facts.momenta)},
        )
