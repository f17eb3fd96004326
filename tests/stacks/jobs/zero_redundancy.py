"""ZeroRedundancyOptimizer: each rank holds the state of its part."""

from dataclasses import replace

from tests.lab.faults.sharded import zero_1
from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, OwnGradient, OwnRate, SameData, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Zero(Training):
    """DDP with an optimizer whose state is dealt out."""

    def make_optimizer(self, parameters):
        return zero_1(parameters, self.lr)


class Repaired(Flip):
    """The owner's broadcast overwrites the tensor in the same step: none can be named."""

    def expected(self):
        return replace(super().expected(), tensors=None)


CASES = cases(Zero, Repaired, OwnGradient, OwnRate, SameData)
