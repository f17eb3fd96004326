"""What stands in for a monitor: where nothing is watched, and in files."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from rankscope.agent.actions import Actions


def stand_in(run: str, rank: int) -> tuple[Any, ...]:
    """What a monitor is in a file: it loads without Rankscope, and with `weights_only=True`.

    Of the few things that the latter lets through, one may have attributes, and is itself a
    function of any keywords that does nothing to anybody: so `log` of what was loaded does nothing.
    """
    calls = {"log": OrderedDict, "step": OrderedDict, "close": OrderedDict, "mark": set}
    return OrderedDict, (), {"run": run, "rank": rank, "url": "", "closed": True, **calls}


class NullMonitor:
    """The monitor of `mode="disabled"`: takes everything, does nothing."""

    def __init__(self, run: str, rank: int) -> None:
        self.run = run
        self.rank = rank
        self.url = ""
        self.closed = False

    def log(self, **scalars: Any) -> None:
        """Does nothing."""

    def evaluating(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Does nothing."""
        return contextlib.nullcontext()

    def mark(self, text: str) -> None:
        """Does nothing."""

    def watch(self, module: Any, name: str) -> None:
        """Does nothing."""

    def replicas(self, key: str | None, tensors: str = "*") -> None:
        """Does nothing."""

    def accumulation(self, *, divided_by: int = 0, summed: bool = False) -> None:
        """Does nothing."""

    def step(self, **facts: Any) -> None:
        """Does nothing."""

    def go_to(self, step: int) -> int:
        """Does nothing."""
        return step

    def verdict(self) -> None:
        """Knows nothing."""

    def on_alert(self, callback: Callable[..., object], *, severity: str = "warning") -> None:
        """Does nothing."""

    def actions(self, agree: Callable[[int], int] | None = None, *, every: int = 1) -> Actions:
        """Takes part in what the other ranks agree on, and asks for nothing by itself."""
        return Actions(agree, every=every)

    def checkpoint(self, path: Any, state: Any, *, loaded: bool = False) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing more than to be closed."""
        self.closed = True

    def __copy__(self) -> NullMonitor:
        return NullMonitor(self.run, self.rank)

    def __deepcopy__(self, memo: dict[int, Any]) -> NullMonitor:
        return NullMonitor(self.run, self.rank)

    def __reduce__(self) -> tuple[Any, ...]:
        return stand_in(self.run, self.rank)

    def __enter__(self) -> NullMonitor:
        return self

    def __exit__(self, *error: Any) -> None:
        return None
