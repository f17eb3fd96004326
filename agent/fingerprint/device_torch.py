"""Digests and sketches by torch's own operations, on any device that has int64 and float64.

Where Triton is not installed. Nothing here waits for the device: all constants are put there when
the plan is made, sums of float64 are taken in a fixed order (no atomic additions), and temporary
memory is bounded by the number of blocks treated at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rankscope.agent.fingerprint.constants import BLOCK, BUCKETS, TURN, block_hashes, order, table
from rankscope.agent.fingerprint.results import Results
from rankscope.agent.fingerprint.values import (
    as_numbers,
    flat,
    lookup,
    lookup_row,
    placed,
    real,
)

# Blocks that are treated at a time, a multiple of 64: 32 MiB of int64 or float64.
_BLOCKS = 1 << 13


class TorchKernels:
    """Fingerprints of some tensors on one device, with the constants they need on the device."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        most = 0
        for tensor in tensors:
            numbers = tensor.numel() * real(tensor.dtype)[1]
            words = -(-tensor.numel() * tensor.element_size() // 4)
            most = max(most, numbers, words)
        hashes = block_hashes(0, -(-most // BLOCK))
        turns = (np.arange(BUCKETS)[None, :] - TURN * np.arange(BUCKETS)[:, None]) % BUCKETS
        self._multipliers = placed(table().astype(np.int64), device)
        self._table = placed(table(), device)
        self._weights = placed((hashes | np.uint64(1)).view(np.int64), device)
        self._shifts = placed((hashes >> np.uint64(59)).astype(np.int32), device)
        negated = (hashes >> np.uint64(58)) & np.uint64(1)
        self._signs = placed(1.0 - 2.0 * negated.astype(np.float64), device)
        self._order = placed(order(), device)
        self._turns = placed(turns, device)
        self._lookup = placed(lookup(), device)

    @torch.no_grad()
    def launch(
        self,
        tensors: Sequence[torch.Tensor],
        results: Results,
        *,
        sketches: bool,
        digests: bool,
    ) -> None:
        """Computes the results of the tensors; sums of squares come with sketches."""
        for row, tensor in enumerate(tensors):
            if digests:
                results.digests[row].copy_(self._digest(tensor))
            if sketches:
                self.launch_one(row, tensor, results)

    @torch.no_grad()
    def launch_one(self, row: int, tensor: torch.Tensor, results: Results) -> None:
        """Sketch and sum of squares of one tensor alone."""
        sketch, squares = self._sketch(tensor)
        results.sketches[row].copy_(sketch)
        results.squares[row].copy_(squares)

    def _digest(self, tensor: torch.Tensor) -> torch.Tensor:
        octets = flat(tensor).view(torch.uint8)
        total = torch.zeros((), dtype=torch.int64, device=octets.device)
        step = _BLOCKS * 4 * BLOCK
        for start in range(0, octets.numel(), step):
            part = octets[start : start + step]
            rows = -(-part.numel() // (4 * BLOCK))
            if part.numel() % (4 * BLOCK) or part.storage_offset() % 4:
                padded = torch.zeros(rows * 4 * BLOCK, dtype=torch.uint8, device=octets.device)
                padded[: part.numel()] = part
                part = padded
            sums = (part.view(torch.int32).view(rows, BLOCK) * self._multipliers).sum(1)
            first = start // (4 * BLOCK)
            total += (sums * self._weights[first : first + rows]).sum()
        return total

    def _sketch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = flat(tensor)
        lookup_in = lookup_row(values.dtype)
        values = as_numbers(values)
        device = values.device
        sums = torch.zeros(BUCKETS, BLOCK, dtype=torch.float64, device=device)
        squares = torch.zeros((), dtype=torch.float64, device=device)
        step = _BLOCKS * BLOCK
        for start in range(0, values.numel(), step):
            part = values[start : start + step]
            if lookup_in is not None:
                part = self._lookup[lookup_in][part.int()]
            first = start // BLOCK
            rounds = -(-part.numel() // (BUCKETS * BLOCK))
            padded = torch.zeros(rounds * BUCKETS, BLOCK, dtype=torch.float64, device=device)
            padded.view(-1)[: part.numel()].copy_(part)
            squares += padded.view(-1).dot(padded.view(-1))
            used = -(-part.numel() // BLOCK)
            shifted = self._table << self._shifts[first : first + used, None]
            signs = torch.where(shifted < 0, -1.0, 1.0) * self._signs[first : first + used, None]
            padded[:used] *= signs
            sums += padded.view(rounds, BUCKETS, BLOCK).sum(0)
        buckets = sums[:, self._order].view(BUCKETS, 8, BUCKETS).sum(1)
        return buckets.gather(1, self._turns).sum(0), squares
