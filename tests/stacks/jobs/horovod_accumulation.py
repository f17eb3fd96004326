"""Horovod with `backward_passes_per_step=2` and compression to float16."""

import horovod.torch as hvd

from tests.stacks.faults import Flip, OwnRate, SameData, cases
from tests.stacks.jobs.horovod_torch import Horovod, LateGradient, begin

LAUNCH = "horovodrun"
WORLD = 2
NEEDS = ("horovod", "torch")
__all__ = ["CASES", "LAUNCH", "NEEDS", "WORLD", "begin"]


class Compressed(Horovod):
    """Two passes a step, gradients as float16 on the wire."""

    passes_per_step = 2

    def options(self):
        return {"compression": hvd.Compression.fp16}


CASES = cases(Compressed, Flip, LateGradient, OwnRate, SameData)
