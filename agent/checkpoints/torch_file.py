"""Files of `torch.save`, read without running code from them."""

from __future__ import annotations

import pickle
import re
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from rankscope.agent.checkpoints.arrays import readable
from rankscope.agent.checkpoints.errors import DAMAGED, Unreadable
from rankscope.agent.checkpoints.source import Source

with suppress(ImportError):
    # Makes distributed tensors known to `weights_only`; torch 2.4 has none of this name.
    import torch.distributed.tensor

_ZIP = b"PK\x03\x04"
# The first words of `torch.save` before torch 1.6: a pickled number.
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


def is_torch_file(path: Path) -> bool:
    """Whether a file begins as those of `torch.save` do."""
    with path.open("rb") as file:
        head = file.read(512)
    # The first member of the archive, which is there in one that is cut off, too.
    return (head.startswith(_ZIP) and b"/data.pkl" in head) or head.startswith(_LEGACY)


def load(path: Path) -> Any:
    """What `torch.save` has written, on the CPU; tensors are mapped into memory where they can be.

    Raises:
        Unreadable: it is not whole, no such file, or would run code.
    """
    with path.open("rb") as file:
        zipped = file.read(len(_ZIP)) == _ZIP
    if zipped and not zipfile.is_zipfile(path):
        raise Unreadable(
            f"{path}: the file is cut off: its end, where the table of contents stands, is "
            "missing; copy or save it again"
        )
    try:
        return load_plain(path, mmap=zipped)
    except Unreadable as error:
        raise Unreadable(f"{path}: {error}") from error
    except pickle.UnpicklingError as error:
        raise Unreadable(f"{path}: {_refused(str(error))}") from error
    except DAMAGED as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unreadable(
            f"{path}: damaged, cut off, or no file of torch.save ({reason})"
        ) from error


def load_plain(file: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """Tensors and plain values of a file, without running code from it: as `torch.load` raises."""
    with readable():
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def open_torch_file(path: Path) -> Source:
    """A file of `torch.save`.

    Raises:
        Unreadable: as `load` and `Source.add`.
    """
    source = Source("torch.save")
    add_all(source, path)
    return source


def add_all(source: Source, path: Path, *, file: str = "") -> None:
    """Adds to a source what a file of `torch.save` holds.

    Args:
        source: what gets it.
        path: the file.
        file: its name, where the source has several.

    Raises:
        Unreadable: as `load` and `Source.add`.
    """
    loaded = load(path)
    try:
        source.add("", loaded, file)
    except Unreadable as error:
        raise Unreadable(f"{path}: {error}") from error


def _refused(error: str) -> str:
    """Why `weights_only` has refused a file, in a sentence."""
    found = re.search(r"GLOBAL ([\w.]+)|(?:Unsupported global|class) ([\w.]+)", error)
    if found is None:
        return (
            "no file of torch.save, or damaged: nothing was loaded, as reading it as a pickle "
            "could run code"
        )
    name = found[1] or found[2]
    return (
        f"not loaded: it holds {name}, and to make that would run code from the file. Save a "
        "state_dict of tensors and plain values instead"
    )
