"""Digests and sketches of a fixed list of tensors, with everything that can be prepared prepared.

Digest of a tensor with words w (its bits as signed integers of at most 32 bits, in logical order):

    D = sum_c q_c * sum_j w[c, j] * r_j   (mod 2^64)

over chunks c of 2^15 words, with odd random 64-bit numbers r and q (multilinear hashing, Lemire &
Kaser 2014, "Strongly universal string hashing is fast"). Integer sums commute, so D depends neither
on threads nor on chunking nor on the device. Words of at most 32 bits leave the upper half of each
product random: with 64-bit words two flipped sign bits would cancel.

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
    CHUNK,
    SKETCH_CHUNK,
    chunk_multipliers,
    multipliers,
    sign_offsets,
    signs,
    tensor_key,
)
from rankscope.agent.wire import Float64, UInt64

_WORD_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}

# Tensors up to this many elements are gathered into one buffer and treated in a few calls; larger
# ones are read where they lie. Beyond it the copy costs more than the calls it saves.
_SMALL = CHUNK // 4
# Elements a larger tensor is read in at a time: bounds the temporary memory to about 16 MiB.
_BLOCK_CHUNKS = 32


@dataclass(frozen=True, slots=True)
class Prints:
    """Fingerprints of the tensors of a plan at one moment.

    Attributes:
        digests: uint64 [T].
        sketches: float64 [T, BUCKETS], or None where only digests were asked for.
    """

    digests: UInt64
    sketches: Float64 | None


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

    @torch.no_grad()
    def compute(self, tensors: Sequence[torch.Tensor], *, sketches: bool) -> Prints:
        """Fingerprints of the tensors as they are now; waits for the device they are on."""
        digests = np.zeros(len(self.names), dtype=np.uint64)
        sketched = np.zeros((len(self.names), BUCKETS)) if sketches else None
        for group in self._groups:
            group.gather([tensors[i] for i in group.members])
            digests[group.members] = group.digests()
            if sketched is not None:
                sketched[group.members] = group.sketches()
        for index in self._large:
            digests[index] = digest(tensors[index])
            if sketched is not None:
                sketched[index] = sketch(tensors[index])
        return Prints(digests, sketched)


class _Gathered:
    """Small tensors of one dtype side by side in a buffer, each padded to whole rows of buckets."""

    def __init__(self, members: list[int], tensors: Sequence[torch.Tensor]) -> None:
        self.members = members
        first = tensors[0]
        rows = [-(-t.numel() // BUCKETS) for t in tensors]
        starts = np.concatenate([[0], np.cumsum(rows)])
        self._row_starts = starts[:-1]
        buffer = torch.zeros(int(starts[-1]) * BUCKETS, dtype=first.dtype, device=first.device)
        self._views = [
            buffer[int(s) * BUCKETS :][: t.numel()].view(t.shape)
            for s, t in zip(starts, tensors, strict=False)
        ]
        self._numbers = buffer
        self._words = buffer.view(_WORD_TYPES[buffer.element_size()])
        scale = self._words.numel() // buffer.numel()  # words an element
        # The rows' padding is zero and may lie past the last multiplier: repeated, none is missing.
        table = np.concatenate([multipliers(), multipliers()])
        weights = np.concatenate([table[: n * BUCKETS * scale] for n in rows])
        self._multipliers = torch.from_numpy(weights).to(first.device)
        self._products = torch.empty_like(self._multipliers)
        window = signs()[int(sign_offsets(1)[0]) :]
        self._signs = torch.from_numpy(np.concatenate([window[: n * BUCKETS] for n in rows])).to(
            first.device
        )
        self._signed = torch.empty_like(self._signs)
        self._words_row = BUCKETS * scale

    def gather(self, tensors: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self._views, [t.detach() for t in tensors])

    def digests(self) -> UInt64:
        torch.mul(self._words, self._multipliers, out=self._products)
        products = self._products.cpu().numpy().view(np.uint64)
        starts = self._row_starts * self._words_row
        sums: UInt64 = np.add.reduceat(products, starts)
        return sums

    def sketches(self) -> Float64:
        torch.mul(self._numbers, self._signs, out=self._signed)
        rows = self._signed.cpu().numpy().reshape(-1, BUCKETS)
        sums: Float64 = np.add.reduceat(rows, self._row_starts, axis=0)
        return sums


def digest(tensor: torch.Tensor) -> int:
    """Digest of one tensor of any size, dtype and layout; 0 for an empty one."""
    flat = words(tensor)
    chunks = -(-flat.numel() // CHUNK)
    sums = _chunk_digests_host(flat) if flat.device.type == "cpu" else _chunk_digests_device(flat)
    return int((sums * chunk_multipliers(chunks).view(np.uint64)).sum(dtype=np.uint64))


def _chunk_digests_host(flat: torch.Tensor) -> UInt64:
    # numpy's einsum multiplies and adds in one pass without a temporary array: twice the speed of
    # the same in torch, which has no integer dot product.
    array = flat.numpy()
    whole = len(array) // CHUNK
    sums = np.einsum("cj,j->c", array[: whole * CHUNK].reshape(whole, CHUNK), multipliers())
    if rest := len(array) - whole * CHUNK:
        last = np.einsum("j,j->", array[whole * CHUNK :], multipliers()[:rest])
        sums = np.append(sums, last)
    unsigned: UInt64 = sums.view(np.uint64)
    return unsigned


def _chunk_digests_device(flat: torch.Tensor) -> UInt64:
    weights = torch.from_numpy(multipliers()).to(flat.device)
    whole = flat.numel() // CHUNK
    rows = flat[: whole * CHUNK].view(whole, CHUNK)
    sums = [(rows[i : i + _BLOCK_CHUNKS] * weights).sum(1) for i in range(0, whole, _BLOCK_CHUNKS)]
    if rest := flat.numel() - whole * CHUNK:
        sums.append((flat[whole * CHUNK :] * weights[:rest]).sum().view(1))
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
