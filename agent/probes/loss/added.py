"""Whether a trainer adds something to what a loss function has returned: read off its bytecode.

An evaluation without gradients leaves no graph that would show what becomes of a value.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType

import torch

_NOT_THE_TRAINERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
# Functions that a value is followed through, from the inside out.
_MOST_FRAMES = 8
_MOST_KNOWN = 1000
_SUMS, _SCALINGS = frozenset("+-"), frozenset("*/")
_STORES = frozenset(("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF"))
_LOADS = frozenset(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST_CHECK"))
_NOTHING = frozenset(("CACHE", "NOP", "RESUME", "PRECALL", "KW_NAMES", "EXTENDED_ARG"))
# What only takes from the stack, and what only puts something on it, as far as an expression has
# it; everything else takes some and puts one back.
_TAKES = ("STORE_", "POP_", "RETURN_", "DELETE_", "LIST_APPEND", "SET_ADD")
_PUTS = frozenset(("PUSH_NULL", "COPY", "LOAD_CONST", "LOAD_CLOSURE", "LOAD_FAST_LOAD_FAST"))

# Id of a code and an instruction -> the code, which keeps the id its own, and what was found.
_known: dict[tuple[int, int], tuple[CodeType, str]] = {}


def is_added_to() -> bool:
    """Whether the caller's result becomes a term of a sum in the trainer's functions.

    What is read as a number first, or added up over batches (`total += loss`), is none.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_TRAINERS):
            frame = frame.f_back
        if frame is None:
            return False
        becomes = _becomes(frame.f_code, frame.f_lasti)
        if becomes != "returned":
            return becomes == "added"
        frame = frame.f_back
    return False


def _becomes(code: CodeType, at: int) -> str:
    known = _known.get((id(code), at))
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _followed([one for one in dis.get_instructions(code) if one.opname != "CACHE"], at)
        known = _known[id(code), at] = code, found
    return known[1]


def _followed(instructions: list[dis.Instruction], at: int) -> str:
    """What becomes of the value that the instruction at an offset leaves: of its uses the gravest.

    Returns:
        `added`, `returned`, or `used`.
    """
    start = sum(one.offset <= at for one in instructions)
    found, name = _consumed(instructions, start)
    if found != "stored":
        return found
    becomes = set()
    stored = next(
        place
        for place in range(start, len(instructions))
        if instructions[place].opname in _STORES and instructions[place].argval == name
    )
    for place in range(stored + 1, len(instructions)):
        one = instructions[place]
        if one.opname in _LOADS and one.argval == name:
            becomes.add(_consumed(instructions, place + 1, name)[0])
        elif one.opname in _STORES and one.argval == name:
            break
    return next((grave for grave in ("added", "returned") if grave in becomes), "used")


def _consumed(
    instructions: Sequence[dis.Instruction], start: int, own: str = ""
) -> tuple[str, str]:
    """What takes the value that is on top of the stack, and of what stores it the name.

    Args:
        start: index of the next instruction.
        own: name that the value has, if any.
    """
    above = 0  # values on the stack over the one that is followed
    added = False
    beside = set(_loaded_before(instructions, start))
    for one in instructions[start:]:
        if one.opname in _NOTHING:
            continue
        if one.opname.startswith(("JUMP", "FOR_", "SEND", "YIELD")):
            return ("added" if added else "used"), ""
        takes, puts = _effect(one)
        if one.opname in _LOADS:
            beside.add(one.argval)
        if takes <= above:
            above += puts - takes
            continue
        if one.opname == "BINARY_OP" and one.argrepr.rstrip("=") in _SUMS | _SCALINGS:
            # `total += loss` adds up over batches, `loss += penalty` does not.
            if one.argrepr == "+=" and not above and not added:
                return "used", ""
            added |= one.argrepr.rstrip("=") in _SUMS
            above = 0
        elif one.opname in _STORES:
            if added:  # `total = total + loss` adds up over batches
                return ("used" if one.argval in beside - {own} else "added"), ""
            return "stored", str(one.argval)
        elif added:
            return "added", ""
        else:
            return ("returned" if one.opname.startswith("RETURN") else "used"), ""
    return "used", ""


def _loaded_before(instructions: Sequence[dis.Instruction], start: int) -> Iterator[str]:
    """Names of what was loaded in the same statement before an instruction."""
    for place in range(start - 1, -1, -1):
        one = instructions[place]
        if one.opname in _STORES or one.opname in ("POP_TOP", "RESUME", "FOR_ITER"):
            return
        if one.opname in _LOADS:
            yield one.argval


def _effect(one: dis.Instruction) -> tuple[int, int]:
    """How many values an instruction takes from the stack, and puts there."""
    if one.opname in ("CALL", "CALL_KW"):
        return (one.arg or 0) + 2 + (one.opname == "CALL_KW"), 1
    effect = dis.stack_effect(one.opcode, one.arg, jump=False)
    if one.opname in _LOADS or one.opname in _PUTS:
        return 0, effect
    if one.opname.startswith(_TAKES):
        return -effect, 0
    puts = max(effect + 1, 1)  # a method that is looked up leaves its object as well
    return puts - effect, puts
