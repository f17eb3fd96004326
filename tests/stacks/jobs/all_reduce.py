"""Ranks that reduce their gradients themselves, as many tutorials do."""

from tests.lab.faults.case import Expected
from tests.lab.faults.training import Manual
from tests.stacks.faults import Flip, OwnGradient, OwnStart, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Summed:
    """A sum where a mean was meant."""

    id = "summed"
    what = "from one step on the sum is not divided by the number of ranks"

    def reduced(self, gradients):
        if self.step >= self.at:
            for gradient in gradients.values():
                gradient *= self.world

    def expected(self):
        return Expected(
            kinds=("reduction.wrong",),
            stages=("reduced_gradient",),
            ranks=self.everybody(),
            step=self.at,
        )


CASES = cases(Manual, OwnStart, Summed, Flip, OwnGradient)
