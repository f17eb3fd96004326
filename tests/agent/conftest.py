"""A training that is watched, and a sender with its collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.agent.probes.loss import sources as loss_sources
from rankscope.agent.probes.loss.training import Loss
from tests.support import listening
from tests.support.probe_harness import Harness
from tests.support.servers.collector import Collector
from tests.support.servers.sending import Posting, Rank
from tests.support.watching import Watching


@pytest.fixture
def nobody_else_listens() -> None:
    """What earlier tests let go of or broke on purpose is notified of nothing more."""
    listening.end_all()


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    with Watching(tmp_path) as made:
        yield made


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture
def away() -> Iterator[Collector]:
    """A collector that does not run yet."""
    made = Collector()
    yield made
    made.stop()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(collector: Collector, **changes: Any) -> Rank:
        made.append(Rank(collector.url, tmp_path / "spool", **changes))
        made[-1].sender.start()
        return made[-1]

    yield make
    for one in made:
        one.sender.close(timeout=0.2)


@pytest.fixture
def watch() -> Iterator[Callable[..., Harness]]:
    """Harnesses with the probe of the loss alone."""
    made: list[Harness] = []

    def attach(model: Any, optimizer: Any = None, **options: Any) -> Harness:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        made.append(Harness(model, optimizer, probes=(Loss,), **options))
        return made[-1]

    yield attach
    for harness in made:
        harness.close()
    assert not loss_sources._taps


@pytest.fixture
def deliver_to(tmp_path: Path) -> Iterator[Callable[..., Posting]]:
    """Makes deliveries that are closed in the end."""
    made: list[Posting] = []

    def posting(url: str, *given: Any, **pace: Any) -> Posting:
        made.append(Posting(url, tmp_path / f"spool{len(made)}", *given, **pace))
        return made[-1]

    yield posting
    for one in made:
        one.close()
