"""DDP that searches unused parameters: a layer is left out at some steps, on some ranks."""

import torch

from tests.lab.faults.models import Mlp
from tests.lab.faults.training import Training
from tests.stacks.faults import Flip, OwnGradient, OwnRate, SameData, begin, cases

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Skipping(Mlp):
    """A residual layer that may be skipped (stochastic depth)."""

    def __init__(self):
        super().__init__()
        self.deep = torch.nn.Linear(32, 32)
        self.skips = False

    def forward(self, x):
        x = torch.relu(self.norm(self.inner(x)))
        if not self.skips:
            x = x + torch.relu(self.deep(x))
        return self.head(torch.relu(self.hidden(x)))


class Unused(Training):
    """At every fourth step no rank uses the layer, at the next one only one of them does."""

    find_unused = True

    def build(self):
        return Skipping()

    def before_step(self):
        phase = self.step % 4
        self.net.skips = phase == 0 or (phase == 1 and self.rank != 0)
        super().before_step()


class FlipOfUnused(Flip):
    """Neither a gradient nor an update goes to it at that step."""

    id = "flip-unused"
    what = "one bit of the skipped layer flips on one rank, at a step at which nobody uses it"
    onset = 28
    tensor = "deep.weight"


CASES = cases(Unused, Flip, FlipOfUnused, OwnGradient, OwnRate, SameData)
