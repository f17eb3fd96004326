"""What a thread of the trainer is doing, read off its stack from another thread.

So the training thread need not say where it is, and the answer is right even inside a collective
that never returns.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
from types import CodeType, TracebackType

from rankscope.agent.process import frames
from rankscope.agent.process.frames import Place
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
    stack = frames.stack_of(thread)
    if not stack:
        return ""
    if _waits_for_work(stack[0]):
        return "collective"
    for place in stack[:_DEPTH]:
        sign = _known.get(place.code)
        if sign is None:
            sign = _known[place.code] = _sign_of(place.code)
        # Wrapped functions add frames of their own: `optimizer.step` calls `wrapper`.
        if sign:
            return sign
    return "idle"


def place_of(thread: int) -> str:
    """Where in the user's own code a thread is: `train (train.py:12)`; empty where there is none.

    Args:
        thread: as for `phase_of`.
    """
    for place in frames.stack_of(thread)[:_DEPTH]:
        if found := _users_place(place.code, place.line):
            return found
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

    The agent's own threads are left out. Each stack is one that the thread had at one moment of the
    call, not all of them at the same.

    Args:
        thread: identifier of the one that is given first, as for `phase_of`.

    Returns:
        At most `STACK_THREADS` threads and `STACK_FRAMES` frames of each (`wire/limits.py`), a
        frame as `forward (model.py:12)`.
    """
    names = {known.ident: known.name for known in threading.enumerate()}
    found: dict[str, list[str]] = {}
    for ident in sorted(frames.threads(), key=lambda ident: ident != thread):
        name = names.get(ident, f"thread {ident}")
        if name.startswith("rankscope-"):
            continue
        if len(found) == limits.STACK_THREADS:
            break
        name = name if name not in found else f"{name} ({ident})"
        found[name[: limits.STACK_CHARACTERS]] = _lines(frames.stack_of(ident))
    return found


def _lines(stack: list[Place]) -> list[str]:
    return [
        f"{code.co_name} ({os.path.basename(code.co_filename)}:{line})"[: limits.STACK_CHARACTERS]
        for code, line, _ in stack[: limits.STACK_FRAMES]
    ]


def _users_place(code: CodeType, line: int | None) -> str:
    if any(part in code.co_filename for part in _NOT_THE_USERS):
        return ""
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{line})"


def _waits_for_work(place: Place) -> bool:
    """Whether the innermost frame is in `work.wait()`, a call into C++ that has no frame.

    Which method is called is read off the instruction that is under way. What it belongs to is not
    known, for the frame's variables are not to be touched: that is taken for a `Work` where
    torch.distributed is in use.
    """
    if "wait" not in place.code.co_names or not _is_distributed():
        return False
    before = [i for i in dis.get_instructions(place.code) if i.offset <= place.instruction]
    if not before or not before[-1].opname.startswith("CALL"):
        return False
    call = before[-1].positions
    for found in reversed(before[:-1]):
        if found.opname not in ("LOAD_METHOD", "LOAD_ATTR") or found.positions is None:
            continue
        if call is None or found.positions.lineno != call.lineno:
            return False
        if found.positions.col_offset == call.col_offset:
            return bool(found.argval == "wait")
    return False


def _is_distributed() -> bool:
    """Whether there is a process group; nothing is imported for the answer."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _sign_of(code: CodeType) -> str:
    name = getattr(code, "co_qualname", code.co_name)
    for file, function, phase in _SIGNS:
        if code.co_filename.endswith(file) and (function is None or function in name):
            return phase
    return ""
