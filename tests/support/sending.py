"""A sender with everything around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rankscope.agent import wire
from rankscope.agent.delivery.records import Records
from rankscope.agent.delivery.sender import Pace, Sender
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from tests.support.collector import Collector

QUICK = Pace(
    batch=0.01,
    batch_away=0.01,
    heartbeat=0.05,
    connect_timeout=0.5,
    read_timeout=0.25,
    first_backoff=0.01,
    longest_backoff=0.05,
)


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

    def train(self, steps: int, *, prints: bool = False) -> None:
        for step in range(self.step, self.step + steps):
            self.records.scalars(step, {"loss": float(step), "lr": 0.1})
            self.records.words(step, {"parameters": step})
            self.produced += 3
            if prints:
                self.records.fingerprint(
                    wire.Print(
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


def everything_arrived(collector: Collector, rank: Rank) -> None:
    assert collector.points("loss") == {step: float(step) for step in range(rank.step)}
    assert collector.stored() == rank.produced
