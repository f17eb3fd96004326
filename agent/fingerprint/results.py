"""Where the kernels of a device write what they find."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Results(NamedTuple):
    """Of n tensors.

    Attributes:
        sketches: float64 [n, BUCKETS].
        squares: sums of squares, float64 [n].
        digests: int64 [n].
    """

    sketches: torch.Tensor
    squares: torch.Tensor
    digests: torch.Tensor
