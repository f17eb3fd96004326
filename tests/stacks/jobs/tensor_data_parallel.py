"""Tensor parallel times data parallel, 2x2: halves by hand, pairs are reduced."""

from tests.lab.faults.case import Expected
from tests.lab.faults.sharded import TensorParallel
from tests.stacks.faults import Flip, OwnGradient, OwnRate, begin, cases

LAUNCH = "torchrun"
WORLD = 4
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Pairs(TensorParallel):
    """Every rank holds the normalisation; that is where these faults are."""

    @property
    def tensor(self):
        return "norm.weight"


class NotSummed:
    """What BLOOM's training met."""

    id = "not-summed"
    what = "from one step on the gradient of `norm` is not summed over the tensor-parallel pair"

    def sum_shared(self):
        if self.step < self.at:
            super().sum_shared()

    def expected(self):
        return Expected(
            kinds=("desync.gradients",),
            stages=("reduced_gradient",),
            ranks=self.all(),
            tensors=frozenset({"norm.weight", "norm.bias"}),
            step=self.at,
        )


CASES = cases(Pairs, NotSummed, Flip, OwnGradient, OwnRate)
