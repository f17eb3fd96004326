"""Files of safetensors, and folders in which an index says which file holds which tensor."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rankscope.agent.checkpoints.errors import Unreadable
from rankscope.agent.checkpoints.source import Part, Source, StoredTensor, inside
from rankscope.agent.checkpoints.torch_file import add_all

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
# As their headers name them, and as torch does.
_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"C{bits}": f"complex{bits}" for bits in (64, 128)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def open_safetensors(path: Path, *, file: str = "") -> Source:
    """A file of safetensors; its tensors are read one by one.

    Args:
        path: the file.
        file: its name, where it is one of several that are a whole.

    Raises:
        Unreadable: it is damaged, or the package safetensors is not installed.
    """
    opened, error = _open(path)
    source = Source("safetensors")
    for key, text in (opened.metadata() or {}).items():
        # Says which framework wrote the file, and nothing of the checkpoint.
        if key != "format":
            source.values[f"__metadata__.{key}"] = text
    for name in opened.keys():
        header = opened.get_slice(name)
        shape = tuple(header.get_shape())
        dtype = _DTYPES.get(header.get_dtype(), "")
        if not hasattr(torch, dtype or "-"):
            source.unread[name] = f"this torch has no type {header.get_dtype()}"
            continue
        parts = (Part(file, (0,) * len(shape), shape),) if file else ()
        source.tensors[name] = StoredTensor(
            shape, dtype, parts, partial(_read, opened, name, path, error)
        )
    return source


def open_indexed(index: Path) -> Source:
    """The files that an index of Transformers names, `*.safetensors` or `*.bin`, as a whole.

    Raises:
        Unreadable: the index or one of the files is missing or damaged, or does not hold what the
            index says.
    """
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = {str(name): str(file) for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{index}: no index with a weight_map ({error!r})") from error
    source = Source(f"index of {len(set(named.values()))} files")
    found: dict[str, set[str]] = {}
    for file in sorted(set(named.values())):
        path = Path(inside(str(index.parent), file))
        if not path.is_file():
            raise Unreadable(f"{path}: {index.name} names this file, and it is not there")
        if file.endswith(SUFFIX):
            part = open_safetensors(path, file=file)
        else:
            part = Source("torch.save")
            add_all(part, path, file=file)
        found[file] = set(part.names)
        source.tensors |= part.tensors
        source.values |= part.values
        source.unread |= part.unread
    for name, file in named.items():
        if name not in found[file]:
            raise Unreadable(
                f"{index.parent / file}: {index.name} says that it holds {name}, and it does not"
            )
    return source


def _open(path: Path) -> tuple[Any, type[Exception]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise Unreadable(
            f"{path}: the package safetensors is not installed.\n"
            "Install it with: pip install 'rankscope[safetensors]'"
        ) from error
    try:
        return safe_open(str(path), framework="pt", device="cpu"), SafetensorError
    except (SafetensorError, OSError) as error:
        raise Unreadable(
            f"{path}: damaged, cut off, or no file of safetensors ({error}); copy or save it again"
        ) from error


def _read(opened: Any, name: str, path: Path, error: type[Exception]) -> torch.Tensor:
    try:
        tensor: torch.Tensor = opened.get_tensor(name)
    except (error, OSError) as problem:
        raise Unreadable(f"{path}: {name} cannot be read ({problem})") from problem
    return tensor
