"""DeepSpeed: ZeRO 1, the optimizer in parts; AdamW."""

from stacks.deepspeed_engine import Engine, WrongGather, begin
from stacks.faults import NotANumber, OwnRate, SameData, cases

LAUNCH = "torchrun"
WORLD = 2
NEEDS = ("deepspeed", "torch")
__all__ = ["CASES", "LAUNCH", "NEEDS", "WORLD", "begin"]


class Zero1(Engine):
    """Of stage 1."""

    stage = 1


CASES = cases(Zero1, WrongGather, OwnRate, SameData, NotANumber)
