"""What a checkpoint holds, by dotted names: tensors that are read when asked for, and values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rankscope.agent.checkpoints.arrays import plain
from rankscope.agent.checkpoints.errors import Unreadable
from rankscope.agent.model.facts import held
from rankscope.agent.model.state_names import TooManyShared, leaves, unfit

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
        digest: of its bits, where that alone is kept; else None.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]
    read: Callable[[], torch.Tensor]
    digest: int | None = None

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
        digests_alone: it has no values, and of tensors the digests alone.
    """

    format: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    value_files: dict[str, str] = field(default_factory=dict)
    digests_alone: bool = False

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
            self.digests_alone,
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
        try:
            for name, leaf in leaves(prefix, value):
                self._add_leaf(self._free(name), leaf, file)
        except TooManyShared as error:
            raise Unreadable(str(error)) from error

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
        if reason := unfit(leaf):
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


def inside(folder: str, name: str) -> str:
    """Path of a file that a checkpoint's index names.

    Raises:
        Unreadable: it leads out of the folder.
    """
    path = os.path.normpath(os.path.join(folder, name))
    if not os.path.abspath(path).startswith(os.path.join(os.path.abspath(folder), "")):
        raise Unreadable(f"{folder}: its index names {name!r}, which is not in the folder")
    return path
