"""Post-local SGD: DDP at first, then averages every 4 steps, as torch has it."""

from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, OwnGradient, OwnRate, SameData, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class PostLocal(Training):
    """Gradients are reduced for 20 steps; afterwards weights are averaged instead."""

    def wrap(self, net):
        model = super().wrap(net)
        state = hook.PostLocalSGDState(
            process_group=None,
            subgroup=None,
            start_localSGD_iter=20,
            post_local_gradient_allreduce=False,
        )
        model.register_comm_hook(state, hook.post_localSGD_hook)
        return model

    def make_optimizer(self, parameters):
        averager = PeriodicModelAverager(period=4, warmup_steps=20)
        return PostLocalSGDOptimizer(super().make_optimizer(parameters), averager)


class Early:
    """While gradients are still reduced."""

    onset = 12


class EarlyFlip(Early, Flip):
    """In the first phase."""


class EarlyGradient(Early, OwnGradient):
    """In the first phase."""


CASES = cases(PostLocal, EarlyFlip, EarlyGradient, OwnRate, SameData)
