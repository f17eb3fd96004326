"""DeepSpeed: ZeRO 3, parameters, gradients and optimizer in parts; AdamW."""

from tests.stacks.deepspeed_engine import Engine, WrongGather, begin
from tests.stacks.faults import NotANumber, OwnRate, SameData, SmallBatches, cases

LAUNCH = "torchrun"
WORLD = 2
NEEDS = ("deepspeed", "torch")
__all__ = ["CASES", "LAUNCH", "NEEDS", "WORLD", "begin"]


class Zero3(Engine):
    """Of stage 3; matrices are dealt out, and vectors are held by both ranks."""

    stage = 3
    more = {"stage3_param_persistence_threshold": 100}


class WrongVector(WrongGather):
    """Of what both ranks hold."""

    @property
    def tensor(self):
        return "norm.weight"


CASES = cases(Zero3, WrongVector, OwnRate, SameData, NotANumber, SmallBatches)
