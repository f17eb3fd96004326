"""Which losses of an evaluation belong to one pass over one data set.

What distinguishes passes without help: the place in the trainer's source from which the losses are
computed, and the iterations over a DataLoader. Where there is neither, the loops of the source say
whether several passes are possible: losses inside two loops that do not train may be one data set
in parts, or several (`for split in ("train", "val"): for batch in ...`).
"""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_MOST_CODES = 1000
_NOT_THE_TRAINERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
_CALL = torch.nn.Module._call_impl.__code__
# Id of a code -> the code, which keeps the id its own, and its loops.
_loops: dict[int, tuple[CodeType, tuple[tuple[int, int], ...]]] = {}


class Place(NamedTuple):
    """A frame of a stack: the function, and the instruction that it is at."""

    code: CodeType
    at: int


def stack_now() -> tuple[Place, ...]:
    """Where the trainer is, the outermost function first; what a module runs inside is left out."""
    found: list[Place] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            found.clear()  # loops inside a module are about one batch
        else:
            found.append(Place(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    found.reverse()
    while found and _is_ours(found[-1].code):
        found.pop()
    return tuple(found)


def loops_of(code: CodeType) -> tuple[tuple[int, int], ...]:
    """First and last instruction of each loop of a function, as offsets in bytes."""
    known = _loops.get(id(code))
    if known is None:
        ends: dict[int, int] = {}
        for one in dis.get_instructions(code):
            # Waiting for a coroutine is a loop as well.
            jumps_back = "JUMP" in one.opname and isinstance(one.argval, int)
            if jumps_back and "NO_INTERRUPT" not in one.opname and one.argval <= one.offset:
                ends[one.argval] = max(one.offset, ends.get(one.argval, 0))
        if len(_loops) >= _MOST_CODES:
            _loops.clear()
        known = _loops[id(code)] = (code, tuple(sorted(ends.items())))
    return known[1]


def loops_at(place: Place) -> tuple[tuple[int, int], ...]:
    """The loops that an instruction is in."""
    return tuple(loop for loop in loops_of(place.code) if loop[0] <= place.at <= loop[1])


def loops_without(stack: tuple[Place, ...], training: tuple[Place, ...]) -> int:
    """How many loops a stack is in that do not train as well.

    Args:
        stack: where a loss of an evaluation was computed.
        training: where the training goes on; empty where that is not known.
    """
    shared = 0
    for one, other in zip(stack, training, strict=False):
        if one.code is not other.code:
            break
        shared += 1
        if one.at != other.at:
            break
    count = 0
    for index, place in enumerate(stack):
        around = loops_at(place)
        if index < shared:
            around = tuple(set(around) - set(loops_at(training[index])))
        count += len(around)
    return count


def site_of(stack: tuple[Place, ...]) -> tuple[object, ...]:
    """What the losses of one pass have in common: the calls, and the loop that they are in."""
    if not stack:
        return ()
    *outer, inner = stack
    loops = loops_at(inner)
    calls = ((id(place.code), place.at) for place in outer)
    return (*calls, id(inner.code), loops[-1] if loops else None)


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_NOT_THE_TRAINERS)


def place_now() -> tuple[int, int]:
    """The innermost place in the trainer's source, also inside of modules: code and instruction."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code):
        frame = frame.f_back
    return (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)
