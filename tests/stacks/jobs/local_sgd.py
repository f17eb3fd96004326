"""Local SGD: every rank trains for itself; every 8 steps the weights are averaged."""

from stacks.faults import OwnRate, SameData, begin, cases

from benchmarks.faultlab.case import Expected
from benchmarks.faultlab.local_sgd import LocalSGD

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class MissedAverage:
    """A rank that misses one average."""

    id = "missed-average"
    what = "at the third average one rank keeps its own weights"
    onset = 23

    def keeps(self, mean):
        return not (self.is_guilty and self.step == self.at)

    def expected(self):
        return Expected(
            kinds=("desync.parameters",),
            stages=("parameters", "outside_optimizer"),
            ranks=self.odd_one(),
            step=self.at,
            tolerance=self.every,
        )


CASES = cases(LocalSGD, MissedAverage, OwnRate, SameData)
