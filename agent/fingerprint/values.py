"""What the elements of a tensor are, as bytes and as numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

# The numbers of `enum kind` in kernel.c.
_KINDS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.bool: 5,
    torch.int16: 6,
    torch.uint16: 7,
    torch.int32: 8,
    torch.uint32: 9,
    torch.int64: 10,
    torch.uint64: 11,
}
_LOOKUP = 12
# Floats of one byte, each with a table of the numbers that its bytes stand for. Any other type
# (packed pairs of 4-bit numbers) is taken for bytes.
_FLOATS = tuple(
    getattr(torch, name)
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)


@functools.cache
def lookup() -> npt.NDArray[np.float32]:
    """The number that each byte stands for in each float of one byte, float32 [types, 256]."""
    octets = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    return torch.stack([octets.view(dtype).float() for dtype in _FLOATS]).numpy()


def kind_of(dtype: torch.dtype) -> int:
    """How the kernel reads elements of a real type."""
    if dtype in _FLOATS:
        return _LOOKUP + _FLOATS.index(dtype)
    return _KINDS.get(dtype, _KINDS[torch.uint8])


def lookup_row(dtype: torch.dtype) -> int | None:
    """The row of `lookup` by which a real type is read; None where it is not."""
    return _FLOATS.index(dtype) if dtype in _FLOATS else None


def as_numbers(values: torch.Tensor) -> torch.Tensor:
    """Flat contiguous values in a type that torch can add up: bytes, where it is unknown to us."""
    return values if values.dtype in _KINDS else values.view(torch.uint8)


def real(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """The type of the numbers of which an element consists, and how many they are."""
    if dtype.is_complex:
        return dtype.to_real(), 2
    return dtype, 1


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor in logical order, real and contiguous; copied only if it must be."""
    values = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if values.stride() != (1,):
        # `contiguous` does nothing for one element, whatever its stride, and `view` refuses it.
        values = values.clone(memory_format=torch.contiguous_format)
    return torch.view_as_real(values).reshape(-1) if values.is_complex() else values


def placed(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The numbers of an array on a device; the host does not wait until they are there."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    # Memory that is not pinned is copied while the host waits.
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def lies_as_it_reads(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor holds its elements in logical order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def all_lie_as_they_read(tensors: Sequence[torch.Tensor]) -> bool:
    """The same of all of them, in half the time: asked in a loop that is not Python's."""
    return (
        all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_conj, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
    )
