"""What torch's communication hooks leave of a gradient: which tensors exactly, the others how far.

What ranks say of their hooks at attach (`data_parallel` of `Hello.config`) is enough to know it. Of
hooks that are not torch's nothing is known, and nothing is assumed.

Shapes: T tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.server.window import Bool, Float64

# Distance between neighbours of the smallest float16: what is below is a multiple of it.
_SUBNORMAL = 2.0**-24


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients are made smaller on their way.

    Attributes:
        rank: of the matrices that PowerSGD sends instead of gradients; 0 for none.
        least_rate: by which they have to be smaller, so that it does.
        whole: it takes all tensors of a bucket for one matrix.
        half: they travel in 16 bits.
        small: these 16 bits are float16, of which small numbers have few left.
    """

    rank: int = 0
    least_rate: float = 0.0
    whole: bool = False
    half: bool = False
    small: bool = False

    def lossy(self, shapes: Sequence[tuple[int, ...]]) -> Bool:
        """Tensors, bool [T], of which an approximation comes out, and the rest in later steps.

        That of a matrix of n x m has rank r, where r (n + m) times the least rate is below n m
        (`torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`). All others are added up as
        they are: the errors that the hook keeps of them add up to nothing over the ranks.
        """
        return np.array([self._is_lossy(shape) for shape in shapes], dtype=bool)

    def rounding(self, sizes: Float64, elements: Sequence[int], ranks: int) -> Float64:
        """What float16 may take from the mean of the ranks' gradients for its smallness, [T].

        Each rank's part is rounded when it is made smaller and divided, and each sum is.

        Args:
            sizes: float64 [T], norms of what goes in; the result is relative to them.
            elements: [T], of each tensor.
        """
        if not self.small:
            return np.zeros(len(sizes))
        lost = ranks * _SUBNORMAL * np.sqrt(np.asarray(elements, dtype=np.float64))
        with np.errstate(divide="ignore", invalid="ignore"):
            share: Float64 = np.where(sizes > 0, lost / sizes, np.inf)
        return share

    def _is_lossy(self, shape: tuple[int, ...]) -> bool:
        if not self.rank:
            return False
        if self.whole:
            return True
        if not shape:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(rows, columns, self.rank)
        return (rows + columns) * rank * self.least_rate < rows * columns


NONE = Compression()


def of_config(config: Mapping[str, Any]) -> Compression:
    """Of what a rank said of itself at attach."""
    parallel = config.get("data_parallel")
    if not isinstance(parallel, Mapping):
        return NONE
    names = parallel.get("communication_hooks")
    hooks = [str(name) for name in names] if isinstance(names, Sequence) else []
    small = any("fp16_compress" in name for name in hooks)
    half = small or any("bf16_compress" in name for name in hooks)
    low = parallel.get("low_rank")
    if not isinstance(low, Mapping):
        return Compression(half=half, small=small)
    rank, rate = low.get("rank"), low.get("least_rate")
    if not isinstance(rank, int) or not isinstance(rate, int | float):
        return Compression(half=half, small=small)
    whole = any("batched_powerSGD" in name for name in hooks)
    return Compression(rank, float(rate), whole, half, small)
