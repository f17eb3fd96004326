"""Digests and sketches of a fixed list of tensors, with everything that can be prepared prepared.

Digest of a tensor with words w (its bits as signed integers of at most 32 bits, in logical order):

    D = sum_i q_i * sum_j w[i, j] * r_j   (mod 2^64)

over rows i of 256 words, with odd random 64-bit numbers r and q (multilinear hashing, Lemire &
Kaser 2014, "Strongly universal string hashing is fast", in two levels). Integer sums commute, so D
depends neither on threads nor on blocks nor on the device. Words of at most 32 bits leave the upper
half of each product random: with 64-bit words two flipped sign bits would cancel.

Sketch of a tensor x with K buckets: s_k = sum of sign_i * x_i over all i with i mod K = k, summed
in float64, so that a change of one unit in the last place of one element is not lost. It is linear
and E |s(x) - s(y)|^2 = |x - y|^2 (AMS sketch, Alon, Matias & Szegedy 1996, in the bucketed form of
CountSketch, Charikar, Chen & Farach-Colton 2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rankscope.agent.fingerprint.constants import (
    BUCKETS,
    ROW,
    SKETCH_CHUNK,
    multipliers,
    row_multipliers,
    sign_offsets,
    signs,
    tensor_key,
)
from rankscope.agent.wire import Float64, UInt64

_WORD_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}

# Tensors up to this many elements are gathered into one buffer and treated in a few calls; larger
# ones are read where they lie. Beyond it the copy costs more than the calls it saves.
_SMALL = 1 << 13
# Rows that a device multiplies at a time: bounds the temporary memory to 16 MiB.
_BLOCK_ROWS = 1 << 13


@dataclass(frozen=True, slots=True)
class Prints:
    """Fingerprints of the tensors of a plan at one moment.

    Attributes:
        digests: uint64 [T].
        sketches: float64 [T, BUCKETS], or None where only digests were asked for.
    """

    digests: UInt64
    sketches: Float64 | None


@dataclass(frozen=True, slots=True)
class Taken:
    """Fingerprints that are there already."""

    prints: Prints

    def ready(self) -> bool:
        """Whether `result` does not wait."""
        return True

    def result(self) -> Prints:
        """The fingerprints."""
        return self.prints


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor in logical order as a flat integer tensor, copied only if it must be."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_WORD_TYPES[flat.element_size()])


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor in logical order as a flat real tensor."""
    flat = tensor.detach().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


class FingerprintPlan:
    """Fingerprints of one list of tensors, again and again.

    Shapes and dtypes are those given at construction; a tensor that has changed either needs a new
    plan. The results are the same, bit for bit for the digests, whether a tensor is treated in the
    gathered buffer or alone.

    Attributes:
        names: one a tensor.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self.names = tuple(names)
        self._shapes = [t.shape for t in tensors]
        self._dtypes = [t.dtype for t in tensors]
        self._keys = np.array([tensor_key(n) for n in names], dtype=np.uint64)
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        self._large: list[int] = []
        for index, tensor in enumerate(tensors):
            # Complex numbers and 8-bit floats have no product with float64 signs.
            plain = not tensor.is_complex() and (
                not tensor.is_floating_point() or tensor.element_size() > 1
            )
            if 0 < tensor.numel() <= _SMALL and plain:
                groups.setdefault((tensor.dtype, tensor.device), []).append(index)
            elif tensor.numel():
                self._large.append(index)
        self._groups = [
            _Gathered(members, [tensors[i] for i in members]) for members in groups.values()
        ]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors still have the shapes and dtypes of the plan."""
        return [t.shape for t in tensors] == self._shapes and [
            t.dtype for t in tensors
        ] == self._dtypes

    def word(self, digests: UInt64) -> int:
        """One digest for all tensors together."""
        return int((digests * self._keys).sum(dtype=np.uint64))

    def begin(self, tensors: Sequence[torch.Tensor], *, sketches: bool) -> Taken:
        """Fingerprints of the tensors as they are now, perhaps not computed yet."""
        return Taken(self.compute(tensors, sketches=sketches))

    @torch.no_grad()
    def compute(self, tensors: Sequence[torch.Tensor], *, sketches: bool) -> Prints:
        """Fingerprints of the tensors as they are now; waits for the device they are on."""
        digests = np.zeros(len(self.names), dtype=np.uint64)
        sketched = np.zeros((len(self.names), BUCKETS)) if sketches else None
        for group in self._groups:
            members = [tensors[i] for i in group.members]
            digests[group.members] = group.digests(members)
            if sketched is not None:
                sketched[group.members] = group.sketches(members)
        for index in self._large:
            digests[index] = digest(tensors[index])
            if sketched is not None:
                sketched[index] = sketch(tensors[index])
        return Prints(digests, sketched)


