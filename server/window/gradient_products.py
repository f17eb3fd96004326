"""How gradients lie to each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientProducts:
    """How far the ranks' own gradients point the same way, over all tensors that all of them have.

    Attributes:
        ranks: int64 [R], of one replica class.
        squares: float64 [R], squared norms.
        products: float64 [R], inner product of each with the mean of the other ranks'.
        others: float64 [R], squared norm of that mean.
    """

    step: int
    ranks: Int64
    squares: Float64
    products: Float64
    others: Float64

    @property
    def cosines(self) -> Float64:
        """Of each rank's gradient to the mean of the others', [R]; NaN where one is zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            made: Float64 = self.products / np.sqrt(self.squares * self.others)
        return made
