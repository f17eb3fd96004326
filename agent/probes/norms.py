"""Norms of tensors of any kind, and what a gradient that is stored sparsely stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch

from rankscope.agent.model.facts import held
from rankscope.agent.wire import Float64

# Up to this many elements a tensor is copied where one has to be kept for a while, up to this many
# of all tensors together (16 MiB of float32).
SMALL = 1 << 16
ALL_SMALL = 1 << 22

# A sparse gradient is written out for a moment where it has to be; not beyond this many elements.
_MAX_WRITTEN_OUT = 16 * 2**20
_LARGEST = float(np.finfo(np.float32).max)
# What float32 holds without loss.
_NARROW = frozenset((torch.float32, torch.bfloat16, torch.float16))
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_STRIDED = frozenset((torch.strided,))
_dtype, _layout, _is_cpu = attrgetter("dtype"), attrgetter("layout"), attrgetter("is_cpu")


def small_enough(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Positions of the tensors that may be copied."""
    rows, left = [], ALL_SMALL
    for row, tensor in enumerate(tensors):
        size = tensor.numel()
        if size <= SMALL and size <= left:
            rows.append(row)
            left -= size
    return rows


def tensor_norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """L2 norm of each tensor, at least float32, where the tensor is.

    Overflows where a sum of squares does in that type, as `nn.utils.clip_grad_norm_` does.
    """
    if _NARROW.issuperset([t.dtype for t in tensors]):
        return list(torch._foreach_norm(tensors, 2.0, torch.float32)) if tensors else []
    norms: list[torch.Tensor] = []
    for tensor in tensors:
        kind = tensor.dtype
        if kind not in _NARROW and kind is not torch.float64 and not tensor.is_complex():
            tensor = tensor.float()  # 8-bit floats have no norm
        wide = kind in (torch.float64, torch.complex128, torch.complex64)
        norms.append(torch.linalg.vector_norm(tensor, dtype=None if wide else torch.float32))
    return norms


def lie_here(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether all tensors can be read by the kernel as they are, which then knows their norms.

    It adds squares up in float64 while it reads them for their fingerprints; torch, in float32, is
    wrong by 1e-6 for a tensor of 2^18 elements, by 1e-4 for one of 2^22.
    """
    first = next((tensor for tensor in tensors if tensor is not None), None)
    if first is not None and not first.is_cpu:
        return False  # all of a model are where the first one is, as a rule
    there = [tensor for tensor in tensors if tensor is not None]
    # Loops that are not Python's: what is asked of every gradient is asked often.
    return (
        _PLAIN.issuperset(map(type, there))
        and _NARROW.issuperset(map(_dtype, there))
        and _STRIDED.issuperset(map(_layout, there))
        and all(map(_is_cpu, there))
        and all(map(torch.Tensor.is_contiguous, there))
    )


def norms_of(squares: Float64) -> torch.Tensor:
    """Norms from sums of squares, float32 as `tensor_norms` has them: they overflow where it does.

    They do not underflow: where a tensor is not all zeros its norm is not zero.

    Args:
        squares: float64 [n].
    """
    norms = np.sqrt(squares)
    norms[squares > _LARGEST] = math.inf
    with np.errstate(under="ignore"):
        return torch.from_numpy(norms.astype(np.float32))


def length_of(squares: Float64) -> float:
    """Norm of all tensors together from sums of squares.

    As with `norms_of` it overflows as in float32, and does not underflow.

    Args:
        squares: float64 [n].
    """
    total = float(squares.sum())
    return math.inf if total > _LARGEST else math.sqrt(total)


def gathered(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one element side by side, [n]; where they are on several devices, on one."""
    return torch.stack(on_one_device(numbers))


def on_one_device(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors themselves, or copies where they are on several devices."""
    places = {t.device for t in tensors}
    if len(places) > 1:
        # From the host to a device nothing has to wait; the other way it would.
        place = next(p for p in places if p.type != "cpu")
        return [t.to(place, non_blocking=True) for t in tensors]
    return list(tensors)


def stored(gradient: torch.Tensor) -> torch.Tensor | None:
    """A dense tensor with the norm of what this rank holds of a gradient.

    None for a large sparse one on a device: to add up what it stores twice would wait.
    """
    if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
        return gradient
    local = held(gradient)
    if local.layout is torch.strided:
        return local
    if local.layout is not torch.sparse_coo:
        return local.values()
    if local.is_coalesced() or local.device.type == "cpu":
        return local.coalesce().values()
    return written_out(local)


def written_out(gradient: torch.Tensor) -> torch.Tensor | None:
    """What this rank holds of a gradient as a dense tensor of the parameter's shape.

    None for a sparse one that is too large for that, or of a layout nobody uses for gradients.
    """
    if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
        return gradient
    local = held(gradient)
    if local.layout is torch.strided:
        return local
    if local.layout is not torch.sparse_coo or local.numel() > _MAX_WRITTEN_OUT:
        return None
    dense = torch.zeros(local.shape, dtype=local.dtype, device=local.device)
    # Not `to_dense`: on CUDA that may sort the indices first, and wait for how many there are.
    sparse = local.sparse_dim()
    indices = local._indices()
    rows = indices[0]
    for dimension in range(1, sparse):
        rows = rows * local.shape[dimension] + indices[dimension]
    dense.view(-1, *local.shape[sparse:]).index_add_(0, rows, local._values())
    return dense
