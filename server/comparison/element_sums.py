"""Sums over all elements of small tensors, read off their sketches.

Some gradients obey a law whatever the batch is: those of the logits of a softmax sum to zero over
the classes, since adding a number to all logits changes nothing, and so do those of the bias that
is added to them, and of one before a layer normalisation. What breaks such a law has not been
computed as it should be, by however little.

The sketch of a tensor with no more elements than a sketch has buckets holds every element, in its
order and with a sign of its own: the sum is known exactly. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from rankscope.server.window import ElementSums, Float64, Int64

# Of fewer elements a sum is small by chance too easily.
_LEAST_ELEMENTS = 4


@functools.cache
def signs(buckets: int) -> Float64:
    """Signs of the first `buckets` elements of every tensor in a sketch, float64 [buckets].

    As the agent draws them (`agent/fingerprint/plan.py`): bits of a table from numpy's Philox with
    a fixed key, shifted by what splitmix64 makes of block 0, whose next bit negates them all.
    """
    generator = np.random.Generator(np.random.Philox(key=[0x72616E6B73636F70, 1]))
    table = generator.integers(0, 2**32, size=512, dtype=np.uint32)[:buckets]
    mask, hashed = 2**64 - 1, 0x9E3779B97F4A7C15
    hashed = (hashed ^ (hashed >> 30)) * 0xBF58476D1CE4E5B9 & mask
    hashed = (hashed ^ (hashed >> 27)) * 0x94D049BB133111EB & mask
    hashed ^= hashed >> 31
    top = (table << np.uint32(hashed >> 59)) >> np.uint32(31)
    negated = hashed >> 58 & 1
    return np.where(top ^ np.uint32(negated), -1.0, 1.0)


def of_elements(
    step: int,
    ranks: Int64,
    sketches: Float64,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
) -> ElementSums | None:
    """Sums and norms of the tensors that are small enough; None where there is none.

    Args:
        sketches: float64 [R, T, K].
    """
    buckets = sketches.shape[2]
    sizes = [int(np.prod(shape)) if shape else 0 for shape in shapes]
    rows = [row for row, size in enumerate(sizes) if _LEAST_ELEMENTS <= size <= buckets]
    if not rows:
        return None
    held = sketches[:, rows]
    # Of elements that are not finite neither sum nor norm is.
    with np.errstate(invalid="ignore", over="ignore"):
        return ElementSums(
            step=step,
            ranks=ranks,
            names=tuple(names[row] for row in rows),
            sizes=np.array([sizes[row] for row in rows], dtype=np.int64),
            sums=held @ signs(buckets),
            norms=np.sqrt((held**2).sum(axis=2)),
        )
