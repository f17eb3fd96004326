"""Files of `torch.save`, read without running code from them."""

from __future__ import annotations

import codecs
import pickle
import re
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankscope.agent.checkpoints.source import DAMAGED, Source, Unreadable

with suppress(ImportError):
    # Makes distributed tensors known to `weights_only`; torch 2.4 has none of this name.
    import torch.distributed.tensor

_ZIP = b"PK\x03\x04"
# The first words of `torch.save` before torch 1.6: a pickled number.
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


def _numpy_types() -> list[Any]:
    """What pickled arrays and numbers of numpy are made of: constructors of plain data.

    The states of random generators are such; Transformers allows the same.
    """
    core = getattr(np, "_core", None) or np.core
    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDSU"}
    return [
        core.multiarray._reconstruct,
        core.multiarray.scalar,
        np.ndarray,
        np.dtype,
        *sorted(dtypes, key=lambda one: one.__name__),
        codecs.encode,
    ]


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
    torch.serialization.add_safe_globals(_numpy_types())
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise Unreadable(f"{path}: {_refused(str(error))}") from error
    except DAMAGED as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unreadable(
            f"{path}: damaged, cut off, or no file of torch.save ({reason})"
        ) from error


def open_torch_file(path: Path) -> Source:
    """A file of `torch.save`.

    Raises:
        Unreadable: as `load`.
    """
    source = Source("torch.save")
    source.add("", load(path))
    return source


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
