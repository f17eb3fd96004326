"""Who is notified of what torch does, and what of torch is replaced while anybody is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

Listener = TypeVar("Listener")


class Replacement(NamedTuple):
    """A function of a module, or a method of a class, in whose place there is to be another.

    Attributes:
        owner: the module or class; nothing is replaced where it has no such function of its own.
        name: of the function there.
        make: makes ours of it, which calls it.
    """

    owner: Any
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]


class _Replaced(NamedTuple):
    owner: Any
    name: str
    original: Callable[..., Any]
    ours: Callable[..., Any]


class Listeners(Generic[Listener]):
    """Objects that are notified, held weakly. To iterate over them gives those that still exist.

    What another library puts around ours meanwhile stays when the last one has gone, with ours in
    it, which then notifies nobody.

    Args:
        wanted: what is to be replaced while there are any; asked for each that comes.
    """

    def __init__(self, wanted: Callable[[], Iterable[Replacement]]) -> None:
        # A tuple, and replaced as a whole: another thread may be going through it.
        self._references: tuple[weakref.ref[Listener], ...] = ()
        self._wanted = wanted
        self._replaced: tuple[_Replaced, ...] = ()

    def __iter__(self) -> Iterator[Listener]:
        for reference in self._references:
            listener = reference()
            if listener is not None:
                yield listener

    @property
    def have_replaced(self) -> bool:
        """Whether torch is not as it was."""
        return bool(self._replaced)

    def add(self, listener: Listener) -> None:
        """It is notified from now on."""
        self._references = (*self._references, weakref.ref(listener, self._gone))
        for owner, name, make in self._wanted():
            original = vars(owner).get(name)
            known = any(one.owner is owner and one.name == name for one in self._replaced)
            if original is not None and not known:
                ours = make(original)
                self._replaced = (*self._replaced, _Replaced(owner, name, original, ours))
                setattr(owner, name, ours)

    def remove(self, listener: Listener) -> None:
        """It is not notified any more; with the last one gone, torch is as it was."""
        self._keep(lambda reference: reference() is not listener)

    def remove_all(self) -> None:
        """Nobody is."""
        self._keep(lambda reference: False)

    def _gone(self, gone: weakref.ref[Listener]) -> None:
        self._keep(lambda reference: reference is not gone)

    def _keep(self, wanted: Callable[[weakref.ref[Listener]], bool]) -> None:
        self._references = tuple(r for r in self._references if wanted(r))
        if self._references:
            return
        left = []
        for one in self._replaced:
            if vars(one.owner).get(one.name) is one.ours:
                setattr(one.owner, one.name, one.original)
            else:
                left.append(one)
        self._replaced = tuple(left)
