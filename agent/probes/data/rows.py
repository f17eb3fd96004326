"""Which samples a batch holds: a few rows of it, by their hashes.

Those with the smallest hashes are taken. So the choice depends on the samples alone: a sample that
was taken from one batch is most likely taken from the next one that it is in, on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rankscope.agent.probes.numbers_in_transit import Arrival
from rankscope.agent.wire import NO_SAMPLE, SAMPLE_DIGESTS, SAMPLES_REPORTED

# Elements of a row that are hashed; of tokens the first ones: padding comes after them.
_ELEMENTS = 128
_TOKENS = 256
# Rows of a tensor that are hashed.
_MOST_ROWS = 4096
# Of longer rows places could not be computed in 64 bits.
_LONGEST = 2**31
# Hashes travel as float64.
_LAST = 2**52 - 1
_GOLDEN = 0x9E3779B9
_SPREAD = -0x40A7_B892_E31B_1A47
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Hashes = npt.NDArray[np.int64]


class RowHashes:
    """Hashes of the rows of one kind of tensor after the other.

    What is the same for all tensors of one shape is kept for the last shape.
    """

    def __init__(self) -> None:
        self._shape: tuple[Any, ...] = ()
        self._places: tuple[Any, ...] = ()
        self._factors: Any = None

    def begin(self, tensor: torch.Tensor, *, here: bool | None = None) -> Hashes | Arrival | None:
        """The smallest hashes of rows, ascending; of a tensor on a device, on their way to here.

        Args:
            tensor: [rows, ...], of plain bits, lying as it may.
            here: whether numpy does it; None: for tensors in the memory of the host.

        Returns:
            int64 [at most SAMPLES_REPORTED], from 0 to 2^52 - 1; None for what has no rows. Rows of
            zeros alone, which are padding, have the largest one.
        """
        whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        bits = _BITS.get(tensor.element_size())
        if not tensor.dim() or not tensor.numel() or bits is None or tensor.dtype.is_complex:
            return None
        if tensor.numel() // tensor.shape[0] >= _LONGEST:
            return None
        if here is None:
            here = tensor.device.type == "cpu"
        values: Any = tensor.detach()[:_MOST_ROWS].view(bits)
        if here:
            values = values.numpy()
        if whole and tensor.dim() == 2:
            values = values[:, :_TOKENS]
        shape = (tuple(values.shape[1:]), tensor.device, here)
        if shape != self._shape:
            self._shape = shape
            self._prepare(shape[0], tensor.device, here)
        taken = values[(slice(None), *self._places)] if self._places else values
        taken = taken.reshape(len(taken), -1)
        sums = (taken * self._factors).sum(1)
        # Factors spread each bit upwards only; the low half gets the high one before another one.
        hashes = (sums ^ ((sums >> 32) & 0xFFFF_FFFF)) * _SPREAD
        if here:
            return _smallest_here(hashes)
        hashes = torch.where(hashes == 0, _LAST, (hashes >> 12) & _LAST)
        return Arrival(torch.topk(hashes, min(SAMPLES_REPORTED, len(hashes)), largest=False).values)

    def _prepare(self, rest: tuple[int, ...], device: torch.device, here: bool) -> None:
        size = int(np.prod(rest))
        # Made where they are needed: a copy to a device would wait for it.
        count = size if len(rest) < 2 and size <= _TOKENS else min(size, _ELEMENTS)
        numbers: Any = np.arange(count) if here else torch.arange(count, device=device)
        self._factors = _mixed(numbers + 1) | 1
        self._places = ()
        if count == size:
            return
        # Everywhere in the row, and in no column of an image again and again.
        place = ((numbers * _GOLDEN % 2**32) * size) >> 32
        places: list[Any] = []
        for length in reversed(rest):
            places.insert(0, place % length)
            place = place // length
        self._places = tuple(places)


def packed(hashes: Sequence[Hashes | Arrival]) -> dict[str, int]:
    """The digests of a step: the smallest hashes of all of its micro-batches, two in each."""
    known = [h.result().astype(np.int64) if isinstance(h, Arrival) else h for h in hashes]
    every = known[0] if len(known) == 1 else np.sort(np.concatenate(known))[:SAMPLES_REPORTED]
    # Their high bits put them in order, their low bits distinguish them.
    ids = [h & NO_SAMPLE for h in every.tolist() if h != _LAST]
    ids += [NO_SAMPLE] * (SAMPLES_REPORTED - len(ids))
    pairs = zip(SAMPLE_DIGESTS, ids[::2], ids[1::2], strict=True)
    return {name: one << 32 | other for name, one, other in pairs}


def _smallest_here(hashes: Hashes) -> Hashes:
    found: Hashes = (hashes >> 12) & _LAST
    found[hashes == 0] = _LAST
    if len(found) > 8 * SAMPLES_REPORTED:
        found = np.partition(found, SAMPLES_REPORTED)[:SAMPLES_REPORTED]
    found.sort()
    return found[:SAMPLES_REPORTED]


def _mixed(value: Any) -> Any:
    """Spreads every bit over all: the finaliser of SplitMix64, on int64 arrays and tensors.

    Source:
        Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    value = (value ^ ((value >> 30) & 0x3_FFFF_FFFF)) * _SPREAD
    value = (value ^ ((value >> 27) & 0x1F_FFFF_FFFF)) * -0x6B2F_B644_ECCE_EE15
    return value ^ ((value >> 31) & 0x1_FFFF_FFFF)
