"""The state of a run's evaluation as bytes, so that another process can go on where one ended.

The state is what detectors and the alignment remember: some fifty small classes of ours with arrays
of numpy in them. It is pickled, because a form of its own for each of them would be a second
definition of every detector that nobody could hold to the first. What makes pickle dangerous is
that reading it calls whatever it names. So it is read by a reader that knows nothing but the
classes of the modules named below, those of packages that bring detectors, and numpy's way of
making arrays; bytes that name anything else are refused. They come from the evaluator's own
database, whose writer could as well write alerts.

A snapshot counts only for the code that made it: `version` covers every source file that the
evaluation consists of, and what it is run by. Whoever finds another one begins at the first step.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.agent import wire

# A snapshot that is larger is not kept: what waits in memory then (fingerprints of large models,
# mostly) is faster read again from where it was posted.
MAX_BYTES = 32 * 2**20

_OURS = (
    "rankscope.agent.wire",
    *(
        f"rankscope.server.{name}"
        for name in ("alerts", "comparison", "detectors", "evaluation", "window")
    ),
)
_OTHERS = frozenset(
    {
        ("builtins", "set"),
        ("builtins", "frozenset"),
        ("builtins", "range"),
        ("builtins", "slice"),
        ("builtins", "complex"),
        ("builtins", "bytearray"),
        *(("builtins", name) for name in ("bool", "bytes", "dict", "float", "int", "list")),
        *(("builtins", name) for name in ("str", "tuple")),
        ("collections", "Counter"),
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("collections", "deque"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
    }
)
# Names of functions that numpy's arrays and numbers are made by; their modules have moved between
# its versions.
_NUMPY = frozenset({"_reconstruct", "_frombuffer", "scalar"})


class Unreadable(RuntimeError):
    """The bytes are no snapshot that this process can read."""


@cache
def version() -> str:
    """Of the code that evaluates: 32 hexadecimal digits."""
    import rankscope.server
    from rankscope.server.detectors import installed

    digest = blake2b(digest_size=16)
    digest.update(f"{sys.version_info[:3]} {np.__version__} {np.dtype(np.intp)}".encode())
    for folder in (Path(rankscope.server.__file__ or "").parent, Path(wire.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    # Of other packages their version, and what they declare.
    for kind, origin in installed().origins.items():
        digest.update(f"{kind} {origin}\0".encode())
    return digest.hexdigest()


def to_bytes(state: Any) -> bytes | None:
    """The state, packed; None where it is too large to be worth keeping."""
    packer = zlib.compressobj(level=1)
    out = _Limited(packer)
    try:
        pickle.Pickler(out, protocol=5).dump(state)
    except _TooLarge:
        return None
    return b"".join([*out.parts, packer.flush()])


def from_bytes(data: bytes) -> Any:
    """What `to_bytes` was given.

    Raises:
        Unreadable: it names something that no state consists of, or is damaged.
    """
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data, 2 * MAX_BYTES)
        return _Reader(io.BytesIO(plain)).load()
    except (zlib.error, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise Unreadable(str(error)) from error


class _TooLarge(Exception):
    pass


class _Limited(io.RawIOBase):
    """Packs what is written, up to the limit: the whole is never in memory twice."""

    def __init__(self, packer: Any) -> None:
        self._packer = packer
        self._size = 0
        self.parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._size += size
        if self._size > MAX_BYTES:
            raise _TooLarge
        self.parts.append(self._packer.compress(data))
        return size


@cache
def _known() -> tuple[str, ...]:
    """Our modules, and packages that bring detectors of their own."""
    from rankscope.server.detectors import installed

    there = {d.__module__ for d in installed().detectors}
    theirs = {m.partition(".")[0] for m in there if not m.startswith("rankscope.")}
    return (*_OURS, *sorted(theirs))


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        ours = any(module == one or module.startswith(f"{one}.") for one in _known())
        numpys = module.partition(".")[0] == "numpy" and name in _NUMPY
        if ours or numpys or (module, name) in _OTHERS:
            found = super().find_class(module, name)
            # What a module of ours has imported is not ours.
            if not ours or (isinstance(found, type) and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a state")
