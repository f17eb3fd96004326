"""Digests and sketches by Triton kernels: a few launches for all tensors of a plan.

One program treats a tile of blocks of one tensor and writes its own partial result; a second kernel
adds those of each tensor in a fixed order, so that the results do not depend on scheduling. Blocks
of one tile of a sketch have the same turn, so they are added up element by element and turned once.
The tables of tiles and constants are put on the device when the plan is made; only the addresses
of the tensors travel at each call, from pinned memory.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from rankscope.agent.fingerprint.constants import BLOCK, BUCKETS, TURN, block_hashes, table
from rankscope.agent.fingerprint.values import (
    flat,
    lies_as_it_reads,
    lookup,
    lookup_row,
    real,
)

# Blocks of a tile: 64 KiB of fp32, so that what a tile writes is below 1 % of what it reads.
_TILE = 32
_POINTERS = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.uint16: tl.uint16,
    torch.int32: tl.int32,
    torch.uint32: tl.uint32,
    torch.int64: tl.int64,
    torch.uint64: tl.uint64,
}


@triton.jit
def _digest_tiles(
    addresses, sizes, tensor_of, first_of, hashes, multipliers, partial,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Digest of one tile: sum of word * multiplier of the column * odd multiplier of the row."""
    tile = tl.program_id(0)
    tensor = tl.load(tensor_of + tile)
    first = tl.load(first_of + tile)
    size = tl.load(sizes + tensor)
    words = size // 4
    address = tl.load(addresses + tensor)
    base = address.to(tl.pointer_type(tl.int32))
    column = tl.arange(0, BLOCK)
    multiplier = tl.load(multipliers + column).to(tl.int64)
    sums = tl.zeros([BLOCK], dtype=tl.int64)
    for i in range(TILE):
        row = first + i
        at = row * BLOCK + column
        word = tl.load(base + at, mask=at < words, other=0).to(tl.int64)
        weight = tl.load(hashes + row, mask=row * BLOCK < words, other=0) | 1
        sums += word * multiplier * weight
    # The last one to three bytes make a word with zeros, in the tile in which they lie.
    octets = address.to(tl.pointer_type(tl.uint8))
    byte = tl.arange(0, 4)
    row = words // BLOCK
    limit = tl.where(row < first, 0, tl.where(row < first + TILE, size, 0))
    at = words * 4 + byte
    loaded = tl.load(octets + at, mask=at < limit, other=0).to(tl.int64)
    tail = tl.sum(loaded << (8 * byte).to(tl.int64), axis=0)
    inner = tl.load(multipliers + words % BLOCK).to(tl.int64)
    outer = tl.load(hashes + row, mask=words * 4 < limit, other=0) | 1
    tl.store(partial + tile, tl.sum(sums, axis=0) + tail * inner * outer)


