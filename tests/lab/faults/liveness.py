"""3h: liveness and time."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from tests.lab.faults.case import Expected, register
from tests.lab.faults.models import Samples
from tests.lab.faults.optimizer import LeftAlone
from tests.lab.faults.resumed import Resumed
from tests.lab.faults.training import Manual, Training

# Common samples of all ranks that show a slow one, and one more.
_SAMPLES = 9


class ManySamples(Training):
    """What is known by samples of all ranks at the same steps: they are waited for."""

    samples = 0

    def next_sample(self) -> int:
        """On a busy machine ranks sample rarely, and not at the same steps."""
        last = super().next_sample()
        while last == self.step and not self.setting.full and self.samples < _SAMPLES:
            self.samples += 1
            self.sampled = False
            last = super().next_sample()
        return last


class Slow(ManySamples):
    """Something takes 50 ms from one step on."""

    steps = 80

    def dawdle(self) -> None:
        """Takes it."""
        if self.is_target and self.step >= self.at:
            time.sleep(0.05)


@register
class F70(Slow):
    """A rank that computes slowly."""

    id = "F70"
    what = "from one step on one rank's forward pass takes 50 ms longer"

    def forward(self, batch: Samples) -> torch.Tensor:
        logits = self.model(batch[0])
        self.dawdle()
        loss: torch.Tensor = self.criterion(logits, batch[1])
        return loss

    def expected(self) -> Expected:
        return Expected(kinds=("rank.straggler",), ranks=self.one(), step=self.at, tolerance=20)


@register
class F71(ManySamples, Manual):
    """The network is slow."""

    id = "F71"
    what = "from one step on the reduction takes 30 ms, or two whole steps, longer on every rank"
    steps = 80
    pause = 0.03

    def before_step(self) -> None:
        # Where the machine is so busy that steps take as long as that, 30 ms are nothing.
        if self.step == 5:
            self.begun = time.perf_counter()
        elif self.step == self.at:
            usual = (time.perf_counter() - self.begun) / (self.step - 5)
            self.pause = min(max(self.pause, 2 * usual), 0.3)

    def reduce(self) -> None:
        if self.step >= self.at:
            time.sleep(self.pause)
        super().reduce()

    def expected(self) -> Expected:
        return Expected(
            # No rank is to blame, and the contract has no kind for it: it is one that was added.
            kinds=("collective.slow",),
            ranks=self.everybody(),
            step=self.at,
            tolerance=20,
        )


@register
class F72(Slow):
    """A rank that waits for its loader."""

    id = "F72"
    what = "from one step on one rank's loader takes 50 ms a batch"

    def next_batch(self) -> Samples:
        self.dawdle()
        return super().next_batch()

    def expected(self) -> Expected:
        return Expected(kinds=("rank.starved",), ranks=self.one(), step=self.at, tolerance=20)


@register
class F73(LeftAlone):
    """Ranks in different collectives."""

    id = "F73"
    what = "at one step one rank enters a collective of a pair that its peer never joins"

    def prepared(self) -> None:
        self.pair = dist.new_group([self.suspects, (self.suspects + 1) % self.world])

    def before_step(self) -> None:
        if self.is_target and self.step == self.at:
            dist.all_reduce(torch.zeros(1), group=self.pair)

    def expected(self) -> Expected:
        return Expected(
            kinds=("rank.stalled", "desync.progress"),
            # Of two ranks each waits for the other.
            ranks=self.odd_one(),
            step=self.at,
            tolerance=1,
        )


@register
class F73b(LeftAlone):
    """A rank dies."""

    id = "F73b"
    what = "at one step one rank's process ends without a word"

    def before_step(self) -> None:
        if self.is_target and self.step == self.at:
            os._exit(1)

    def expected(self) -> Expected:
        return Expected(
            # Its last posts are lost with it.
            kinds=("rank.silent",),
            ranks=self.one(),
            step=self.at,
            tolerance=20,
        )


@register
class F74(Resumed):
    """After a restart one rank goes on from an older checkpoint."""

    id = "F74"
    what = "after a restart one rank loads a checkpoint of step 20, the others that of step 30"

    def checkpoint(self) -> str:
        return "early" if self.is_target else "last"

    def first_step(self) -> int:
        return self.early_at if self.is_target else self.resumed_at

    def expected(self) -> Expected:
        return Expected(
            kinds=("desync.parameters", "desync.progress"),
            stages=("start",),
            ranks=self.odd_one(),
            step=self.resumed_at,
            tolerance=self.resumed_at - self.early_at,
        )
