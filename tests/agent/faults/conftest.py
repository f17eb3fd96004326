"""A trainer that is watched by an agent with a fault in it, and a real collector at the far end."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rankscope import agent
from rankscope.agent.delivery import process_exit, sender
from rankscope.agent.delivery.pace import Pace
from rankscope.agent.wire import Event
from tests.support import listening, saboteur
from tests.support.servers.collector import Collector

CLOSE_SECONDS = 5.0
# For a machine that has other things to do than to wake us up in time.
SLACK_SECONDS = 0.5


@pytest.fixture(scope="session")
def alone() -> str:
    """What the training comes to without the agent."""
    digest = saboteur.train().digest
    # What that has imported, the garbage collector need not go through after each test.
    gc.collect()
    gc.freeze()
    return digest


class House:
    """Trains with the agent, and says what came of it."""

    def __init__(self, collector: Collector, spool: Path, alone: str) -> None:
        self.collector = collector
        self.spool = spool
        self._alone = alone
        self.monitors: list[Any] = []
        self.options: dict[str, Any] = {}

    def attach(self, model: Any, optimizer: Any) -> Any:
        given = {"server": self.collector.url, "run": "run", "spool": self.spool} | self.options
        self.monitors.append(agent.attach(model, optimizer, **given))
        return self.monitors[-1]

    def train(self, **changes: Any) -> saboteur.Outcome:
        """Trains; fails where anything differs from a training without the agent."""
        outcome = saboteur.train(self.attach, **changes)
        if "steps" not in changes:
            assert outcome.digest == self._alone
        assert outcome.close_seconds < CLOSE_SECONDS + SLACK_SECONDS
        return outcome

    @property
    def faults(self) -> list[Event]:
        """What the agent reported to the server of its own faults."""
        events = [event for batch in self.collector.batches for event in batch.events]
        return [event for event in events if event.kind == "agent.fault"]

    def reported_once(self, part: str, fragment: str) -> None:
        """One fault was reported to the server, in that part."""
        texts = [event.text for event in self.faults]
        assert len(texts) == 1, texts
        assert texts[0].startswith(f"{part}: "), texts
        assert fragment in texts[0]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.fixture
def house(
    collector: Collector, tmp_path: Path, alone: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[House]:
    # Ten times as fast as in earnest, so that a short training has many rounds of the sender.
    quick = functools.partial(
        Pace,
        batch=0.04,
        batch_away=0.04,
        heartbeat=0.2,
        read_timeout=0.5,
        first_backoff=0.02,
        longest_backoff=0.1,
    )
    monkeypatch.setattr(sender, "Pace", quick)
    made = House(collector, tmp_path / "spool", alone)
    yield made
    for monitor in made.monitors:
        monitor.close()
    # Where closing is what failed, something stays in torch: not for the next test.
    made.monitors.clear()
    process_exit._reports.clear()
    import_module("rankscope.agent.attach")._monitors.clear()  # nobody may have attached
    listening.end_all()


@pytest.fixture
def hang(request: pytest.FixtureRequest) -> Callable[..., saboteur.Hang]:
    """Makes functions that hang until the test is over."""

    def make(original: Callable[..., Any] | None = None) -> saboteur.Hang:
        made = saboteur.Hang(original)
        request.addfinalizer(made.release)
        return made

    return make