class _Gathered:
    """Small tensors of one dtype side by side in a buffer, each padded with zeros to whole rows.

    Digest and sketch have rows of different lengths, so a tensor begins at a multiple of the one
    and is copied once more for the other, at sampled steps only.
    """

    def __init__(self, members: list[int], tensors: Sequence[torch.Tensor]) -> None:
        self.members = members
        words_each = words(tensors[0]).numel() // tensors[0].numel()
        self._digest_rows = _Rows(tensors, ROW // words_each)
        self._weights = np.concatenate([row_multipliers(n) for n in self._digest_rows.counts])
        self._sketch_rows = _Rows(tensors, BUCKETS)
        window = signs()[int(sign_offsets(1)[0]) :]
        self._signs = torch.from_numpy(
            np.concatenate([window[: n * BUCKETS] for n in self._sketch_rows.counts])
        ).to(tensors[0].device)
        self._signed = torch.empty_like(self._signs)

    def digests(self, tensors: Sequence[torch.Tensor]) -> UInt64:
        flat = words(self._digest_rows.gather(tensors))
        sums = _row_sums_host(flat) if flat.device.type == "cpu" else _row_sums_device(flat)
        digests: UInt64 = np.add.reduceat(sums * self._weights, self._digest_rows.starts)
        return digests

    def sketches(self, tensors: Sequence[torch.Tensor]) -> Float64:
        torch.mul(self._sketch_rows.gather(tensors), self._signs, out=self._signed)
        rows = self._signed.cpu().numpy().reshape(-1, BUCKETS)
        sums: Float64 = np.add.reduceat(rows, self._sketch_rows.starts, axis=0)
        return sums


class _Rows:
    """A buffer in which each of some tensors has rows of its own.

    Attributes:
        counts: rows of each tensor.
        starts: first row of each tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], length: int) -> None:
        self.counts = [-(-t.numel() // length) for t in tensors]
        ends = np.cumsum(self.counts, dtype=np.int64)
        self.starts = ends - np.array(self.counts, dtype=np.int64)
        first = tensors[0]
        self._buffer = torch.zeros(int(ends[-1]) * length, dtype=first.dtype, device=first.device)
        self._views = [
            self._buffer[int(start) * length :][: t.numel()].view(t.shape)
            for start, t in zip(self.starts, tensors, strict=True)
        ]

    def gather(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        torch._foreach_copy_(self._views, [t.detach() for t in tensors])
        return self._buffer


def digest(tensor: torch.Tensor) -> int:
    """Digest of one tensor of any size, dtype and layout; 0 for an empty one."""
    flat = words(tensor)
    sums = _row_sums_host(flat) if flat.device.type == "cpu" else _row_sums_device(flat)
    return int((sums * row_multipliers(len(sums))).sum(dtype=np.uint64))


def _row_sums_host(flat: torch.Tensor) -> UInt64:
    # numpy's einsum multiplies and adds in one pass without a temporary array: twice the speed of
    # the same in torch, which has no integer dot product.
    array = flat.numpy()
    whole = len(array) // ROW
    sums = np.einsum("ij,j->i", array[: whole * ROW].reshape(whole, ROW), multipliers())
    if rest := len(array) - whole * ROW:
        last = np.einsum("j,j->", array[whole * ROW :], multipliers()[:rest])
        sums = np.append(sums, last)
    unsigned: UInt64 = sums.view(np.uint64)
    return unsigned


def _row_sums_device(flat: torch.Tensor) -> UInt64:
    weights = torch.from_numpy(multipliers()).to(flat.device)
    whole = flat.numel() // ROW
    rows = flat[: whole * ROW].view(whole, ROW)
    sums = [(rows[i : i + _BLOCK_ROWS] * weights).sum(1) for i in range(0, whole, _BLOCK_ROWS)]
    if rest := flat.numel() - whole * ROW:
        sums.append((flat[whole * ROW :] * weights[:rest]).sum().view(1))
    if not sums:
        return np.zeros(0, dtype=np.uint64)
    gathered: UInt64 = torch.cat(sums).cpu().numpy().view(np.uint64)
    return gathered


def sketch(tensor: torch.Tensor) -> Float64:
    """Sketch of one tensor of any size, dtype and layout, float64 [BUCKETS]."""
    flat = numbers(tensor)
    chunks = -(-flat.numel() // SKETCH_CHUNK)
    offsets = sign_offsets(chunks)
    host = flat.device.type == "cpu"
    table = None if host else torch.from_numpy(signs()).to(flat.device)
    total = np.zeros(BUCKETS)
    parts = []
    for chunk in range(chunks):
        values = flat[chunk * SKETCH_CHUNK : (chunk + 1) * SKETCH_CHUNK]
        start = int(offsets[chunk])
        if table is not None:
            padded = torch.zeros(SKETCH_CHUNK, dtype=torch.float64, device=flat.device)
            torch.mul(values, table[start : start + len(values)], out=padded[: len(values)])
            parts.append(padded.view(-1, BUCKETS).sum(0))
            continue
        if values.dtype not in (torch.float64, torch.float32) and values.is_floating_point():
            values = values.float()  # numpy has no bfloat16 and no 8-bit floats
        array = values.numpy()
        window = signs()[start : start + len(array)]
        whole = len(array) // BUCKETS * BUCKETS
        total += np.einsum(
            "rk,rk->k",
            array[:whole].reshape(-1, BUCKETS),
            window[:whole].reshape(-1, BUCKETS),
        )
        if rest := len(array) - whole:
            total[:rest] += array[whole:] * window[whole:]
    if parts:
        total = torch.stack(parts).sum(0).cpu().numpy()
    return total
