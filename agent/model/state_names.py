"""Names of what a state holds (that of a model, an optimizer, a checkpoint of both)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# What DDP, torch.compile, FSDP and activation checkpointing put between the names of modules.
_WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))

# Most leaves of one value that share containers: a small file can hold a list twice in a list that
# another holds twice, and so on.
_MOST_SHARED = 1_000_000


class TooManyShared(Exception):
    """A state holds the same containers so often that to name all of it would not end."""


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a nested value holds, by dotted names.

    Args:
        name: of the value; empty: that of the whole.
        value: dicts, lists and tuples are gone into; tensors, arrays and the rest are leaves.

    Raises:
        TooManyShared: it has no end.
    """
    return _Leaves().of(name, value)


def unwrapped(name: str) -> str:
    """A dotted name without what wrappers put into it."""
    kept = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(kept) or name


def aligned(names: Sequence[Sequence[str]]) -> Iterator[tuple[str, tuple[str | None, ...]]]:
    """Name by name, what each checkpoint calls it; None where it does not have it.

    Equal names belong together. Of those that are left, the ones that are equal but for wrappers'
    parts do, where that leaves no choice.

    Args:
        names: of each checkpoint, in its order.
    """
    everywhere = set(names[0]).intersection(*names[1:])
    keyed = [_keyed(own, everywhere) for own in names]
    for key in dict.fromkeys(key for own in keyed for key in own):
        yield key, tuple(own.get(key) for own in keyed)


def _keyed(names: Sequence[str], everywhere: set[str]) -> dict[str, str]:
    """Common name -> the checkpoint's own."""
    left = Counter(unwrapped(name) for name in names if name not in everywhere)
    keyed = {}
    for name in names:
        plain = unwrapped(name)
        is_clear = name not in everywhere and plain not in everywhere and left[plain] == 1
        keyed[plain if is_clear else name] = name
    return keyed


class _Leaves:
    """What a nested value holds, by dotted names."""

    def __init__(self) -> None:
        # The value holds these, so that no other has the same id meanwhile.
        self._entered: set[int] = set()
        self._shared = 0

    def of(
        self, name: str, value: Any, above: tuple[int, ...] = (), *, again: bool = False
    ) -> Iterator[tuple[str, Any]]:
        """Name and value of each leaf.

        Args:
            name: of the value.
            value: what is gone into.
            above: ids of the containers that it is in.
            again: whether one of these was gone into before, elsewhere.

        Raises:
            TooManyShared: there are too many that were met before.
        """
        if again:
            self._shared += 1
            if self._shared > _MOST_SHARED:
                raise TooManyShared(
                    "it holds the same lists or dicts again and again, more than "
                    f"{_MOST_SHARED:,} values in all"
                )
        if isinstance(value, dict):
            inner = [(str(key), one) for key, one in value.items()]
        elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            inner = [(str(place), one) for place, one in enumerate(value)]
        else:
            yield name, value
            return
        if id(value) in above:
            yield name, "(itself)"
            return
        again = again or id(value) in self._entered
        self._entered.add(id(value))
        if not inner:
            # That there is nothing is to be compared, too.
            yield name, {} if isinstance(value, dict) else []
        for key, one in inner:
            path = f"{name}.{key}" if name else key
            yield from self.of(path, one, (*above, id(value)), again=again)


def unfit(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be compared; empty where it can."""
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if tensor.is_meta:
        return "a tensor without data (meta)"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})"
    return ""
