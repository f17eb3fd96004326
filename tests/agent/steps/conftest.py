"""What listens to torch's own hooks is of the test that runs."""

import gc

import pytest

from rankscope.agent.steps import hooks, joined


@pytest.fixture(autouse=True)
def nobody_else_listens() -> None:
    """Monitors that earlier tests let go of or broke on purpose are notified of nothing more.

    What listens is held weakly, but the cycles of a failure hold it until they are collected.
    """
    gc.collect()
    for watching in hooks._steppers:
        watching.end()
    for reference in joined._listeners:
        if (listener := reference()) is not None:
            joined.unlisten(listener)
    assert not hooks._steppers
    assert not joined._listeners
