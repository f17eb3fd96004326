"""A hybrid: the body's gradients are reduced at every step, the table is averaged every 8 steps."""

import torch
import torch.distributed as dist

from tests.lab.faults.local_sgd import MissedAverage
from tests.lab.faults.training import Manual
from tests.stacks.faults import Flip, OwnGradient, OwnRate, OwnStart, SameData, begin, cases
from tests.stacks.jobs.all_reduce import Summed

LAUNCH = "torchrun"
WORLD = 4
MODEL = "transformer"
__all__ = ["CASES", "LAUNCH", "MODEL", "WORLD", "begin"]

TABLE = "embedding.weight"


class Hybrid(Manual):
    """The embedding is too large to be reduced at every step: each rank trains its own copy."""

    every = 8

    def names(self):
        return [name for name in super().names() if name != TABLE]

    def attach(self, **options):
        monitor = super().attach(**options)
        monitor.replicas(None, TABLE)
        return monitor

    def keeps(self, mean):
        """Whether this rank takes the mean as its own."""
        return mean

    @torch.no_grad()
    def after_step(self):
        if self.step % self.every != self.every - 1:
            return
        table = self.parameter(TABLE)
        mean = table.detach().clone()
        dist.all_reduce(mean)
        if self.keeps(True):
            table.copy_(mean / self.world)


CASES = cases(Hybrid, OwnStart, Flip, OwnGradient, OwnRate, MissedAverage, SameData, Summed)
