"""Horovod with torch: `DistributedOptimizer`, `broadcast_parameters`, gloo."""

import horovod.torch as hvd
import torch

from tests.lab.faults.case import Expected
from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, OwnGradient, OwnRate, cases

LAUNCH = "horovodrun"
WORLD = 2
NEEDS = ("horovod", "torch")


def begin():
    torch.set_num_threads(1)
    hvd.init()
    return hvd.rank()


class Horovod(Training):
    """As Horovod's own example has it."""

    passes_per_step = 1

    def first_seed(self):
        return 1000 + 100 * self.rank + self.seed

    def wrap(self, net):
        return net

    def broadcast(self):
        """What makes the ranks begin alike."""
        hvd.broadcast_parameters(self.net.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)

    def options(self):
        """Of the optimizer's wrapper."""
        return {}

    def make_optimizer(self, parameters):
        return hvd.DistributedOptimizer(
            super().make_optimizer(parameters),
            named_parameters=self.net.named_parameters(),
            backward_passes_per_step=self.passes_per_step,
            **self.options(),
        )

    def prepared(self):
        self.broadcast()

    def passes(self):
        for _ in range(self.passes_per_step):
            self.backward(self.forward(self.next_batch()) / self.passes_per_step)

    def apply(self):
        # Reduced before it is changed: Horovod's idiom for clipping.
        self.optimizer.synchronize()
        self.after_reduction()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def after_reduction(self):
        """Between the reduction and the step."""


class NoBroadcast:
    """`broadcast_parameters` was forgotten."""

    id = "no-broadcast"
    what = "nobody broadcasts the first weights, and every rank has drawn its own"
    onset = 0

    def broadcast(self):
        return

    def expected(self):
        return Expected(
            kinds=("desync.parameters",), stages=("start",), ranks=self.all(), severity="critical"
        )


class Summed:
    """`op=hvd.Sum` where an average was meant."""

    id = "summed"
    what = "the optimizer is built with `op=hvd.Sum`"
    onset = 0

    def options(self):
        return {"op": hvd.Sum}

    def expected(self):
        return Expected(
            kinds=("reduction.wrong",), stages=("reduced_gradient",), ranks=self.everybody()
        )


class LateGradient(OwnGradient):
    """After `synchronize`."""

    def clip(self):
        return

    def after_reduction(self):
        super().clip()


CASES = cases(Horovod, NoBroadcast, Summed, Flip, LateGradient, OwnRate)
