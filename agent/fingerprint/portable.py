"""Digests, sketches and sums of squares in numpy, for hosts where the kernel could not be built.

The same definition as in kernel.c: digests are equal bit for bit, sketches up to the order in which
float64 numbers are added.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

from rankscope.agent.fingerprint.constants import BLOCK, BUCKETS, TURN, block_hashes, order, table
from rankscope.agent.fingerprint.values import as_numbers, flat, lookup, lookup_row
from rankscope.agent.wire import Float64

# Rows of a digest that are treated at a time, and elements of a sketch: what lies between stays in
# the second-level cache, and no temporary grows with the tensor.
_ROWS = 1 << 12
_ROUND = BUCKETS * BLOCK


def digest(tensor: torch.Tensor) -> int:
    """Digest of one tensor on the host; 0 for an empty one."""
    octets = flat(tensor).view(torch.uint8).numpy()
    multipliers = table().astype(np.int64)
    whole = len(octets) // (4 * BLOCK)
    rows = octets[: whole * 4 * BLOCK].view("<i4").reshape(whole, BLOCK)
    total = np.uint64(0)
    for first in range(0, whole, _ROWS):
        part = rows[first : first + _ROWS]
        # numpy's einsum multiplies and adds in one pass, without a temporary array.
        sums = np.einsum("ij,j->i", part, multipliers).view(np.uint64)
        total = np.add(total, _weighted(sums, first))
    if len(rest := octets[whole * 4 * BLOCK :]):
        padded = np.zeros(4 * BLOCK, dtype=np.uint8)
        padded[: len(rest)] = rest
        last = np.einsum("j,j->", padded.view("<i4"), multipliers)
        total = np.add(total, _weighted(np.array([last]).view(np.uint64), whole))
    return int(total)


def _weighted(sums: npt.NDArray[np.uint64], first: int) -> np.uint64:
    multipliers = block_hashes(first, len(sums)) | np.uint64(1)
    return np.uint64((sums * multipliers).sum(dtype=np.uint64))


def sketch(tensor: torch.Tensor) -> Float64:
    """Sketch of one tensor on the host, float64 [BUCKETS]."""
    values = flat(tensor)
    row = lookup_row(values.dtype)
    numbers = None if row is None else torch.from_numpy(lookup()[row])
    values = as_numbers(values)
    # Blocks with the same turn are added up first, element by element, in torch: numpy's sums of
    # float32 into float64 are three times as slow. One element is one thread's, always.
    wide = torch.zeros(BUCKETS, BLOCK, dtype=torch.float64)
    chosen = torch.empty_like(wide)
    sums = torch.zeros_like(wide)
    for start in range(0, len(values), _ROUND):
        count = min(_ROUND, len(values) - start)
        part = values[start : start + count]
        if numbers is not None:
            part = numbers[part.int()]
        wide.view(-1)[:count].copy_(part)
        wide.view(-1)[count:].zero_()
        used = -(-count // BLOCK)
        which = torch.from_numpy((block_hashes(start // BLOCK, used) >> np.uint64(58)).astype("i8"))
        torch.index_select(_signs(), 0, which, out=chosen[:used])
        sums[:used].addcmul_(wide[:used], chosen[:used])
    turned: Float64 = sums.numpy()[:, order()].reshape(BUCKETS, 8, BUCKETS).sum(1)
    total = np.zeros(BUCKETS)
    for block in range(BUCKETS):
        total += np.roll(turned[block], TURN * block % BUCKETS)
    return total


def squares(tensor: torch.Tensor) -> float:
    """Sum of the squares of one tensor on the host, in float64."""
    values = flat(tensor)
    row = lookup_row(values.dtype)
    if row is not None:
        values = torch.from_numpy(lookup()[row])[values.view(torch.uint8).int()]
    wide = as_numbers(values).double()
    return float(wide.dot(wide))


@functools.cache
def _signs() -> torch.Tensor:
    """Signs of a block by the top six bits of its hash, float64 [64, BLOCK]."""
    shifts = np.arange(32, dtype=np.uint32)[:, None]
    signs = np.where((table().view(np.uint32)[None, :] << shifts) >> np.uint32(31), -1.0, 1.0)
    return torch.from_numpy(np.stack([signs, -signs], axis=1).reshape(64, BLOCK))
