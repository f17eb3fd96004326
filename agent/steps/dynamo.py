"""How torch.compile is kept from compiling the agent.

Under `torch.compile` every Python frame below the compiled function is traced in its turn: where a
train step is compiled, the agent's hooks would be, too, and again whenever a number in them has
changed. What is said here is said to torch's C part, so that torch._dynamo need not be imported by
a trainer that does not use it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, TypeVar

import torch

AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])
_AGENT = __name__.partition(".steps")[0]


def leave_alone(function: AnyCallable) -> AnyCallable:
    """Has frames of a function, and of all that it calls, run as they are.

    A function that is traced as part of another one still is: it has to ask `is_compiling`.

    Args:
        function: a Python function; of closures made at one place, all are meant.
    """
    frames = _frames()
    code = function.__code__
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    elif hasattr(frames, "skip_code"):
        # Before torch 2.7: only the function itself; `leave_agent_alone` does what it calls.
        frames.skip_code(code)
    return function


def leave_agent_alone() -> None:
    """Before torch 2.7: has the frames of all functions of the agent run as they are.

    Takes some 10 ms; with a newer torch `leave_alone` suffices, and this does nothing.
    """
    frames = _frames()
    if hasattr(frames, "set_code_exec_strategy") or not hasattr(frames, "skip_code"):
        return
    for function in _functions():
        for code in _with_inner(function.__code__):
            frames.skip_code(code)


def _functions() -> Iterator[FunctionType]:
    """All functions in modules of the agent, those behind decorators and in classes, too."""
    modules = [m for name, m in tuple(sys.modules.items()) if name.startswith(_AGENT)]
    pending = [value for module in modules for value in vars(module).values()]
    seen = set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, type) and one.__module__.startswith(_AGENT):
            pending += vars(one).values()
        elif isinstance(one, staticmethod | classmethod):
            pending.append(one.__func__)
        elif isinstance(one, property):
            pending += (one.fget, one.fset)
        elif isinstance(one, functools.cached_property):
            pending.append(one.func)
        elif isinstance(one, FunctionType) and one.__module__.startswith(_AGENT):
            yield one
            pending += [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False  # the variable was deleted, or has no value yet


def _frames() -> Any:
    return getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of those that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


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
