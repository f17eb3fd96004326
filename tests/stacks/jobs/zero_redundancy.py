"""ZeroRedundancyOptimizer: each rank holds the state of its part."""

from stacks.faults import Flip, OwnGradient, OwnRate, SameData, begin, cases

from benchmarks.faultlab.sharded import zero_1
from benchmarks.faultlab.training import Training

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Zero(Training):
    """DDP with an optimizer whose state is dealt out."""

    def make_optimizer(self, parameters):
        return zero_1(parameters, self.lr)


CASES = cases(Zero, Flip, OwnGradient, OwnRate, SameData)
