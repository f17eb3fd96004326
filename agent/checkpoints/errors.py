"""Why a checkpoint cannot be read."""

from __future__ import annotations

import pickle
import struct
import tarfile
import zipfile

# What parsers raise, torch's and Python's, of files that are damaged: by experiment, all of these.
DAMAGED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
)


class Unreadable(Exception):
    """A checkpoint, or a file of one, that cannot be read: what, where, and what to do."""


def told(error: BaseException) -> str:
    """What an error says, in one line: of all but `Unreadable` with its kind."""
    if isinstance(error, Unreadable):
        return str(error)
    said = " ".join(str(error).split())[:200]
    return f"cannot be compared ({type(error).__name__}{': ' if said else ''}{said})"
