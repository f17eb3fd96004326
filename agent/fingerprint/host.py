"""Fingerprints of tensors in the memory of the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rankscope.agent.fingerprint import kernel, portable
from rankscope.agent.fingerprint.constants import table
from rankscope.agent.fingerprint.values import (
    all_lie_as_they_read,
    kind_of,
    lies_as_it_reads,
    lookup,
    real,
)
from rankscope.agent.wire import Float64, UInt64


class HostTensors:
    """Those tensors of a plan that the CPU reads itself: one call of the kernel for all.

    Attributes:
        rows: their positions in the plan.
    """

    def __init__(self, rows: list[int], tensors: Sequence[torch.Tensor]) -> None:
        self.rows = rows
        self._library = kernel.load()
        parts = [real(t.dtype) for t in tensors]
        counts = [t.numel() * n for t, (_, n) in zip(tensors, parts, strict=True)]
        self._counts = np.array(counts, dtype=np.int64)
        self._kinds = np.array([kind_of(dtype) for dtype, _ in parts], dtype=np.int64)
        self._rows = np.array(rows, dtype=np.int64)
        self._addresses = np.zeros(len(rows), dtype=np.uint64)
        self._constants = (lookup(), table())
        self._columns = tuple(
            array.ctypes.data for array in (self._addresses, self._counts, self._kinds, self._rows)
        )
        self._constant_columns = tuple(array.ctypes.data for array in self._constants)
        # For tensors that do not lie as they read: one after the other is copied here. As large
        # as the largest of them, from the first time on.
        self._copy = torch.empty(0, dtype=torch.uint8)

    def compute(
        self,
        tensors: Sequence[torch.Tensor],
        digests: UInt64 | None,
        sketches: Float64 | None,
        squares: Float64 | None,
    ) -> None:
        """Writes the results of this part's tensors into their rows.

        Args:
            tensors: all tensors of the plan.
            digests: uint64 [T], where digests are wanted.
            sketches: float64 [T, BUCKETS], where sketches are wanted.
            squares: float64 [T], where sums of squares are wanted.
        """
        if self._library is None:
            for row in self.rows:
                if digests is not None:
                    digests[row] = portable.digest(tensors[row])
                if sketches is not None:
                    sketches[row] = portable.sketch(tensors[row])
                if squares is not None:
                    squares[row] = portable.squares(tensors[row])
            return
        results = tuple(
            None if array is None else array.ctypes.data for array in (digests, sketches, squares)
        )
        mine = tensors if len(tensors) == len(self.rows) else [tensors[row] for row in self.rows]
        if all_lie_as_they_read(mine):
            self._addresses[:] = list(map(torch.Tensor.data_ptr, mine))
            self._call(0, len(mine), results)
            return
        scattered = [i for i, t in enumerate(mine) if not lies_as_it_reads(t)]
        for position, tensor in enumerate(mine):
            self._addresses[position] = (
                self._copied(tensor) if position in scattered else tensor.data_ptr()
            )
            self._call(position, 1, results)

    def _call(self, first: int, count: int, results: tuple[int | None, ...]) -> None:
        assert self._library is not None
        self._library.rankscope_prints(
            count,
            *(column + 8 * first for column in self._columns),
            *self._constant_columns,
            *results,
        )

    def _copied(self, tensor: torch.Tensor) -> int:
        size = tensor.numel() * tensor.element_size()
        if self._copy.numel() < size:
            self._copy = torch.empty(size, dtype=torch.uint8)
        self._copy[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        return self._copy.data_ptr()
