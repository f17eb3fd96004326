"""A real job of some ranks, and what the server says of what its agents have posted."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select

from rankscope.agent import wire
from rankscope.server.evaluation.worker import Worker
from rankscope.server.storage import schema
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from tests.support.jobs.ranks import run_ranks
from tests.support.servers.collector import Collector


@dataclass(frozen=True)
class JudgedJob:
    """Attributes: rows of the tables `alert` (roots alone) and `check`, by kind; what came."""

    alerts: dict[str, Any]
    checks: dict[str, Any]
    collector: Collector

    def words(self, name: str, rank: int = 0) -> dict[int, int]:
        """Step -> digest of a rank."""
        return {
            int(step): int(value)
            for batch in self.collector.batches
            if batch.rank == rank and name in batch.words
            for step, value in zip(*_points(batch.words[name]), strict=True)
        }


def judged_job(
    script: Path,
    *arguments: str,
    ranks: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> JudgedJob:
    """Runs a script, which reads RANK and WORLD_SIZE, to its end, and judges what came of it."""
    with Collector() as collector:
        run_ranks(
            script,
            *arguments,
            ranks=ranks,
            folder=folder,
            environment={
                "PYTHONPATH": str(Path(__file__).parents[3]),
                "OMP_NUM_THREADS": "1",
                "RANKSCOPE_SERVER": collector.url,
                "RANKSCOPE_RUN": "run",
                **(environment or {}),
            },
            timeout_s=240,
        ).check()
    engine = open_engine(f"sqlite:///{folder / 'judged.db'}")
    migrate.upgrade(engine)
    try:
        for batch in sorted(collector.batches, key=_order):
            with writing(engine) as connection:
                store_batch(connection, batch, received_at=1000.0)
        worker = Worker(engine, threading.Event(), now=lambda: 1001.0, strict=True)
        worker.sweep()
        worker.stop()
        with reading(engine) as connection:
            alerts = connection.execute(select(schema.alert)).all()
            checks = connection.execute(select(schema.check)).all()
    finally:
        engine.dispose()
    return JudgedJob(
        {row.kind: row for row in alerts if row.parent is None},
        {row.kind: row for row in checks},
        collector,
    )


def _order(batch: wire.Batch) -> tuple[int, int]:
    return batch.seq, batch.rank


def _points(column: wire.Column) -> tuple[Any, Any]:
    return column.steps, column.values
