"""DDP under `torchrun --nnodes=1:2`: a node of two leaves, and two of four ranks go on."""

from tests.stacks.faults import Flip, OwnGradient, OwnRate, cases
from tests.stacks.resized import OlderCheckpoint, OwnWeights, Resized, begin

LAUNCH = "torchrun, a node leaves"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Shrunk(Resized):
    """Four ranks, then two."""


CASES = cases(Shrunk, Flip, OwnGradient, OwnRate, OwnWeights, OlderCheckpoint)
