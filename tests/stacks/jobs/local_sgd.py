"""Local SGD: every rank trains for itself; every 8 steps the weights are averaged."""

from stacks.faults import OwnRate, SameData, begin, cases

from tests.lab.faults.local_sgd import LocalSGD, MissedAverage

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]

CASES = cases(LocalSGD, MissedAverage, OwnRate, SameData)