@triton.jit
def _sketch_tiles(
    addresses, counts, tensor_of, first_of, hashes, multipliers, lookup_row, partial,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr, TURN: tl.constexpr, TILE: tl.constexpr,
    POINTER: tl.constexpr, LOOKUP: tl.constexpr,
):  # fmt: skip
    """Sketch of one tile: blocks `first`, `first` + 64, ... of a tensor, float64 [BUCKETS]."""
    tile = tl.program_id(0)
    tensor = tl.load(tensor_of + tile)
    first = tl.load(first_of + tile)
    count = tl.load(counts + tensor)
    base = tl.load(addresses + tensor).to(tl.pointer_type(POINTER))
    # Loaded in the order of `constants.order`: the eighth of 64 rows then are added up straight.
    place = tl.arange(0, BLOCK)
    group = place // 64
    column = group * 64 + ((place // 8 - group) % 8 + 8) % 8 * 8 + place % 8
    random = tl.load(multipliers + column)
    sums = tl.zeros([BLOCK], dtype=tl.float64)
    for i in range(TILE):
        block = first + i * BUCKETS
        at = block * BLOCK + column
        inside = at < count
        hashed = tl.load(hashes + block, mask=block * BLOCK < count, other=0)
        value = tl.load(base + at, mask=inside, other=0)
        if LOOKUP:
            value = tl.load(lookup_row + value.to(tl.int32), mask=inside, other=0.0)
        wide = value.to(tl.float64)
        shift = ((hashed >> 59) & 31).to(tl.int32)
        flipped = ((random << shift) < 0) ^ (((hashed >> 58) & 1) != 0)
        sums += tl.where(flipped, -wide, wide)
    buckets = tl.sum(tl.reshape(sums, [BLOCK // BUCKETS, BUCKETS]), axis=0)
    bucket = tl.arange(0, BUCKETS)
    turned = (bucket + (first % BUCKETS) * TURN) % BUCKETS
    tl.store(partial + tile * BUCKETS + turned, buckets)


@triton.jit
def _add_tiles(partial, starts, rows, results, WIDTH: tl.constexpr):
    """Sum of the partial results of one tensor, one after the other, into its row."""
    tensor = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    start = tl.load(starts + tensor)
    end = tl.load(starts + tensor + 1)
    total = tl.load(partial + start * WIDTH + lane)
    for tile in range(start + 1, end):
        total += tl.load(partial + tile * WIDTH + lane)
    tl.store(results + tl.load(rows + tensor) * WIDTH + lane, total)


class _Tiles:
    """Which tile treats which blocks of which tensor, and room for their partial results."""

    def __init__(
        self,
        rows: list[int],
        firsts: list[np.ndarray],
        device: torch.device,
        partial: torch.dtype,
        width: int,
    ) -> None:
        lengths = [len(f) for f in firsts]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tensor_of = np.repeat(np.array(rows, dtype=np.int64), lengths)
        self.count = int(starts[-1])
        self.tensors = len(rows)
        self.width = width
        self.tensor_of = torch.from_numpy(tensor_of).to(device)
        self.first_of = torch.from_numpy(np.concatenate(firsts).astype(np.int64)).to(device)
        self.starts = torch.from_numpy(starts).to(device)
        self.rows = torch.from_numpy(np.array(rows, dtype=np.int64)).to(device)
        self.partial = torch.empty(self.count * width, dtype=partial, device=device)

    def add(self, results: torch.Tensor) -> None:
        _add_tiles[(self.tensors,)](
            self.partial, self.starts, self.rows, results, WIDTH=self.width, num_warps=1
        )


def _sketch_firsts(blocks: int) -> np.ndarray:
    """First block of each tile; a tile has each 64th block from there on, _TILE of them."""
    rounds = np.arange(0, blocks, BUCKETS * _TILE)
    firsts = (rounds[:, None] + np.arange(BUCKETS)[None, :]).reshape(-1)
    return firsts[firsts < blocks]


class TritonKernels:
    """Fingerprints of some tensors on one device, none of them empty.

    Attributes:
        partials: the memory that the kernels write on their way.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        sizes = [t.numel() * t.element_size() for t in tensors]
        counts = [t.numel() * real(t.dtype)[1] for t in tensors]
        most = max(-(-max(-(-s // 4), c) // BLOCK) for s, c in zip(sizes, counts, strict=True))
        self._device = device
        self._hashes = torch.from_numpy(block_hashes(0, most).view(np.int64)).to(device)
        self._table = torch.from_numpy(table()).to(device)
        self._lookup = torch.from_numpy(lookup()).to(device)
        self._sizes = torch.tensor(sizes, dtype=torch.int64).to(device)
        self._counts = torch.tensor(counts, dtype=torch.int64).to(device)
        rows = -(-np.array(sizes) // (4 * BLOCK))
        every = list(range(len(tensors)))
        tiles = [np.arange(0, n, _TILE) for n in rows]
        self._digest_tiles = _Tiles(every, tiles, device, torch.int64, 1)
        by_type: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_type.setdefault(real(tensor.dtype)[0], []).append(i)
        self._sketch_tiles = {
            dtype: _Tiles(
                members,
                [_sketch_firsts(-(-counts[i] // BLOCK)) for i in members],
                device,
                torch.float64,
                BUCKETS,
            )
            for dtype, members in by_type.items()
        }
        self.partials = [t.partial for t in (self._digest_tiles, *self._sketch_tiles.values())]

    @torch.no_grad()
    def launch(
        self,
        addresses: torch.Tensor,
        digests: torch.Tensor,
        sketches: torch.Tensor | None,
    ) -> None:
        """Launches the kernels on the current stream of the device.

        Args:
            addresses: int64 [n] on the device: where the tensors of the construction are now, as
                `readable` gives them.
            digests: int64 [n] on the device, for the results.
            sketches: float64 [n, BUCKETS] on the device, where they are wanted.
        """
        tiles = self._digest_tiles
        _digest_tiles[(tiles.count,)](
            addresses, self._sizes, tiles.tensor_of, tiles.first_of, self._hashes, self._table,
            tiles.partial, BLOCK=BLOCK, TILE=_TILE, num_warps=4,
        )  # fmt: skip
        tiles.add(digests)
        if sketches is None:
            return
        for dtype, tiles in self._sketch_tiles.items():
            row = lookup_row(dtype)
            _sketch_tiles[(tiles.count,)](
                addresses, self._counts, tiles.tensor_of, tiles.first_of, self._hashes,
                self._table, self._lookup[row or 0], tiles.partial, BLOCK=BLOCK, BUCKETS=BUCKETS,
                TURN=TURN, TILE=_TILE, POINTER=_POINTERS.get(dtype, tl.uint8),
                LOOKUP=row is not None,
                num_warps=4,
            )  # fmt: skip
            tiles.add(sketches)

    @staticmethod
    def readable(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or a copy that lies as it reads and begins at a word's address."""
        if not lies_as_it_reads(tensor):
            tensor = flat(tensor)
        return tensor.detach().clone() if tensor.data_ptr() % 4 else tensor
