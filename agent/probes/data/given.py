"""The tensors in what a model is given, however they are packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

# How deep they are searched, how many count, and in how many things all of them and the first one
# are searched: a model may be given texts, or lists of numbers by the million.
_DEEPEST = 6
_MOST = 1000
_SEARCHED, _SEARCHED_FOR_FIRST = 4096, 256


def tensors_in(*given: Any) -> Iterator[torch.Tensor]:
    """The tensors, the first 1,000 of them, in order."""
    return islice(_found(given, _DEEPEST, [_SEARCHED]), _MOST)


def is_received(args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether what a model is given is no data: a leaf that a gradient is wanted of.

    A stage of a pipeline asks for the gradient of what it has received, to send it back. What a
    module of the same process has computed is no leaf.
    """
    first = args[0] if args else None
    if type(first) is not torch.Tensor:
        first = next(_found((args, kwargs), _DEEPEST, [_SEARCHED_FOR_FIRST]), None)
    return first is not None and first.requires_grad and first.is_leaf


def batch_size(args: tuple[Any, ...], kwargs: Any) -> int:
    """Samples in a batch: length of the first dimension of the first tensor given to the model."""
    first = args[0] if args else None
    if type(first) is not torch.Tensor:
        first = next(_found((args, kwargs), _DEEPEST, [_SEARCHED_FOR_FIRST]), None)
    return 0 if first is None else rows_of(first)


def rows_of(tensor: torch.Tensor) -> int:
    """Length of the first dimension, which a tensor of tensors has, too; 1 without dimensions."""
    try:
        shape = tensor.shape  # had faster than by asking for the number of dimensions first
    except RuntimeError:  # nested tensors have none
        return int(tensor.size(0))
    return int(shape[0]) if shape else 1


def sizes_of(loader: Any) -> tuple[int, int, int]:
    """Samples in a batch of a DataLoader, its batches and workers; zeros for what is not known."""
    size, workers = (getattr(loader, name, None) for name in ("batch_size", "num_workers"))
    size, workers = (n if isinstance(n, int) else 0 for n in (size, workers))
    try:
        return (size, len(loader), workers) if size else (0, 0, workers)
    except TypeError:  # its data come as a stream
        return 0, 0, workers


def rows_stored(tensor: torch.Tensor) -> int:
    """As many rows as this one has fit into the memory that it is a view of."""
    whole = tensor.numel() * tensor.element_size()
    return rows_of(tensor) * tensor.untyped_storage().nbytes() // whole if whole else 0


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether its elements are whole numbers: tokens, numbers of users, pixels of a file."""
    dtype = tensor.dtype
    real = dtype.is_floating_point or dtype.is_complex or tensor.is_quantized
    return not (real or dtype is torch.bool)


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which squares are summed up: those of half precision overflow."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _found(value: Any, depth: int, left: list[int]) -> Iterator[torch.Tensor]:
    left[0] -= 1
    if isinstance(value, torch.Tensor):
        yield value
        return
    if not depth:
        return
    items: Any = ()
    if isinstance(value, list | tuple):
        items = value
    elif isinstance(value, Mapping):
        items = value.values()
    elif hasattr(value, "__dataclass_fields__"):
        items = vars(value).values()
    for item in items:
        if left[0] <= 0:
            return
        yield from _found(item, depth - 1, left)
