"""DDP under `torchrun --nnodes=1:2`: a node of two comes to the two ranks that there are."""

from tests.stacks.faults import Flip, OwnGradient, OwnRate, cases
from tests.stacks.resized import OlderCheckpoint, OwnWeights, Resized, begin

LAUNCH = "torchrun, a node joins"
WORLD = 4
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


class Grown(Resized):
    """Two ranks, then four."""


CASES = cases(Grown, Flip, OwnGradient, OwnRate, OwnWeights, OlderCheckpoint)
