"""Which samples losses are of: how many at a step, and how often they have come before."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rankscope.server.detectors.mechanisms.batch_sizes import (
    SINGLE,
    BatchSizes,
    effective_sizes,
    first_tokens,
)
from rankscope.server.detectors.mechanisms.epochs_seen import Visits
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.window import Window

# Of the usual number of samples, below which a loss scatters too much more to be held against the
# usual scatter: by the root of two.
_FEW = 0.5
# Such steps in a row after which that number is the usual one: the last batch of an epoch is one.
_IN_A_ROW = 8
# Visits of each sample from which on what the ranks' losses differ by is a property of a fixed set
# of samples, which no number of steps averages out.
_MANY = 8.0


@dataclass(slots=True)
class LossSamples:
    """Follows the samples of all ranks, step by step."""

    visits: Visits = field(default_factory=Visits)
    sizes: BatchSizes = field(default_factory=BatchSizes)
    tokens: bool = False  # samples are sequences, each of many
    _tokens_from: float = math.inf
    _of_step: dict[int, float] = field(default_factory=dict)
    _fewer: list[float] = field(default_factory=list)

    def take(self, window: Window) -> None:
        """Lays a window's samples ready, before its steps are asked for one by one."""
        self._tokens_from = min(self._tokens_from, first_tokens(window))
        self.visits.lay(window)
        steps = rank_rows(window, "loss")[0].tolist()
        self._of_step = dict(zip(steps, effective_sizes(window, "loss").tolist(), strict=True))

    def like_before(self, step: int) -> bool:
        """Whether a step's losses are means of as many samples as usual."""
        self.visits.pass_to(step)
        self.tokens |= step >= self._tokens_from
        size = self._of_step.get(step, math.nan)
        if size < _FEW * self.sizes.usual:
            self._fewer.append(size)
            if len(self._fewer) == _IN_A_ROW:
                self.sizes = BatchSizes()
                for one in self._fewer:
                    self.sizes.push(one)
                self._fewer.clear()
            return False
        self._fewer.clear()
        self.sizes.push(size)
        return True

    @property
    def few(self) -> bool:
        """Whether a loss is that of so few samples that single ones are often far off."""
        return not self.tokens and self.sizes.usual < SINGLE

    @property
    def come_again(self) -> bool:
        """Whether the same samples have come many times: what is learned of them is memorised."""
        return self.visits.mean >= _MANY
