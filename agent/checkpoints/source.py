"""What a checkpoint holds, by dotted names: tensors that are read when asked for, and values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rankscope.agent.checkpoints.arrays import plain
from rankscope.agent.checkpoints.errors import Unreadable
from rankscope.agent.model.facts import held

# Most leaves of one value that share containers: a small file can hold a list twice in a list that
# another holds twice, and so on.
_MOST_SHARED = 1_000_000
# Kinds of elements of numpy that torch has, but for the long doubles.
_KINDS, _LONG_DOUBLES = "biufc", "gG"


@dataclass(frozen=True, slots=True)
class Part:
    """Where elements of a tensor are stored.

    Attributes:
        file: the file's path inside the checkpoint.
        begin: index of the first element, one number a dimension.
        size: extent in each dimension.
    """

    file: str
    begin: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, not read yet.

    Attributes:
        shape: its extent in each dimension.
        dtype: type of its elements, without `torch.`.
        parts: the files that hold it; empty where there is one file alone.
        read: reads it whole, onto the CPU.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]
    read: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        """Size of its elements."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.Size(self.shape).numel() * dtype.itemsize


@dataclass(slots=True)
class Source:
    """One file, or one folder that is a whole.

    Attributes:
        format: how it is stored, in words.
        tensors: by dotted name.
        values: numbers, texts and whatever else is no tensor, by dotted name.
        unread: dotted name -> why it cannot be compared.
        value_files: of values, dotted name -> the file, where the source has several.
    """

    format: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    value_files: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Of all that it holds, in its order."""
        return [*self.tensors, *self.values, *self.unread]

    def without(self, ignored: Callable[[str], bool]) -> Source:
        """The same without the names that are to be ignored."""
        return Source(
            self.format,
            {name: tensor for name, tensor in self.tensors.items() if not ignored(name)},
            {name: value for name, value in self.values.items() if not ignored(name)},
            {name: why for name, why in self.unread.items() if not ignored(name)},
            self.value_files,
        )

    def add(self, prefix: str, value: Any, file: str = "") -> None:
        """Adds all that a nested value holds, under dotted names.

        Args:
            prefix: name of the value; empty: that of the whole.
            value: dicts, lists and tuples are gone into; tensors, arrays and the rest are leaves.
            file: the file that it was read from, where the source has several.

        Raises:
            Unreadable: it holds the same containers so often that to name all would not end.
        """
        for name, leaf in _Leaves().of(prefix, value):
            self._add_leaf(self._free(name), leaf, file)

    def _add_leaf(self, name: str, leaf: Any, file: str) -> None:
        leaf = plain(leaf)
        if isinstance(leaf, np.ndarray):
            if leaf.dtype.kind not in _KINDS or leaf.dtype.char in _LONG_DOUBLES:
                # An empty array can have any number of rows.
                self.values[name] = leaf.tolist() if leaf.size else f"empty, {leaf.shape}"
                return
            native = leaf.dtype.newbyteorder("=")
            leaf = torch.from_numpy(np.array(leaf, dtype=native, order="C"))
        if not isinstance(leaf, torch.Tensor):
            self.values[name] = leaf
            if file:
                self.value_files[name] = file
            return
        if reason := _unfit(leaf):
            self.unread[name] = reason
            return
        # Of a distributed tensor that a rank has saved by itself, the file has the rank's part.
        leaf = held(leaf)
        parts = (Part(file, (0,) * leaf.dim(), tuple(leaf.shape)),) if file else ()
        dtype = str(leaf.dtype).removeprefix("torch.")
        self.tensors[name] = StoredTensor(tuple(leaf.shape), dtype, parts, lambda: leaf)

    def _free(self, name: str) -> str:
        """A name that nothing has yet: `{"a.b": 1, "a": {"b": 2}}` has one name twice."""
        taken: tuple[Mapping[str, Any], ...] = (self.tensors, self.values, self.unread)
        free, number = name, 1
        while any(free in one for one in taken):
            number += 1
            free = f"{name}#{number}"
        return free


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
            Unreadable: there are too many that were met before.
        """
        if again:
            self._shared += 1
            if self._shared > _MOST_SHARED:
                raise Unreadable(
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


def _unfit(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be compared; empty where it can."""
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if tensor.is_meta:
        return "a tensor without data (meta)"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})"
    return ""


def inside(folder: str, name: str) -> str:
    """Path of a file that a checkpoint's index names.

    Raises:
        Unreadable: it leads out of the folder.
    """
    path = os.path.normpath(os.path.join(folder, name))
    if not os.path.abspath(path).startswith(os.path.join(os.path.abspath(folder), "")):
        raise Unreadable(f"{folder}: its index names {name!r}, which is not in the folder")
    return path
