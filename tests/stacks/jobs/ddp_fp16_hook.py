"""DDP whose communication hook compresses gradients to float16."""

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, OwnGradient, OwnRate, SameData, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Compressed(Training):
    """The hook that torch comes with."""

    def wrap(self, net):
        model = super().wrap(net)
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return model


CASES = cases(Compressed, Flip, OwnGradient, OwnRate, SameData)
