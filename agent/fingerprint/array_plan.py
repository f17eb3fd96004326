"""Digests and sketches of arrays in the memory of the host, without torch.

The same definition as in `plan`: an array and a tensor of the same bits have the same fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.agent.fingerprint import kernel
from rankscope.agent.fingerprint.constants import (
    BLOCK,
    BUCKETS,
    TURN,
    block_hashes,
    order,
    table,
    tensor_key,
)
from rankscope.agent.wire import Float64, UInt64

# The numbers of `enum kind` in kernel.c, and what numpy reads such elements as.
_KINDS = {
    "float32": (0, "<f4"),
    "float64": (1, "<f8"),
    "bfloat16": (2, "<u2"),
    "float16": (3, "<f2"),
    "int8": (4, "<i1"),
    "uint8": (5, "<u1"),
    "bool": (5, "<u1"),
    "int16": (6, "<i2"),
    "uint16": (7, "<u2"),
    "int32": (8, "<i4"),
    "uint32": (9, "<u4"),
    "int64": (10, "<i8"),
    "uint64": (11, "<u8"),
}
_BYTES, _LOOKUP = 5, 12
_PARTS = {"complex64": "float32", "complex128": "float64"}
_ROWS = 1 << 12
_ROUND = BUCKETS * BLOCK


@dataclass(frozen=True, slots=True)
class HostArray:
    """An array as its bytes.

    Attributes:
        octets: uint8 [bytes], in logical order.
        dtype: name of the type of an element, as numpy and torch call it.
        shape: of the array.
        numbers: for floats of one byte, the number that each byte stands for, float32 [256].
    """

    octets: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]
    numbers: npt.NDArray[np.float32] | None = None


def host_array(array: Any) -> HostArray:
    """What a numpy, JAX, TensorFlow or torch array holds; copied only where it has to be.

    Raises:
        TypeError: it is no array of numbers.
    """
    if hasattr(array, "detach") and hasattr(array, "element_size"):
        return _of_tensor(array)
    host = np.asarray(array)
    if host.dtype.hasobject or host.dtype.names is not None or host.dtype.kind in "SUmM":
        raise TypeError(f"an array of {host.dtype} has no fingerprint; give arrays of numbers")
    host = np.ascontiguousarray(host)
    if host.dtype.byteorder == ">":
        host = host.astype(host.dtype.newbyteorder("<"))
    numbers = None
    if host.dtype.itemsize == 1 and host.dtype.name not in _KINDS:
        every = np.arange(256, dtype=np.uint8)
        numbers = every.view(host.dtype).astype(np.float32)
    octets = host.reshape(-1).view(np.uint8)
    return HostArray(octets, host.dtype.name, np.shape(array), numbers)


def _of_tensor(tensor: Any) -> HostArray:
    import torch

    host = tensor.detach().to("cpu").contiguous().reshape(-1)
    name = str(host.dtype).removeprefix("torch.")
    numbers = None
    if host.element_size() == 1:
        from rankscope.agent.fingerprint.values import lookup, lookup_row

        row = lookup_row(host.dtype)
        numbers = None if row is None else lookup()[row]
    octets = host.view(torch.uint8).numpy()
    return HostArray(octets, name, tuple(tensor.shape), numbers)


class ArrayPlan:
    """Fingerprints of one list of arrays, again and again.

    Attributes:
        names: one an array.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._keys = np.array([tensor_key(n) for n in names], dtype=np.uint64)
        self._library = kernel.load()

    def model_digest(self, digests: UInt64) -> int:
        """One digest for all arrays together."""
        return int((digests * self._keys).sum(dtype=np.uint64))

    def compute(
        self, arrays: Sequence[HostArray], *, sketches: bool
    ) -> tuple[UInt64, Float64 | None]:
        """Digests, uint64 [T], and sketches, float64 [T, BUCKETS], where they are wanted."""
        digests = np.zeros(len(arrays), dtype=np.uint64)
        sketched = np.zeros((len(arrays), BUCKETS)) if sketches else None
        for row, array in enumerate(arrays):
            if not len(array.octets):
                continue
            if self._library is not None:
                self._by_kernel(row, array, digests, sketched)
                continue
            digests[row] = _digest(array.octets)
            if sketched is not None:
                sketched[row] = _sketch(numbers(array))
        return digests, sketched

    def _by_kernel(
        self, row: int, array: HostArray, digests: UInt64, sketched: Float64 | None
    ) -> None:
        assert self._library is not None
        plain = _PARTS.get(array.dtype, array.dtype)
        if plain in _KINDS:
            kind, element = _KINDS[plain]
            size = np.dtype(element).itemsize
        else:
            kind, size = (_BYTES if array.numbers is None else _LOOKUP), 1
        known = np.zeros(256, dtype=np.float32) if array.numbers is None else array.numbers
        columns = (
            np.array([array.octets.ctypes.data], dtype=np.uint64),
            np.array([len(array.octets) // size], dtype=np.int64),
            np.array([kind], dtype=np.int64),
            np.array([row], dtype=np.int64),
            np.ascontiguousarray(known, dtype=np.float32),
            table(),
        )
        self._library.rankscope_prints(
            1,
            *(column.ctypes.data for column in columns),
            digests.ctypes.data,
            None if sketched is None else sketched.ctypes.data,
            None,
        )


def numbers(array: HostArray) -> Float64:
    """The real numbers of which an array consists, flat; a complex one is two."""
    plain = _PARTS.get(array.dtype, array.dtype)
    if plain == "bfloat16":
        wide = array.octets.view("<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).astype(np.float64)
    if plain in _KINDS:
        return array.octets.view(_KINDS[plain][1]).astype(np.float64)
    if array.numbers is not None:
        return array.numbers[array.octets].astype(np.float64)
    return array.octets.astype(np.float64)


def _digest(octets: npt.NDArray[np.uint8]) -> np.uint64:
    multipliers = table().astype(np.int64)
    blocks = -(-len(octets) // (4 * BLOCK))
    total = np.uint64(0)
    for first in range(0, blocks, _ROWS):
        part = octets[first * 4 * BLOCK : (first + _ROWS) * 4 * BLOCK]
        count = min(_ROWS, blocks - first)
        if len(part) < count * 4 * BLOCK:
            part = np.concatenate([part, np.zeros(count * 4 * BLOCK - len(part), dtype=np.uint8)])
        rows = part.view("<i4").reshape(count, BLOCK)
        sums = np.einsum("ij,j->i", rows, multipliers).view(np.uint64)
        odd = block_hashes(first, count) | np.uint64(1)
        total = np.add(total, np.uint64((sums * odd).sum(dtype=np.uint64)))
    return total


def _sketch(values: Float64) -> Float64:
    """Element j of a block is in bucket `order` says, turned from block to block (see `plan`)."""
    shifts = np.arange(32, dtype=np.uint32)[:, None]
    signs = np.where((table().view(np.uint32)[None, :] << shifts) >> np.uint32(31), -1.0, 1.0)
    signs = np.stack([signs, -signs], axis=1).reshape(64, BLOCK)
    sums = np.zeros((BUCKETS, BLOCK))
    for start in range(0, len(values), _ROUND):
        part = values[start : start + _ROUND]
        used = -(-len(part) // BLOCK)
        wide = np.zeros(used * BLOCK)
        wide[: len(part)] = part
        which = (block_hashes(start // BLOCK, used) >> np.uint64(58)).astype(np.int64)
        sums[:used] += wide.reshape(used, BLOCK) * signs[which]
    turned = sums[:, order()].reshape(BUCKETS, 8, BUCKETS).sum(1)
    total = np.zeros(BUCKETS)
    for block in range(BUCKETS):
        total += np.roll(turned[block], TURN * block % BUCKETS)
    return total
