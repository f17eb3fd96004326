"""Threads of their own for what must not wait for those that answer queries."""

from __future__ import annotations

from anyio import CapacityLimiter
from starlette.datastructures import State


def own(state: State, what: str, number: int) -> CapacityLimiter:
    """As many threads as work at `what` at a time; they belong to an application's event loop."""
    if not hasattr(state, "threads"):
        state.threads = {}
    limiters: dict[str, CapacityLimiter] = state.threads
    if what not in limiters:
        limiters[what] = CapacityLimiter(number)
    return limiters[what]
