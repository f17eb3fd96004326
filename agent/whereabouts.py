"""What a thread of the trainer is doing, read off its stack from another thread.

So the training thread need not say where it is, and the answer is right even inside a collective
that never returns.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

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
    for _ in range(_DEPTH):
        if frame is None:
            break
        code = frame.f_code
        sign = _known.get(code)
        if sign is None:
            sign = _known[code] = _sign_of(code)
        # Wrapped functions add frames of their own: `optimizer.step` calls `wrapper`.
        if sign:
            found = sign
            break
        frame = frame.f_back
    return found


def _sign_of(code: CodeType) -> str:
    name = getattr(code, "co_qualname", code.co_name)
    for file, function, phase in _SIGNS:
        if code.co_filename.endswith(file) and (function is None or function in name):
            return phase
    return ""
