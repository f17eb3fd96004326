"""Arrays as bytes of a binary column: little-endian, without a header."""

from __future__ import annotations

from typing import Any

import numpy as np

from rankscope.agent.wire import Array, Int64


def pack(array: Array) -> bytes:
    """Bytes of an array."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def unpack(data: bytes, dtype: type[Any]) -> Array:
    """The flat array that `pack` wrote; read-only."""
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<"))


def pack_steps(steps: Int64) -> bytes | None:
    """Bytes of ascending steps; None for first, first + 1, ..., which need none."""
    if int(steps[-1]) - int(steps[0]) + 1 == len(steps):
        return None
    return pack(steps)


def unpack_steps(data: bytes | None, first: int, count: int) -> Int64:
    """The steps that `pack_steps` wrote."""
    if data is None:
        # Not `arange(first, first + count)`: the end need not be an int64 any more.
        return first + np.arange(count, dtype=np.int64)
    return unpack(data, np.int64)
