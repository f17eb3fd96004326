"""What a fault does to tensors, in place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tests.lab.drawn.fault import Fault


class Transform:
    """One fault on one rank, with what it remembers.

    Args:
        fault: what to do; its random numbers are its own and no other's.
    """

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._generator = torch.Generator().manual_seed(fault.seed)
        self._before: list[torch.Tensor] = []

    def remember(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps values, for `stale`."""
        if self._fault.transform == "stale":
            self._before = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def apply(self, tensors: Sequence[torch.Tensor]) -> None:
        """Changes what the fault's extent covers."""
        fault = self._fault
        number = int(fault.tensor * len(tensors))
        if fault.transform == "swapped":
            _swap(tensors, number)
            return
        chosen = range(len(tensors)) if fault.extent == "all" else (number,)
        for index in chosen:
            flat = tensors[index].view(-1)
            part = self._part(flat)
            old = self._before[index].view(-1) if self._before else None
            self._change(flat, part, old)

    def _part(self, flat: torch.Tensor) -> slice:
        count = len(flat)
        if self._fault.extent == "slice":
            return slice(0, max(count // 4, 1))
        if self._fault.extent == "element":
            at = int(self._fault.tensor * 7919) % count
            return slice(at, at + 1)
        return slice(0, count)

    def _change(self, flat: torch.Tensor, part: slice, old: torch.Tensor | None) -> None:
        size, values = self._fault.size, flat[part]
        match self._fault.transform:
            case "scale":
                values *= size
            case "noise":
                scale = float(flat.float().std(correction=0)) or 1.0
                drawn = torch.randn(len(values), generator=self._generator)
                values += (size * scale * drawn).to(values.dtype)
            case "zero":
                values.zero_()
            case "sign":
                values.neg_()
            case "bit":
                # A bit of the exponent where the size is large, of the mantissa where it is small.
                bit = min(max(23 + int(math.log2(size)), 8), 29)
                values[:1].view(torch.int32).bitwise_xor_(1 << bit)
            case "nonfinite":
                values[int(self._fault.tensor * 7919) % len(values)] = math.nan
            case "stale" if old is not None:
                values.copy_(old[part])
            case "permuted":
                order = torch.randperm(len(values), generator=self._generator)
                values.copy_(values[order])


def _swap(tensors: Sequence[torch.Tensor], number: int) -> None:
    """Exchanges two tensors of one shape; without such a pair, reverses one."""
    for distance in range(1, len(tensors)):
        one, other = tensors[number], tensors[(number + distance) % len(tensors)]
        if one.shape == other.shape:
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
            return
    tensors[number].copy_(tensors[number].view(-1).flip(0).view_as(tensors[number]))
