"""DeepSpeed: ZeRO 1, the optimizer in parts; AdamW."""

from tests.stacks.deepspeed_engine import Engine, begin, partitioned

LAUNCH = "torchrun"
WORLD = 2
NEEDS = ("deepspeed", "torch")
__all__ = ["CASES", "LAUNCH", "NEEDS", "WORLD", "begin"]


class Zero1(Engine):
    """Of stage 1."""

    stage = 1


CASES = partitioned(Zero1)
