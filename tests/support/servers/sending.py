"""A sender, or a delivery alone, with everything around it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.agent import wire
from rankscope.agent.delivery.deliver import Delivery
from rankscope.agent.delivery.outcome import Outcome
from rankscope.agent.delivery.pace import Pace
from rankscope.agent.delivery.queue import BatchQueue
from rankscope.agent.delivery.records import Records
from rankscope.agent.delivery.sender import Sender
from rankscope.agent.delivery.spool import SpoolFolder
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from tests.support.servers.collector import Collector

QUICK = Pace(
    batch=0.01,
    batch_away=0.01,
    heartbeat=0.05,
    connect_timeout=0.5,
    read_timeout=0.25,
    first_backoff=0.01,
    longest_backoff=0.05,
)

BODY = wire.encode(wire.Batch(run="r", rank=0, seq=0))


class Posting:
    """A delivery and its queue, without a sender's thread; what fails is posted again at once.

    Attributes:
        lost: reason -> points that were given up.
        reasons: why an uploader was lost.
    """

    def __init__(
        self, url: str, spool: Path, token: str | None = None, *, bounds: Any = None, **pace: Any
    ) -> None:
        self.lost: dict[str, int] = {}
        self.reasons: list[str] = []
        self.queue = BatchQueue(
            SpoolFolder(spool), lose=lambda *given: self.lose(*given), **(bounds or {})
        )
        usual = Pace(uploader_after=math.inf, first_backoff=0.0, longest_backoff=0.0)
        self.delivery = Delivery(
            self.queue,
            url,
            token,
            pace=replace(usual, **pace),
            on_uploader_lost=self.reasons.append,
        )
        self.delivery.connect()

    def lose(self, reason: str, points: int) -> None:
        self.lost[reason] = self.lost.get(reason, 0) + points

    @property
    def by_uploader(self) -> bool:
        """Whether the uploader's process is known to reach the server, and posts."""
        assert self.delivery.uploader is not None
        return self.delivery.uploader.proven

    def put(self, body: bytes = BODY, points: int = 0) -> None:
        self.queue.put(0, body, points=points, hello=False)

    def post(self, body: bytes = BODY) -> Outcome:
        """Posts what waits in the queue, or else a batch, and waits for what comes of it."""
        if not self.queue:
            self.put(body)
        delivered = self.delivery.deliver_next()
        assert delivered is not None
        return delivered[1]

    def close(self) -> None:
        self.delivery.close()
        for folder in self.queue.folders():
            folder.close()


class Rank:
    """A sender with everything around it, and what it was given."""

    def __init__(self, url: str, spool: Path, **changes: Any) -> None:
        options = Options(server=url, spool=spool, **changes.pop("options", {}))
        self.problems: list[str] = []
        self.produced = 0
        self.step = 0
        self.records = changes.pop("records", None) or Records()
        given: dict[str, Any] = {
            "options": options,
            "identity": Identity(run="run", rank=0, world_size=1),
            "hello": lambda: wire.Hello(started_at=1.0, config={"lr": 0.1}),
            "phase": lambda: "forward",
            "on_problem": self.problems.append,
            "pace": QUICK,
        }
        self.sender = Sender(self.records, **{**given, **changes})
        self.options = options

    def train(self, steps: int, *, fingerprints: bool = False) -> None:
        for step in range(self.step, self.step + steps):
            self.records.scalars(step, {"loss": float(step), "lr": 0.1})
            self.records.digests(step, {"parameters": step})
            self.produced += 3
            if fingerprints:
                self.records.fingerprint(
                    wire.Fingerprint(
                        step=step,
                        stage="parameters",
                        table="parameters",
                        digests=np.arange(4, dtype=np.uint64),
                        sketches=np.zeros((4, 64)),
                    )
                )
                self.produced += 1
            self.records.complete(step)
        self.step += steps

    def spooled_files(self) -> list[Path]:
        return sorted(self.options.spool.rglob("*.batch"))

    def accounted(self) -> int:
        counters = self.sender.counters
        return (
            counters.accepted + counters.waiting + counters.spooled + sum(counters.dropped.values())
        )


def assert_everything_arrived(collector: Collector, rank: Rank) -> None:
    assert collector.points("loss") == {step: float(step) for step in range(rank.step)}
    assert collector.stored() == rank.produced
