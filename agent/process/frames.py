"""Where other threads are: their stacks, read without letting them go on meanwhile.

`sys._current_frames` and `f_back` give frame objects of stacks that are in use. A thread that goes
on between two looks at them returns from functions whose frames are then read, which are gone:
CPython 3.11 ends with a segmentation fault, or gives frames of functions that were called since.
Python code cannot keep another thread from going on: the interpreter may switch between any two
instructions, and a garbage collection, which any allocation may set off, runs finalizers, which are
Python code. So a stack is read within a single call into C (`list.extend` of iterators that are C,
too), with the collector off, and what comes out of it are code objects and numbers, no frames.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, chain, compress, repeat, starmap, takewhile
from operator import attrgetter, is_not
from types import CodeType
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where a function of a stack is.

    Attributes:
        code: what it runs.
        line: number of the line; None where the instruction belongs to none.
        instruction: offset of the instruction under way in the code, in bytes.
    """

    code: CodeType
    line: int | None
    instruction: int


_read = attrgetter("f_code", "f_lineno", "f_lasti")
_is_frame: Any = partial(is_not, None)
_attribute: Any = getattr
_ONE_CALL = ((),)  # of a function without arguments


def stack_of(thread: int) -> list[Place]:
    """The stack of a thread at one moment, from the innermost frame outwards.

    Args:
        thread: its identifier, as `threading.get_ident` gives it; without such a thread the stack
            is empty. Of the calling thread, functions of this module come first.
    """
    found: list[tuple[CodeType, int | None, int]] = []
    first = map(dict.get, starmap(sys._current_frames, _ONE_CALL), (thread,))
    # To its end: an iterator that stops earlier keeps a frame.
    frames = takewhile(_is_frame, accumulate(chain(first, repeat("f_back")), _attribute))
    _extend(found, map(_read, frames))
    return [Place(*one) for one in found]


def threads() -> list[int]:
    """Identifiers of all threads that run Python code."""
    found: list[int] = []
    _extend(found, chain.from_iterable(starmap(sys._current_frames, _ONE_CALL)))
    return found


def _extend(found: list[Any], items: Iterator[Any]) -> None:
    """Takes all items in one call into C, with the garbage collector off."""
    was_on: list[bool] = []
    note = compress(map(was_on.append, starmap(gc.isenabled, _ONE_CALL)), (False,))
    off = compress(starmap(gc.disable, _ONE_CALL), (False,))
    # What `was_on` holds is read when its turn has come.
    on = compress(starmap(gc.enable, compress(_ONE_CALL, was_on)), (False,))
    try:
        found.extend(chain(note, off, items, on))
    except BaseException:
        if True in was_on:
            gc.enable()
        raise
