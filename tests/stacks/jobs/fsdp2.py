"""FSDP2: `fully_shard` over all ranks."""

from tests.lab.faults.sharded import Sharded
from tests.stacks.faults import (
    BadLabels,
    NotANumber,
    OwnRate,
    SameData,
    SlowRank,
    SmallBatches,
    begin,
    cases,
)

LAUNCH = "torchrun"
WORLD = 2
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


CASES = cases(Sharded, NotANumber, BadLabels, SlowRank, OwnRate, SameData, SmallBatches)
