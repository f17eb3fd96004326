"""DDP with a static graph, for a block that is checkpointed and called twice."""

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.lab.faults.models import Mlp
from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, OwnGradient, OwnRate, SameData, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Checkpointed(Mlp):
    """Without a static graph DDP refuses to have a parameter ready twice in one pass."""

    def forward(self, x):
        x = torch.relu(self.norm(self.inner(x)))
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)

    def block(self, x):
        return torch.relu(self.hidden(x))


class StaticGraph(Training):
    """Activation checkpointing of the reentrant kind."""

    def build(self):
        return Checkpointed()

    def wrap(self, net):
        return DistributedDataParallel(net, static_graph=True)


CASES = cases(StaticGraph, Flip, OwnGradient, OwnRate, SameData)
