"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from rankscope.agent import guard

# How long an example takes says more about the machine than about the code. The same examples each
# time: whether a commit is good must not be a matter of luck. EXPLORE=1 looks for new ones.
settings.register_profile("rankscope", deadline=None, derandomize="EXPLORE" not in os.environ)
settings.load_profile("rankscope")

# A developer's own settings must not reach the agents and servers under test.
for name in [name for name in os.environ if name.startswith("RANKSCOPE_")]:
    del os.environ[name]


@pytest.fixture(autouse=True)
def _strict_agent(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the agent swallows in production fails here, unless the test is about that."""
    contained: list[tuple[str, Exception]] = []

    def observe(probe: str, fault: Exception) -> None:
        contained.append((probe, fault))

    guard.observers.append(observe)
    yield
    guard.observers.remove(observe)
    if contained and request.node.get_closest_marker("contained") is None:
        probe, fault = contained[0]
        raise AssertionError(f"the agent contained a fault of {probe!r}") from fault
