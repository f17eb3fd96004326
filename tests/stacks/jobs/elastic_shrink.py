"""DDP under `torchrun --nnodes=1:2`: a node of two leaves, and two of four ranks go on."""

from stacks.faults import Flip, OwnGradient, OwnRate, cases
from stacks.resized import OlderCheckpoint, OwnWeights, Resized, begin

LAUNCH = "torchrun, a node leaves"
WORLD = 2
GAPS = {
    "own-weights": "told at step 37, the first that was not judged before the restart, and as a "
    "wrong update, not at step 32 as a wrong start",
    "older-checkpoint": "told at step 37 as gradients that differ: nothing says that a rank goes "
    "on from step 16 and another from 32, since these steps had been judged before the restart",
}
__all__ = ["CASES", "GAPS", "LAUNCH", "WORLD", "begin"]


class Shrunk(Resized):
    """Four ranks, then two."""


CASES = cases(Shrunk, Flip, OwnGradient, OwnRate, OwnWeights, OlderCheckpoint)
