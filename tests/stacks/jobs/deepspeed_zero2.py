"""DeepSpeed: ZeRO 2, gradients and optimizer in parts; AdamW."""

from stacks.deepspeed_engine import Engine, WrongGather, begin
from stacks.faults import NotANumber, OwnRate, SameData, cases

LAUNCH = "torchrun"
WORLD = 2
NEEDS = ("deepspeed", "torch")
__all__ = ["CASES", "LAUNCH", "NEEDS", "WORLD", "begin"]


class Zero2(Engine):
    """Of stage 2."""

    stage = 2


CASES = cases(Zero2, WrongGather, OwnRate, SameData, NotANumber)
