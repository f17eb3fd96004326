"""DDP whose communication hook compresses gradients by PowerSGD."""

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, OwnGradient, OwnRate, SameData, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class LowRank(Training):
    """Rank 2, from the fourth step on."""

    def wrap(self, net):
        model = super().wrap(net)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=4
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model


CASES = cases(LowRank, Flip, OwnGradient, OwnRate, SameData)
