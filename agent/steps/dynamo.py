"""How torch.compile is kept from compiling the agent.

Under `torch.compile` every Python frame below the compiled function is traced in its turn: where a
train step is compiled, the agent's hooks would be, too, and again whenever a number in them has
changed. What is said here is said to torch's C part, so that torch._dynamo need not be imported by
a trainer that does not use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])


def leave_alone(function: AnyCallable) -> AnyCallable:
    """Has frames of a function, and of all that it calls, run as they are.

    A function that is traced as part of another one still is: it has to ask `is_compiling`.

    Args:
        function: a Python function; of closures made at one place, all are meant.
    """
    frames: Any = getattr(torch._C, "_dynamo", None)
    frames = getattr(frames, "eval_frame", None)
    code = function.__code__
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    elif hasattr(frames, "skip_code"):
        # Before torch 2.7: only the function itself, not what it calls.
        frames.skip_code(code)
    return function


def outside_graph(function: AnyCallable) -> AnyCallable:
    """Besides: where a function is called in what is traced, the graph ends before the call."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return leave_alone(function)


def traced_as_constant(function: AnyCallable) -> AnyCallable:
    """Where a function is called in what is traced, it is called then, and its answer is kept."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@traced_as_constant
def in_one_graph() -> bool:
    """While something is traced: whether its graph may not end (`fullgraph=True`, export)."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracer: Any = InstructionTranslator.current_tx()
        return bool(tracer.one_graph or getattr(tracer, "error_on_graph_break", False))
    except (ImportError, AttributeError):
        return True  # traced by something else than torch._dynamo: nothing may be called


# Those of torch._dynamo, once they are there.
_counters: Any = None


def frames_traced() -> int:
    """Number of frames that torch.compile has traced in this process."""
    global _counters
    if _counters is None:
        utils: Any = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return 0
        _counters = utils.counters
    return int(_counters["frames"]["total"])
