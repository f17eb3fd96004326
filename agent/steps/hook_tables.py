"""Modules with hooks of ours are copied, pickled and saved as if they had none.

A module keeps its hooks in tables, which go into every copy and every file that is made of it. A
file with a hook of ours would not load where Rankscope is not installed, nor where it is read with
`weights_only=True`, which refuses whatever it does not know. So the tables themselves leave out
what is ours when they are pickled.

Everything that copies or pickles (`copy`, `pickle`, what is derived from it, `torch.save`) asks an
object for its `__reduce_ex__`, and an `OrderedDict` may have one of its own. So the table is not
replaced (handles of the user's hooks know it weakly, and could not remove them any more) nor given
another class (torch._dynamo knows this one), and a call of the module costs nothing more.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from torch.utils.hooks import RemovableHandle

from rankscope.agent.guard import process_wide

_REDUCE = "__reduce_ex__"
_ATTEMPTS = 10


class ModuleHook:
    """What the hooks that we put on modules have in common: a copy of one does nothing.

    Hooks may be taken out of their table by others and put into another one (the conversion to a
    quantized module does so), where nothing hides them.
    """

    # torch.jit reads the names of a module's hooks.
    __name__ = "rankscope_hook"
    of_rankscope = True

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        # A hook of the standard library that does nothing: it loads where Rankscope is not.
        return (getattr, (contextlib.nullcontext(), "__exit__"))


def is_ours(hook: Any) -> bool:
    """Whether a hook of a module is one of the agent's."""
    # Of the class: an object may have an answer for every name.
    return hasattr(type(hook), "of_rankscope")


def pickled_by_value(kind: type[Any]) -> bool:
    """Whether cloudpickle and dill write the class itself, and with it what was put on it."""
    return kind.__module__ == "__main__" or "<locals>" in kind.__qualname__


class HiddenHook:
    """A hook of ours on a module, until it is removed.

    Args:
        handle: of the hook, as torch has returned it.
    """

    __slots__ = ("_handle", "_place")

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._place: Any = None
        hide(handle)
        if isinstance(handle, RemovableHandle):
            table = handle.hooks_dict_ref()
            self._place = None if table is None else vars(table)

    def hide(self) -> None:
        """Again, where the last other one of ours was taken off meanwhile."""
        if self._place is not None and _REDUCE not in self._place:
            hide(self._handle)

    def remove(self) -> None:
        """Takes the hook back."""
        self._handle.remove()
        unhide(self._handle)


def hide(handle: Any) -> None:
    """Leaves the hooks of ours out of whatever is made of the tables that one was put into."""
    tables = _tables(handle)
    if not (tables and any(map(is_ours, tables[0].values()))):
        return
    for table in tables:
        own = vars(table)
        if _REDUCE not in own:
            own[_REDUCE] = _Reduction(table, tables[0])


def unhide(handle: Any) -> None:
    """After a hook was taken off: leaves the tables as they were, if it was the last of ours."""
    tables = _tables(handle)
    if tables and not any(map(is_ours, tables[0].values())):
        for table in tables:
            vars(table).pop(_REDUCE, None)


def _tables(handle: Any) -> list[Any]:
    """The table of the hook itself, and those of what torch wants to know of it."""
    if not isinstance(handle, RemovableHandle):
        return []
    found = [place() for place in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
    return [] if found[0] is None else [table for table in found if table is not None]


class _Reduction:
    """`__reduce_ex__` of one table: that of an `OrderedDict` which never held a hook of ours.

    Args:
        table: by the hooks' numbers.
        hooks: the table that has the hooks themselves under these numbers.
    """

    __slots__ = ("_hooks", "_table")

    def __init__(self, table: Any, hooks: Any) -> None:
        # Weakly: it is in the table.
        self._table, self._hooks = weakref.ref(table), weakref.ref(hooks)

    def __call__(self, protocol: Any) -> tuple[Any, ...]:
        table = self._table()
        left = _left(table, self._hooks())
        if left is None:  # that failed: the user's file is written all the same
            left = _entries(table)
        state = {name: value for name, value in vars(table).items() if name != _REDUCE}
        return type(table), (), state or None, None, iter(left)


@process_wide("hooks")
def _left(table: Any, hooks: Any) -> list[tuple[Any, Any]]:
    ours = {key for key, hook in _entries(hooks) if is_ours(hook)}
    return [(key, value) for key, value in _entries(table) if key not in ours]


def _entries(table: Any) -> list[tuple[Any, Any]]:
    # A thread that writes checkpoints may read while the training puts hooks on and takes them off.
    for _ in range(_ATTEMPTS):
        try:
            return list(table.items())
        except RuntimeError:
            continue
    return list(table.items())
