"""The random numbers of digest and sketch: fixed for ever, so that every rank draws the same.

They come from numpy's Philox generator with a fixed key, a counter-based generator whose stream is
part of numpy's compatibility promise, and never from torch's, whose state belongs to the trainer.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import numpy.typing as npt

# Words a row of a digest. Short, so that its multipliers (2 KiB) stay in the cache: between two
# digests a whole training step has swept it, and with a long table that cost more than the words.
ROW = 256
# Buckets of a sketch: relative standard error of a distance about sqrt(1 / (2 * 67)) = 9 %. A
# prime: with 64, each column of a matrix whose rows are a multiple of 64 long would fall into one
# bucket throughout, and the error for differences of low rank would be 12.7 % (measured).
BUCKETS = 67
# Elements a chunk of a sketch, whole rows of buckets.
SKETCH_CHUNK = 512 * BUCKETS

_KEY = 0x72616E6B73636F70
_ODD = np.uint64(1)


def _draw(stream: int, count: int) -> npt.NDArray[np.uint64]:
    generator = np.random.Generator(np.random.Philox(key=[_KEY, stream]))
    return generator.integers(0, 2**64, size=count, dtype=np.uint64)


@functools.cache
def multipliers() -> npt.NDArray[np.int64]:
    """Odd multiplier of each position in a row, int64 [ROW] (bits of unsigned numbers).

    Odd, so that a change of any single bit of any word changes the sum modulo 2^64.
    """
    drawn: npt.NDArray[np.int64] = (_draw(1, ROW) | _ODD).view(np.int64)
    return drawn


_row_multipliers: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)


def row_multipliers(rows: int) -> npt.NDArray[np.uint64]:
    """Odd multiplier of each row of a tensor, uint64 [rows]."""
    global _row_multipliers
    if len(_row_multipliers) < rows:
        # A longer draw begins with the shorter one, so growing changes no digest.
        _row_multipliers = _draw(2, max(rows, 2 * len(_row_multipliers), 1024)) | _ODD
    return _row_multipliers[:rows]


@functools.cache
def signs() -> npt.NDArray[np.float64]:
    """Random signs, float64 [4 * SKETCH_CHUNK]; each chunk of a tensor reads its own window."""
    bits = np.unpackbits(_draw(3, 4 * SKETCH_CHUNK // 64).view(np.uint8))
    return bits.astype(np.float64) * 2.0 - 1.0


def sign_offsets(chunks: int) -> npt.NDArray[np.int64]:
    """Where in `signs` the window of each chunk begins, int64 [chunks].

    With the same signs for each chunk, differences of low rank (every gradient of a linear layer
    is one) would project onto the same few numbers and their size would be misjudged.
    """
    return (_draw(4, chunks) % np.uint64(3 * SKETCH_CHUNK)).astype(np.int64)


def tensor_key(name: str) -> int:
    """Odd 64-bit weight of a tensor in the word of the whole model."""
    hashed = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") | 1
