"""Digests and sketches by Triton kernels: a few launches for all tensors of a plan.

One program treats a tile of blocks of one tensor and writes its own partial result; a second kernel
adds those of each tensor in a fixed order, so that the results do not depend on scheduling. Blocks
of one tile of a sketch have the same turn, so they are added up element by element and turned once.
Where elements are as long as the words of a digest, one pass over them gives both. The tables of
tiles and constants are put on the device when the plan is made; only the addresses of the tensors
travel at each call, from pinned memory.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from rankscope.agent.fingerprint.constants import BLOCK, BUCKETS, TURN, block_hashes, table
from rankscope.agent.fingerprint.results import Results
from rankscope.agent.fingerprint.values import (
    all_lie_as_they_read,
    flat,
    lies_as_it_reads,
    lookup,
    lookup_row,
    placed,
    real,
)

# Blocks of a tile: 64 KiB of fp32, so that what a tile writes is below 1 % of what it reads.
_TILE = 32
# Of these so many are under way at once: a device that waits for one at a time reads at a sixth of
# what its memory gives.
_AT_ONCE = 4
# Partial results that one program adds up.
_ADDED_BY_ONE = 256
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
_WORD = 4  # bytes


@triton.jit
def _words_of(base, hashes, sums, row, column, words, BLOCK: tl.constexpr, INSIDE: tl.constexpr):
    """Adds one row of words, times the row's multiplier, to int64 [BLOCK].

    Args:
        INSIDE: the whole row is. Only then words are read four at a time.
    """
    at = row * BLOCK + column
    if INSIDE:
        word = tl.load(base + at)
        weight = tl.load(hashes + row)
    else:
        word = tl.load(base + at, mask=at < words, other=0)
        weight = tl.load(hashes + row, mask=row * BLOCK < words, other=0)
    return sums + word.to(tl.int64) * (weight | 1)


@triton.jit
def _digest_tiles(
    addresses, sizes, tensor_of, first_of, hashes, multipliers, partial,
    BLOCK: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Digest of one tile: sum of word * multiplier of the column * odd multiplier of the row."""
    tile = tl.program_id(0)
    tensor = tl.load(tensor_of + tile)
    first = tl.load(first_of + tile)
    size = tl.load(sizes + tensor)
    words = size // 4
    address = tl.load(addresses + tensor)
    base = address.to(tl.pointer_type(tl.int32))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    column = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], dtype=tl.int64)
    if (first + TILE) * BLOCK <= words:
        for step in range(0, TILE, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                sums = _words_of(base, hashes, sums, first + step + i, column, words, BLOCK, True)
    else:
        for row in range(first, tl.minimum(first + TILE, (words + BLOCK - 1) // BLOCK)):
            sums = _words_of(base, hashes, sums, row, column, words, BLOCK, False)
    # The multiplier of a column is the same in all rows: once is enough.
    sums *= tl.load(multipliers + column).to(tl.int64)
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
def _block_of(
    base, hashes, lookup_row, random, sums, squares, words, block, column, count,
    BLOCK: tl.constexpr, LOOKUP: tl.constexpr, DIGEST: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Adds one block of elements to float64 [BLOCK]; its squares, and its words where wanted.

    Args:
        INSIDE: the whole block is. Only then several elements are read at a time.
    """
    at = block * BLOCK + column
    if INSIDE:
        value = tl.load(base + at)
        hashed = tl.load(hashes + block)
    else:
        value = tl.load(base + at, mask=at < count, other=0)
        hashed = tl.load(hashes + block, mask=block * BLOCK < count, other=0)
    if DIGEST:
        words += value.to(tl.int32, bitcast=True).to(tl.int64) * (hashed | 1)
    if LOOKUP:
        value = tl.load(lookup_row + value.to(tl.int32), mask=at < count, other=0.0)
    wide = value.to(tl.float64)
    shift = ((hashed >> 59) & 31).to(tl.int32)
    flipped = ((random << shift) < 0) ^ (((hashed >> 58) & 1) != 0)
    return sums + tl.where(flipped, -wide, wide), squares + wide * wide, words


@triton.jit(do_not_specialize=["address", "skipped"])
def _sketch_tiles(
    addresses, address, skipped, counts, tensor_of, first_of, hashes, multipliers, lookup_row,
    sketched, squared, digested,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr, TURN: tl.constexpr, TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, POINTER: tl.constexpr, LOOKUP: tl.constexpr, DIGEST: tl.constexpr,
    ALIGNED: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """One tile: blocks `first`, `first` + 64, ... of a tensor.

    Writes its sketch, float64 [BUCKETS], and its sum of squares; DIGEST: its digest, too, of
    elements as long as a word.

    Args:
        address, skipped: ALONE: of the tensor that is to be read, and the tiles of those before it.
    """
    tile = tl.program_id(0) + skipped
    tensor = tl.load(tensor_of + tile)
    first = tl.load(first_of + tile)
    count = tl.load(counts + tensor)
    if ALONE:
        place = address
    else:
        place = tl.load(addresses + tensor)
    base = place.to(tl.pointer_type(POINTER))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    # Loaded in the order of `constants.order`: the eighth of 64 rows then are added up straight.
    lane = tl.arange(0, BLOCK)
    group = lane // 64
    column = group * 64 + ((lane // 8 - group) % 8 + 8) % 8 * 8 + lane % 8
    random = tl.load(multipliers + column)
    sums = tl.zeros([BLOCK], dtype=tl.float64)
    squares = tl.zeros([BLOCK], dtype=tl.float64)
    words = tl.zeros([BLOCK], dtype=tl.int64)
    if (first + (TILE - 1) * BUCKETS + 1) * BLOCK <= count:
        for step in range(0, TILE, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                sums, squares, words = _block_of(
                    base, hashes, lookup_row, random, sums, squares, words,
                    first + (step + i) * BUCKETS, column, count, BLOCK, LOOKUP, DIGEST, True,
                )  # fmt: skip
    else:
        end = tl.minimum(first + TILE * BUCKETS, (count + BLOCK - 1) // BLOCK)
        for block in range(first, end, BUCKETS):
            sums, squares, words = _block_of(
                base, hashes, lookup_row, random, sums, squares, words,
                block, column, count, BLOCK, LOOKUP, DIGEST, False,
            )  # fmt: skip
    buckets = tl.sum(tl.reshape(sums, [BLOCK // BUCKETS, BUCKETS]), axis=0)
    bucket = tl.arange(0, BUCKETS)
    turned = (bucket + (first % BUCKETS) * TURN) % BUCKETS
    tl.store(sketched + tile * BUCKETS + turned, buckets)
    tl.store(squared + tile, tl.sum(squares, axis=0))
    if DIGEST:
        tl.store(digested + tile, tl.sum(words * random.to(tl.int64), axis=0))


@triton.jit
def _sum_of(values, start, end, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """Sum of rows `start` to `end` of some [rows, WIDTH], in an order that is always the same."""
    lane = tl.arange(0, WIDTH)
    row = tl.arange(0, AT_ONCE)
    sums = tl.zeros([AT_ONCE, WIDTH], dtype=values.dtype.element_ty)
    for first in range(start, end, AT_ONCE):
        at = first + row
        read = values + at[:, None] * WIDTH + lane[None, :]
        sums += tl.load(read, mask=(at < end)[:, None], other=0)
    return tl.sum(sums, axis=0)


@triton.jit
def _add_rows(
    starts, ends, into, sketched, squared, digested, sketches, squares, digests,
    SKETCH: tl.constexpr, DIGEST: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Adds up the partial results of some rows into a row of what follows."""
    part = tl.program_id(0)
    start = tl.load(starts + part)
    end = tl.load(ends + part)
    row = tl.load(into + part)
    one = tl.arange(0, 1)
    if SKETCH:
        found = _sum_of(sketched, start, end, BUCKETS, 16)
        tl.store(sketches + row * BUCKETS + tl.arange(0, BUCKETS), found)
        tl.store(squares + row + one, _sum_of(squared, start, end, 1, 256))
    if DIGEST:
        tl.store(digests + row + one, _sum_of(digested, start, end, 1, 256))


class _Level:
    """Which rows of partial results one program each adds up, and into which row of what follows.

    Args:
        starts, ends: of the rows, int64 [n].
        into: int64 [n].
    """

    def __init__(
        self,
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        into: npt.NDArray[np.int64],
        device: torch.device,
    ) -> None:
        self.count = len(starts)
        self.tables = [placed(part, device) for part in (starts, ends, into)]


class _Partial:
    """Room for partial results of some tiles: sketches, sums of squares and digests.

    Args:
        rows: how many.
        sketched: whether there are any but digests.
    """

    def __init__(self, rows: int, device: torch.device, *, sketched: bool) -> None:
        wide = rows if sketched else 0
        self.sketches = torch.empty(wide * BUCKETS, dtype=torch.float64, device=device)
        self.squares = torch.empty(wide, dtype=torch.float64, device=device)
        self.digests = torch.empty(rows, dtype=torch.int64, device=device)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.sketches, self.squares, self.digests))


class _Tiles:
    """Which tile treats which blocks of which tensor, and room for their partial results.

    The partial results of a tensor are added up by one program where they are few, else by several,
    and what these have found by another.

    Args:
        rows: which tensors these are.
        firsts: first blocks of the tiles of each.
        sketched: whether they have sketches.
    """

    def __init__(
        self,
        rows: list[int],
        firsts: list[npt.NDArray[np.int64]],
        device: torch.device,
        *,
        sketched: bool,
    ) -> None:
        lengths = np.array([len(f) for f in firsts], dtype=np.int64)
        ends = np.cumsum(lengths)
        places = np.array(rows, dtype=np.int64)
        self._sketched = sketched
        self.count = int(ends[-1])
        self.tensor_of = placed(np.repeat(places, lengths), device)
        self.first_of = placed(np.concatenate(firsts), device)
        self.partial = _Partial(self.count, device, sketched=sketched)
        parts = -(-lengths // _ADDED_BY_ONE)
        last = np.cumsum(parts)
        of_tensor = np.repeat(np.arange(len(rows)), parts)
        number = np.arange(len(of_tensor)) - np.repeat(last - parts, parts)
        starts = (ends - lengths)[of_tensor] + number * _ADDED_BY_ONE
        stops = np.minimum(starts + _ADDED_BY_ONE, ends[of_tensor])
        self._ranges = {
            row: (int(end - n), int(n)) for row, end, n in zip(rows, ends, lengths, strict=True)
        }
        self._between: _Partial | None = None
        if len(starts) == len(rows):
            self._levels = [_Level(starts, stops, places, device)]
        else:
            self._between = _Partial(len(starts), device, sketched=sketched)
            self._levels = [
                _Level(starts, stops, np.arange(len(starts)), device),
                _Level(last - parts, last, places, device),
            ]

    def of(self, row: int) -> tuple[int, int]:
        """Tiles before those of a tensor, and how many it has."""
        return self._ranges[row]

    @property
    def memory(self) -> list[torch.Tensor]:
        """What is written on the way."""
        return [*self.partial, *(self._between or ())]

    def add(self, results: Results, *, digests: bool) -> None:
        """Adds the partial results of each tensor up into its row of the results.

        Args:
            digests: whether there are digests among them.
        """
        read = self.partial
        for level in self._levels:
            into = results if level is self._levels[-1] else self._between
            assert into is not None
            _add_rows[(level.count,)](
                *level.tables, *read, *into,
                SKETCH=self._sketched, DIGEST=digests, BUCKETS=BUCKETS, num_warps=4,
            )  # fmt: skip
            read = self._between or read


def _sketch_firsts(blocks: int) -> npt.NDArray[np.int64]:
    """First block of each tile; a tile has each 64th block from there on, _TILE of them."""
    rounds = np.arange(0, blocks, BUCKETS * _TILE)
    firsts = (rounds[:, None] + np.arange(BUCKETS)[None, :]).reshape(-1)
    return firsts[firsts < blocks]


class TritonKernels:
    """Fingerprints of some tensors on one device, none of them empty.

    Attributes:
        partials: the memory that the kernels write on their way.
        first_of_each_type: one tensor of each type, for which there is code of its own.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        sizes = np.array([t.numel() * t.element_size() for t in tensors], dtype=np.int64)
        counts = np.array([t.numel() * real(t.dtype)[1] for t in tensors], dtype=np.int64)
        self._dtypes = [real(t.dtype)[0] for t in tensors]
        most = int(max(-(-np.maximum(-(-sizes // _WORD), counts) // BLOCK)))
        self._hashes = placed(block_hashes(0, most).view(np.int64), device)
        self._table = placed(table(), device)
        self._lookup = placed(lookup(), device)
        self._sizes = placed(sizes, device)
        self._counts = placed(counts, device)
        rows = -(-sizes // (_WORD * BLOCK))

        def words(members: list[int]) -> _Tiles | None:
            firsts = [np.arange(0, max(rows[i], 1), _TILE) for i in members]
            return _Tiles(members, firsts, device, sketched=False) if members else None

        self._words = words(list(range(len(tensors))))
        # Where sketches are wanted, too: the digests that these do not give.
        self._other_words = words([i for i, d in enumerate(self._dtypes) if d.itemsize != _WORD])
        by_type: dict[torch.dtype, list[int]] = {}
        for i, dtype in enumerate(self._dtypes):
            by_type.setdefault(dtype, []).append(i)
        self._sketches = {
            dtype: _Tiles(
                members,
                [_sketch_firsts(-(-int(counts[i]) // BLOCK)) for i in members],
                device,
                sketched=True,
            )
            for dtype, members in by_type.items()
        }
        self.first_of_each_type = [members[0] for members in by_type.values()]
        every = [t for t in (self._words, self._other_words, *self._sketches.values()) if t]
        self.partials = [memory for tiles in every for memory in tiles.memory]

    @torch.no_grad()
    def launch(
        self,
        addresses: torch.Tensor,
        results: Results,
        *,
        aligned: bool,
        digests: bool,
        sketches: bool,
    ) -> None:
        """Launches the kernels on the current stream of the device.

        Args:
            addresses: int64 [n] on the device: where the tensors of the construction are now, as
                `readable` gives them.
            results: for those of all of them.
            aligned: whether all of these addresses are multiples of 16.
            digests, sketches: which of the results are wanted; sums of squares come with sketches.
        """
        tiles = self._other_words if sketches else self._words
        if digests and tiles is not None:
            _digest_tiles[(tiles.count,)](
                addresses, self._sizes, tiles.tensor_of, tiles.first_of, self._hashes, self._table,
                tiles.partial.digests,
                BLOCK=BLOCK, TILE=_TILE, AT_ONCE=_AT_ONCE, ALIGNED=aligned, num_warps=4,
            )  # fmt: skip
            tiles.add(results, digests=True)
        if sketches:
            for dtype, tiles in self._sketches.items():
                self._sketch(dtype, tiles, addresses, aligned=aligned, digests=digests)
                tiles.add(results, digests=digests and dtype.itemsize == _WORD)

    def begin_one_by_one(self) -> None:
        """Before the first `launch_one`: tensors that are never given count as zeros."""
        for tiles in self._sketches.values():
            for memory in tiles.partial:
                memory.zero_()

    @torch.no_grad()
    def launch_one(self, row: int, address: int) -> None:
        """Sketch and sum of squares of one of the tensors alone, tile by tile.

        Args:
            row: which one.
            address: where it is now, as `readable` gives it.
        """
        dtype = self._dtypes[row]
        aligned = not address % 16
        self._sketch(
            dtype,
            self._sketches[dtype],
            self._counts,
            aligned=aligned,
            digests=False,
            one=(row, address),
        )

    def end_one_by_one(self, results: Results) -> None:
        """After the last one: adds up what was found."""
        for tiles in self._sketches.values():
            tiles.add(results, digests=False)

    def _sketch(
        self,
        dtype: torch.dtype,
        tiles: _Tiles,
        addresses: torch.Tensor,
        *,
        aligned: bool,
        digests: bool,
        one: tuple[int, int] | None = None,
    ) -> None:
        digests = digests and dtype.itemsize == _WORD
        row, address = one or (None, 0)
        skipped, count = (0, tiles.count) if row is None else tiles.of(row)
        lookup_at = lookup_row(dtype)
        _sketch_tiles[(count,)](
            addresses, address, skipped, self._counts, tiles.tensor_of, tiles.first_of,
            self._hashes, self._table, self._lookup[lookup_at or 0], *tiles.partial,
            BLOCK=BLOCK, BUCKETS=BUCKETS, TURN=TURN, TILE=_TILE, AT_ONCE=_AT_ONCE,
            POINTER=_POINTERS.get(dtype, tl.uint8), LOOKUP=lookup_at is not None, DIGEST=digests,
            ALIGNED=aligned, ALONE=one is not None, num_warps=4,
        )  # fmt: skip

    @staticmethod
    def readable(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or a copy that lies as it reads and begins at a word's address."""
        if not lies_as_it_reads(tensor):
            tensor = flat(tensor)
        return tensor.detach().clone() if tensor.data_ptr() % _WORD else tensor

    @classmethod
    def all_readable(
        cls, tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], npt.NDArray[np.int64]]:
        """The same of all of them, to be kept until they were read, and their addresses."""
        # Loops that are not Python's: this is asked of all parameters, several times a sample.
        if all_lie_as_they_read(tensors):
            addresses = np.array(list(map(torch.Tensor.data_ptr, tensors)), dtype=np.int64)
            if not (addresses % _WORD).any():
                return tensors, addresses
        kept = [cls.readable(tensor) for tensor in tensors]
        return kept, np.array([t.data_ptr() for t in kept], dtype=np.int64)
