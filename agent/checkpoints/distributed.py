"""Folders of torch.distributed.checkpoint, read without a process group and without running code.

The metadata are a plain pickle. They are read by an unpickler that knows the few classes of plain
data that torch puts there, and no other; the tensors and values are files of `torch.save`.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from rankscope.agent.checkpoints.errors import DAMAGED, Unreadable
from rankscope.agent.checkpoints.source import Part, Source, StoredTensor, inside
from rankscope.agent.checkpoints.torch_file import load_plain

METADATA = ".metadata"
SHARD_SUFFIX = ".distcp"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype))},
    "collections": {"OrderedDict"},
}


class _Stored(Protocol):
    """What torch calls `_StorageInfo`: some bytes of a file."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any


class _PlainData(pickle.Unpickler):
    """Makes what metadata are made of, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of a name that stands in the pickle."""
        if module.startswith("pathlib") and name.endswith("Path"):
            # Where the checkpoint was saved; a path of Windows cannot be made elsewhere.
            return pathlib.PurePath
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which metadata do not")
        return super().find_class(module, name)


def open_distributed(folder: Path, metadata: Metadata) -> Source:
    """A folder that torch.distributed.checkpoint has saved.

    Args:
        folder: of the metadata.
        metadata: its, as read by `read_metadata`.

    Raises:
        Unreadable: a file that the metadata name is missing, damaged, or would run code.
    """
    stored: dict[MetadataIndex, _Stored] = metadata.storage_data
    ends: dict[str, int] = {}
    for one in stored.values():
        ends[one.relative_path] = max(ends.get(one.relative_path, 0), one.offset + one.length)
    for file, end in sorted(ends.items()):
        _check_length(folder, file, end)
    source = Source("torch.distributed.checkpoint")
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            try:
                one = stored[MetadataIndex(name)]
                source.add(name, _load(folder, one), one.relative_path)
            except Unreadable as error:
                source.unread[name] = str(error)
            continue
        parts, files = [], []
        for chunk in described.chunks:
            one = stored[MetadataIndex(name, chunk.offsets)]
            parts.append(Part(one.relative_path, tuple(chunk.offsets), tuple(chunk.sizes)))
            files.append(one)
        shape, dtype = tuple(described.size), described.properties.dtype
        if sum(torch.Size(p.size).numel() for p in parts) != described.size.numel():
            source.unread[name] = "its shards do not hold all of it"
            continue
        source.tensors[name] = StoredTensor(
            shape,
            str(dtype).removeprefix("torch."),
            tuple(parts),
            partial(_assemble, folder, name, shape, dtype, parts, files),
        )
    return source


def read_metadata(folder: Path) -> Metadata:
    """What a folder's metadata say.

    Raises:
        Unreadable: they are damaged, or would run code.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _PlainData(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError("it holds something else")
        every = [i for n in metadata.state_dict_metadata for i in _indices(metadata, n)]
        if missing := [i.fqn for i in every if i not in metadata.storage_data]:
            raise pickle.UnpicklingError(f"it does not say where {missing[0]} is stored")
    except DAMAGED as error:
        raise Unreadable(
            f"{path}: no metadata of torch.distributed.checkpoint that can be read without running "
            f"code from them ({error})"
        ) from error
    return metadata


def files_of(folder: Path, metadata: Metadata) -> set[str]:
    """Paths of the files that metadata name."""
    named = {str(one.relative_path) for one in metadata.storage_data.values()}
    return {os.path.normpath(folder / name) for name in named}


def _indices(metadata: Metadata, name: str) -> list[MetadataIndex]:
    described = metadata.state_dict_metadata[name]
    if isinstance(described, TensorStorageMetadata):
        return [MetadataIndex(name, chunk.offsets) for chunk in described.chunks]
    return [MetadataIndex(name)]


def _check_length(folder: Path, file: str, needed: int) -> None:
    path = Path(inside(str(folder), file))
    if not path.is_file():
        raise Unreadable(f"{path}: {METADATA} names this file, and it is not there")
    if (there := path.stat().st_size) < needed:
        raise Unreadable(
            f"{path}: the file is cut off: {there} bytes, where {METADATA} names {needed}; copy or "
            "save it again"
        )


def _load(folder: Path, stored: _Stored) -> Any:
    path = Path(inside(str(folder), stored.relative_path))
    if getattr(stored, "transform_descriptors", None):
        raise Unreadable(
            f"{path}: stored through {', '.join(stored.transform_descriptors)}, which is not read "
            "here; save it again without"
        )
    with path.open("rb") as file:
        file.seek(stored.offset)
        octets = io.BytesIO(file.read(stored.length))
    try:
        return load_plain(octets)
    except Unreadable as error:
        raise Unreadable(f"{path}: at byte {stored.offset}: {error}") from error
    except DAMAGED as error:
        reason = " ".join(str(error).split())[:200]
        raise Unreadable(
            f"{path}: damaged at byte {stored.offset}, or not to be read without running code "
            f"({reason})"
        ) from error


def _assemble(
    folder: Path,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    parts: list[Part],
    files: list[_Stored],
) -> torch.Tensor:
    """A tensor whole, from its shards."""
    whole: torch.Tensor | None = None
    for part, stored in zip(parts, files, strict=True):
        loaded = _load(folder, stored)
        if (
            not isinstance(loaded, torch.Tensor)
            or tuple(loaded.shape) != part.size
            or loaded.dtype != dtype
        ):
            path = folder / stored.relative_path
            raise Unreadable(f"{path}: at byte {stored.offset} there is something else than {name}")
        if part.size == shape:
            return loaded
        if whole is None:
            whole = torch.empty(shape, dtype=dtype)
        place = tuple(slice(b, b + s) for b, s in zip(part.begin, part.size, strict=True))
        whole[place].copy_(loaded)
    return whole if whole is not None else torch.empty(shape, dtype=dtype)
