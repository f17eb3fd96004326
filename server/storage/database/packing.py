"""Arrays as bytes of a binary column: little-endian, without a header."""

from __future__ import annotations

import sys
import zlib
from typing import Any

import numpy as np

from rankscope.agent.wire import Array, Int64

# Made once: a batch has dozens of arrays of a few bytes each.
_LITTLE = {of: np.dtype(of).newbyteorder("<") for of in (np.float64, np.uint64, np.int64, np.int32)}


def pack(array: Array) -> bytes:
    """Bytes of an array."""
    if sys.byteorder == "little" and array.dtype.isnative:
        return array.tobytes()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def unpack(data: bytes, dtype: type[Any]) -> Array:
    """The flat array that `pack` wrote; read-only."""
    return np.frombuffer(data, dtype=_LITTLE.get(dtype) or np.dtype(dtype).newbyteorder("<"))


def pack_steps(steps: Int64) -> bytes | None:
    """Bytes of ascending steps: none for first, first + 1, ..., one int64 for another stride."""
    count, first, last = len(steps), int(steps[0]), int(steps[-1])
    if last - first + 1 == count:
        return None
    stride = int(steps[1]) - first
    if last - first == stride * (count - 1) and bool((np.diff(steps) == stride).all()):
        return pack(np.array([stride], dtype=np.int64))
    return pack(steps)


def unpack_steps(data: bytes | None, first: int, count: int) -> Int64:
    """The steps that `pack_steps` wrote."""
    if data is None:
        # Not `arange(first, first + count)`: the end need not be an int64 any more.
        return first + np.arange(count, dtype=np.int64)
    steps = unpack(data, np.int64)
    # A single step is never written, so that this is a stride.
    return first + steps[0] * np.arange(count, dtype=np.int64) if len(steps) == 1 else steps


def pack_parts(arrivals: Int64, counts: Int64) -> bytes:
    """Bytes of when the steps of a merged row came.

    Args:
        arrivals: [P], ascending, less than 2**31 apart.
        counts: [P], how many steps each brought.
    """
    increments = np.diff(arrivals, prepend=arrivals[0])
    # Ranks take turns and post alike, so that these are small numbers, and much the same.
    return zlib.compress(pack(np.concatenate([increments, counts]).astype(np.int32)), 1)


def unpack_parts(data: bytes, first: int) -> tuple[Int64, Int64]:
    """The arrivals and counts that `pack_parts` wrote; `first` is the first arrival."""
    increments, counts = unpack(zlib.decompress(data), np.int32).astype(np.int64).reshape(2, -1)
    return first + np.cumsum(increments), counts
