"""What the server says of a training: its real worker over what real agents have posted."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rankscope.agent import wire
from rankscope.server.evaluation.worker import Worker
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.judgement.alerts import findings, list_alerts
from rankscope.server.storage.reading import runs
from rankscope.server.window import Alert, Check


@dataclass(frozen=True)
class Judged:
    """A run as its pages show it.

    Attributes:
        alerts: all of them, those that follow from others too, oldest first.
        checks: kind -> last answer.
    """

    alerts: tuple[Alert, ...]
    checks: dict[str, Check]

    @property
    def roots(self) -> list[Alert]:
        """Those that follow from no other."""
        return [alert for alert in self.alerts if alert.parent is None]

    def kinds(self, severity: str = "warning") -> list[str]:
        """Kinds of the roots of at least this severity, sorted."""
        lowest = wire.SEVERITIES.index(severity)
        return sorted(a.kind for a in self.roots if wire.SEVERITIES.index(a.severity) >= lowest)

    def one(self, kind: str) -> Alert:
        """The only alert of a kind."""
        (alert,) = (a for a in self.alerts if a.kind == kind)
        return alert

    def below(self, alert: Alert) -> list[str]:
        """Kinds of what follows from an alert, sorted."""
        return sorted(a.kind for a in self.alerts if a.parent == alert.id)


def judged(batches: Iterable[wire.Batch], folder: Path) -> Judged:
    """Stores what agents have posted, in its order, and evaluates it.

    Args:
        batches: of one run.
        folder: for the database.
    """
    posted = list(batches)
    engine = open_engine(f"sqlite:///{folder / 'judged.db'}")
    try:
        migrate.upgrade(engine)
        worker = Worker(engine, threading.Event(), now=lambda: 1000.0, strict=True)
        for batch in posted:
            with writing(engine) as connection:
                store_batch(connection, batch, received_at=1000.0)
        worker.sweep()
        with reading(engine) as connection:
            found = runs.find_run(connection, posted[0].run)
            assert found is not None
            alerts, _ = list_alerts(connection, limit=200, run=found.key, consequences=True)
            said = findings(connection, runs={found.key: found.id}, now=1000.0)[found.key]
        return Judged(tuple(sorted(alerts, key=lambda a: (a.first_step, a.id))), said.checks)
    finally:
        engine.dispose()
