"""Gradients are collected on each rank and reduced every fourth batch only."""

from tests.lab.faults.training import Manual
from tests.stacks.faults import Flip, OwnGradient, OwnStart, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class EveryFourth(Manual):
    """Four micro-batches on each rank, one `all_reduce`, one step."""

    def passes(self):
        for _ in range(4):
            self.backward(self.forward(self.next_batch()) / 4)


CASES = cases(EveryFourth, OwnStart, Flip, OwnGradient)
