"""The block of code in which a user says that a pass of an evaluation runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rankscope.agent.probes.loss.training import Loss


@contextmanager
def named_pass(
    loss: Loss | None,
    name: str,
    guarded: AbstractContextManager[Any],
    publish: Callable[[Mapping[str, Any]], None],
) -> Iterator[None]:
    """All losses inside are of the pass of that name; `publish` gets their means at the end.

    Args:
        loss: the probe; None where nothing is recorded.
        guarded: keeps what fails in the agent from the trainer; entered several times.
    """
    entered = False
    with guarded:
        if loss is not None:
            loss.enter_pass(str(name).strip("/ ")[:80] or "unnamed")
            entered = True
    try:
        yield
    finally:
        with guarded:
            if entered and loss is not None:
                publish(loss.leave_pass())
