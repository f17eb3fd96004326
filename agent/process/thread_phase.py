"""What a thread of the trainer is doing, read off its stack from another thread.

So the training thread need not say where it is, and the answer is right even inside a collective
that never returns.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
from types import CodeType, FrameType, TracebackType

from rankscope.agent.wire import limits

# What is on the stack, from the innermost frame outwards, and what it means: (end of the file's
# name, function or None, phase). The first that fits decides.
_SIGNS: tuple[tuple[str, str | None, str], ...] = (
    (os.path.join("torch", "distributed", "distributed_c10d.py"), None, "collective"),
    (os.path.join("torch", "distributed", "_functional_collectives.py"), None, "collective"),
    (os.path.join("horovod", "torch", "mpi_ops.py"), None, "collective"),
    (os.path.join("torch", "utils", "data", "dataloader.py"), None, "data"),
    (os.path.join("torch", "autograd", "graph.py"), "_engine_run_backward", "backward"),
    (os.path.join("torch", "_tensor.py"), "backward", "backward"),
    (os.path.join("torch", "optim", "lr_scheduler.py"), None, "scheduler"),
    (os.path.join("torch", "optim", "optimizer.py"), "profile_hook_step", "step"),
    (os.path.join("torch", "nn", "modules", "module.py"), "_call_impl", "forward"),
    (os.path.join("torch", "serialization.py"), None, "checkpoint"),
)
_DEPTH = 200
# Instructions that load what has a name.
_NAMES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_NAME", "LOAD_GLOBAL")
# Parts of file names that are no code of the user's.
_NOT_THE_USERS = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    os.path.dirname(os.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,  # the agent's own
    "<frozen",
)

_known: dict[CodeType, str] = {}


def phase_of(thread: int) -> str:
    """`forward`, `backward`, `step`, `collective`, `data`, ... or `idle`.

    Args:
        thread: its identifier, as `threading.get_ident` gives it; without such a thread the answer
            is empty.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    if frame is None:
        return ""
    found = "idle"
    for depth in range(_DEPTH):
        if frame is None:
            break
        code = _code_of(frame)
        if code is None:
            break
        if depth == 0 and _waits_for_work(frame, code):
            found = "collective"
            break
        sign = _known.get(code)
        if sign is None:
            sign = _known[code] = _sign_of(code)
        # Wrapped functions add frames of their own: `optimizer.step` calls `wrapper`.
        if sign:
            found = sign
            break
        frame = frame.f_back
    return found


def place_of(thread: int) -> str:
    """Where in the user's own code a thread is: `train (train.py:12)`; empty where there is none.

    Args:
        thread: as for `phase_of`.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    for _ in range(_DEPTH):
        if frame is None:
            break
        code = _code_of(frame)
        if code is None:
            break
        if place := _users_place(code, frame.f_lineno):
            return place
        frame = frame.f_back
    return ""


def place_of_error(trace: TracebackType | None) -> str:
    """Where in the user's own code an error came from, as `place_of` says it."""
    found = ""
    for _ in range(_DEPTH):
        if trace is None:
            break
        found = _users_place(trace.tb_frame.f_code, trace.tb_lineno) or found
        trace = trace.tb_next
    return found


def stacks_of(thread: int) -> dict[str, list[str]]:
    """The stacks of the process's threads: for each name, its frames from the innermost outwards.

    The agent's own threads are left out. Nothing is stopped for it: each stack is one that the
    thread had at some time during the call.

    Args:
        thread: identifier of the one that is given first, as for `phase_of`.

    Returns:
        At most `STACK_THREADS` threads and `STACK_FRAMES` frames of each (`wire/limits.py`), a
        frame as `forward (model.py:12)`.
    """
    frames = sys._current_frames()
    names = {known.ident: known.name for known in threading.enumerate()}
    found: dict[str, list[str]] = {}
    for ident in sorted(frames, key=lambda ident: ident != thread):
        name = names.get(ident, f"thread {ident}")
        if name.startswith("rankscope-"):
            continue
        if len(found) == limits.STACK_THREADS:
            break
        name = name if name not in found else f"{name} ({ident})"
        found[name[: limits.STACK_CHARACTERS]] = _lines(frames[ident])
    return found


def _lines(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < limits.STACK_FRAMES:
        code = _code_of(frame)
        if code is None:
            break
        line = f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
        lines.append(line[: limits.STACK_CHARACTERS])
        frame = frame.f_back
    return lines


def _code_of(frame: FrameType) -> CodeType | None:
    """What a frame of another thread runs; None where the frame has ended meanwhile.

    Seen once, in CPython 3.11.7: the frame object named memory that other frames had been given
    since, and its code was `False`.
    """
    code: object = frame.f_code
    return code if isinstance(code, CodeType) else None


def _users_place(code: CodeType, line: int | None) -> str:
    if any(part in code.co_filename for part in _NOT_THE_USERS):
        return ""
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{line})"


def _waits_for_work(frame: FrameType, code: CodeType) -> bool:
    """Whether the innermost frame is in `work.wait()`, a call into C++ that has no frame.

    Which method is called is read off the instruction that is under way; it has to belong to a
    `Work` of torch.distributed, found by the name that it is called on.
    """
    at = frame.f_lasti
    if "wait" not in code.co_names:
        return False
    before = [i for i in dis.get_instructions(code) if i.offset <= at]
    if not before or not before[-1].opname.startswith("CALL"):
        return False
    call = before[-1].positions
    for index in range(len(before) - 1, 0, -1):
        found = before[index]
        if found.opname not in ("LOAD_METHOD", "LOAD_ATTR") or found.positions is None:
            continue
        if call is None or found.positions.lineno != call.lineno:
            return False
        if found.positions.col_offset != call.col_offset:
            continue
        if found.argval != "wait":
            return False
        owner = before[index - 1]
        if owner.opname.startswith(_NAMES) and isinstance(owner.argval, str):
            held = frame.f_locals.get(owner.argval, frame.f_globals.get(owner.argval))
            return any(kind.__name__ == "Work" for kind in type(held).__mro__)
        return before[-1].arg == 0
    return False


def _sign_of(code: CodeType) -> str:
    name = getattr(code, "co_qualname", code.co_name)
    for file, function, phase in _SIGNS:
        if code.co_filename.endswith(file) and (function is None or function in name):
            return phase
    return ""
