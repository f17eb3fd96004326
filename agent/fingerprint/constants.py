"""The random numbers of digest and sketch: fixed for ever, so that every rank draws the same.

The table comes from numpy's Philox generator with a fixed key, a counter-based generator whose
stream is part of numpy's compatibility promise, and never from torch's, whose state belongs to the
trainer. What differs from block to block is splitmix64 of the block's number, which every device
computes in a few operations. `kernel.c` holds the same numbers.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import numpy.typing as npt

# Words of a digest's row, elements of a sketch's block. The table (2 KiB) stays in the first-level
# cache: between two digests a whole training step has swept it, and longer ones cost more than the
# words.
BLOCK = 512
# Buckets of a sketch: standard error of a distance sqrt(1 / (2 * 64)) = 8.8 %. Eight times eight,
# the lanes of a vector of float64.
BUCKETS = 64
# Buckets that each block is turned further than the one before; odd, so that 64 blocks have 64
# turns.
TURN = 27

_KEY = 0x72616E6B73636F70


@functools.cache
def table() -> npt.NDArray[np.int32]:
    """Random int32 [BLOCK]: multipliers of a digest's row; their bits are the signs of a sketch.

    None is zero and no two have the same absolute value, so that neither one flipped bit nor two
    flipped sign bits of one row can leave its sum as it was.
    """
    generator = np.random.Generator(np.random.Philox(key=[_KEY, 1]))
    drawn: npt.NDArray[np.int32] = generator.integers(0, 2**32, size=BLOCK, dtype=np.uint32).view(
        np.int32
    )
    return drawn


def block_hashes(first: int, count: int) -> npt.NDArray[np.uint64]:
    """splitmix64 of the numbers of `count` blocks from `first` on, uint64 [count].

    Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators". With the lowest bit
    set it is the odd multiplier of a digest's row. Of a sketch's block the top five bits say how
    far the table is shifted left to bring the signs to the top; the next bit negates the block.
    """
    z = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return hashed


@functools.cache
def order() -> npt.NDArray[np.int64]:
    """Elements of a block in the order in which eight rows of 64 are added up, int64 [BLOCK].

    Element 64 g + 8 v + l belongs to bucket 8 ((v + g) mod 8) + l. Unturned, each column of a
    matrix with rows of 64 would fall into one bucket throughout, and the error for differences of
    low rank would be 1.7 times as large.
    """
    g, u, lane = np.ogrid[:8, :8, :8]
    elements: npt.NDArray[np.int64] = (64 * g + 8 * ((u - g) % 8) + lane).reshape(-1)
    return elements


def tensor_key(name: str) -> int:
    """Odd 64-bit weight of a tensor in the model digest."""
    hashed = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") | 1
