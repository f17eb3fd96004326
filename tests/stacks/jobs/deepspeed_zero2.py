"""DeepSpeed: ZeRO 2, gradients and optimizer in parts; AdamW."""

from tests.stacks.deepspeed_engine import Engine, begin, partitioned

LAUNCH = "torchrun"
WORLD = 2
NEEDS = ("deepspeed", "torch")
__all__ = ["CASES", "LAUNCH", "NEEDS", "WORLD", "begin"]


class Zero2(Engine):
    """Of stage 2."""

    stage = 2


CASES = partitioned(Zero2)
