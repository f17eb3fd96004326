"""FSDP2: `fully_shard` over all ranks."""

from stacks.faults import (
    BadLabels,
    NotANumber,
    OwnRate,
    SameData,
    SlowRank,
    SmallBatches,
    begin,
    cases,
)

from benchmarks.faultlab.sharded import Sharded

LAUNCH = "torchrun"
WORLD = 2
GAPS = {
    "slow-rank": "which rank is waited for is told of DDP's reduction only",
    "own-rate": "rates are compared inside groups of replicas only: here there are none",
    "same-data": "as for the rate: batches",
}
__all__ = ["CASES", "LAUNCH", "WORLD", "begin"]


CASES = cases(Sharded, NotANumber, BadLabels, SlowRank, OwnRate, SameData, SmallBatches)
