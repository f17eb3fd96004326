"""Arrays and numbers of numpy in files of `torch.save`: the states of random generators, say.

numpy's own constructors are not for files that nobody vouches for: a pickle can call `__setstate__`
of a type after arrays of it were made, and these then read beyond their memory. What stands here
under their names makes nothing but new arrays, from as many bytes as there are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from rankscope.agent.checkpoints.errors import Unreadable

# Types of elements: bool, integers, floats and complex numbers, and texts.
_CODE = re.compile(r"b1|[iu][1248]|f(?:[248]|12|16)|c(?:8|16|24|32)|[SU][1-9]\d{0,8}")
_BYTE_ORDERS = frozenset("<>=|")
_LAST_CHARACTER = 0x10FFFF

_T = TypeVar("_T", bound=Callable[..., Any])


def _called(path: str) -> Callable[[_T], _T]:
    """Gives a function or class the name by which pickles know it."""

    def named(made: _T) -> _T:
        made.__module__, made.__name__ = path.rpartition(".")[::2]
        made.__qualname__ = made.__name__
        return made

    return named


@_called("numpy.dtype")
class _Type:
    """A type of elements, as pickles make it: from a code, then a state with the byte order."""

    # Of one that a pickle has made without calling `__init__`.
    numpy: np.dtype[Any] = np.dtype("b1")

    def __init__(self, code: str, align: bool = False, copy: bool = True) -> None:
        if not isinstance(code, str) or not _CODE.fullmatch(code):
            raise Unreadable(f"an array of numpy of type {str(code)[:20]!r}, which is not read")
        self.numpy = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if order not in _BYTE_ORDERS:
            raise Unreadable("an array of numpy without a byte order")
        # By its code again: numpy writes a type differently where its byte order was set.
        self.numpy = np.dtype(self.numpy.newbyteorder(order).str)

    def __repr__(self) -> str:
        return repr(self.numpy)


@_called("numpy.ndarray")
class _Array:
    """An array, as pickles make it: empty, then with a state."""

    numpy: np.ndarray[Any, Any] = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        shape, kind, is_fortran, octets = state[-4:]
        self.numpy = _array(tuple(shape), kind, octets, "F" if is_fortran else "C")


def _array(shape: tuple[int, ...], kind: Any, octets: Any, order: Any = "C") -> Any:
    if not isinstance(kind, _Type) or not isinstance(octets, bytes):
        raise Unreadable("an array of numpy of objects, which is not read")
    if min(shape, default=1) < 0 or math.prod(shape) * kind.numpy.itemsize != len(octets):
        raise Unreadable(f"damaged: an array of numpy of shape {shape} in {len(octets)} bytes")
    made: np.ndarray[Any, Any] = np.ndarray(shape, kind.numpy, octets, order=order)
    if kind.numpy.kind == "U":
        characters = np.frombuffer(octets, np.dtype("u4").newbyteorder(kind.numpy.byteorder))
        if len(characters) and characters.max() > _LAST_CHARACTER:
            raise Unreadable("damaged: an array of numpy of texts with what is no character")
    return made


def _constructors(package: str) -> Iterator[Any]:
    """Those of numpy 1 and 2, which lie in packages of different names."""

    @_called(f"{package}.multiarray._reconstruct")
    def reconstruct(subtype: Any, shape: Any, kind: Any) -> _Array:
        if subtype is not _Array:
            raise Unreadable("an array of numpy of a type of its own, which is not read")
        return _Array()

    @_called(f"{package}.multiarray.scalar")
    def scalar(kind: Any, octets: Any) -> Any:
        return _array((), kind, octets)[()]

    yield from (reconstruct, scalar)


def _no_bytes(path: str) -> Any:
    """What pickles of protocol 2 call for the bytes of an empty array."""

    @_called(path)
    def made() -> bytes:
        return b""

    return made


_KNOWN = (
    _Type,
    _Array,
    *_constructors("numpy.core"),
    *_constructors("numpy._core"),
    _no_bytes("builtins.bytes"),
    _no_bytes("__builtin__.bytes"),
)


def plain(leaf: Any) -> Any:
    """Numpy's own of what a file has held."""
    return leaf.numpy if isinstance(leaf, _Array | _Type) else leaf


@contextmanager
def readable() -> Iterator[None]:
    """Within it `torch.load` with `weights_only` makes arrays of numpy; `plain` gives them."""
    before = list(torch.serialization.get_safe_globals())
    names = set(map(_path, _KNOWN))
    others = [one for one in before if _path(one) not in names]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*others, *_KNOWN])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _path(known: Any) -> str:
    """The name by which torch knows a class or function."""
    return known[1] if isinstance(known, tuple) else f"{known.__module__}.{known.__qualname__}"
