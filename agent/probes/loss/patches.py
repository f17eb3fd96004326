"""Code of ours in functions of torch, and theirs back again.

The code of a function is exchanged, not its name in torch: a function object that is replaced
cannot be pickled any more by whoever holds it, torch.jit finds no source for it, torch.compile does
not know it and traces into it, and `from torch.nn.functional import cross_entropy` has it already.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any


class Requests:
    """What our code in torch's functions checks before it notifies anybody.

    Attributes:
        passes: whether any listener wants to be notified of backward passes.
        unless_training: a model: losses are reported unless it is in training mode. So nobody is
            notified of those of a training step that is not sampled.
    """

    __slots__ = ("passes", "unless_training")

    def __init__(self) -> None:
        self.passes = False
        self.unless_training: Any = None


requests = Requests()
# Expressions, for the code that is put into torch: when to notify.
ALWAYS, OF_PASSES = "True", "_requests.passes"
OF_LOSSES = "not getattr(_requests.unless_training, 'training', False)"


class Tap:
    """A function of torch that has our code in place of its own.

    Args:
        function: it has no free variables, and no `*args`.
        after: called after each call of the function with its result and then with everything it
            was given.
        before: called before with everything it was given; `after` gets its answer in place of the
            result, and is not called where that is None.
        when: an expression: the two are called where it holds.
    """

    def __init__(
        self,
        function: FunctionType,
        after: Callable[..., None],
        before: Callable[..., Any] | None = None,
        *,
        when: str,
    ) -> None:
        code = function.__code__
        self._function, self._code = function, code
        # One name for all, so that little is looked up; and one for each function, as two classes
        # of a module may have methods of the same name.
        self._name = f"_rankscope_{function.__name__}_{id(function):x}"
        # The function as it was, under an identity of its own.
        original = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        function.__globals__[self._name] = (original, requests, after, before)
        function.__code__ = _shim(code, self._name, when, early=before is not None)

    def remove(self) -> None:
        """Gives the function its own code back."""
        self._function.__code__ = self._code
        self._function.__globals__.pop(self._name, None)


def _shim(code: CodeType, key: str, when: str, *, early: bool) -> CodeType:
    named = code.co_varnames[: code.co_argcount]
    only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    head = ", ".join((*named, *(("*", *only) if only else ())))
    call = ", ".join((*named, *(f"{k}={k}" for k in only)))
    every = ", ".join((*named, *only))
    lines: tuple[str, ...]
    if early:
        lines = (
            f"_seen = _before({every}) if {when} else None",
            f"_result = _run({call})",
            "if _seen is not None: _after(_seen)",
        )
    else:
        lines = (f"_result = _run({call})", f"if {when}: _after(_result, {every})")
    # At once: the name may be gone when the function returns. As a name and no constant of the
    # code, because torch.compile knows no constants that are functions.
    known = f"_run, _requests, _after, _before = {key}"
    source = "\n    ".join((f"def {code.co_name}({head}):", known, *lines, "return _result"))
    space: dict[str, Any] = {}
    exec(compile(source, code.co_filename, "exec"), space)
    made: CodeType = space[code.co_name].__code__
    # Whoever reads the source of the function (torch.jit compiles from it) finds the real one.
    return made.replace(
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_qualname=code.co_qualname,
    )


def can_be_tapped(function: FunctionType) -> bool:
    """Whether a function is one that a `Tap` can take the place of."""
    code = function.__code__
    variable = 0x04 | 0x08  # CO_VARARGS, CO_VARKEYWORDS
    return not (code.co_freevars or code.co_posonlyargcount or code.co_flags & variable)
