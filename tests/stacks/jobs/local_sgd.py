"""Local SGD: every rank trains for itself; every 8 steps the weights are averaged."""

from tests.lab.faults.local_sgd import LocalSGD, MissedAverage
from tests.stacks.faults import OwnRate, SameData, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]

CASES = cases(LocalSGD, MissedAverage, OwnRate, SameData)
