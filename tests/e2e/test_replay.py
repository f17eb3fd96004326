"""What is said of a run while it goes on is what a replay of its stored data says."""

from __future__ import annotations

import shutil
import threading

import pytest
from sqlalchemy import delete, func, select, update

from rankscope.server.alerts.lifecycle import TIME_BASED
from rankscope.server.evaluation.worker import Worker
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import open_engine, reading, writing
from rankscope.server.storage.judgement import evaluation
from tests.support.faultlab import ran
from tests.support.servers.service import eventually

pytestmark = pytest.mark.e2e

HEALTHY = "B04"
# A state, a link of the chain, a batch, a loss, a rank that begins late; and one that is healthy.
# Each is run with one of the samplings, as a run takes as long as a training does; the state, of
# which a request for more samples goes out, with both.
CASES = {
    "full": ("F06", "F18", "F24", "F54", HEALTHY),
    "default": ("F06", "F20", "F45", "F60", "F62", HEALTHY),
}


@pytest.fixture(scope="module", params=[pytest.param("full", marks=pytest.mark.jobs), "default"])
def sampling(request):
    return request.param


@pytest.fixture(scope="module")
def database(sampling, tmp_path_factory):
    """Of a fault lab's server, which has ended."""
    options = ["--ranks", "2", *(["--full-sampling"] if sampling == "full" else [])]
    folder = ran(tmp_path_factory.mktemp("replayed"), *options, "--case", *CASES[sampling])
    return folder / "lab" / "lab.db"


def said(engine):
    """Run -> what a person sees of its alerts, but for what the clock says."""
    with reading(engine) as connection:
        runs = connection.execute(select(schema.run.c.key, schema.run.c.id)).all()
        found = {}
        for key, name in runs:
            alerts = [
                alert
                for alert in evaluation.load_alerts(connection, run=key)
                if alert.kind not in TIME_BASED
            ]
            kinds = {alert.id: alert.kind for alert in alerts}
            found[name] = sorted(
                (
                    alert.kind,
                    alert.key,
                    alert.severity,
                    alert.state,
                    alert.first_step,
                    alert.seen_step,
                    alert.last_step,
                    alert.ranks,
                    alert.tensors,
                    alert.stage or "",
                    alert.title,
                    kinds.get(alert.parent or "", ""),
                )
                for alert in alerts
            )
        return found


def test_alerts_of_a_replay_are_those_of_the_live_run(sampling, database, tmp_path):
    cases = CASES[sampling]
    copy = tmp_path / "replayed.db"
    shutil.copy(database, copy)
    engine = open_engine(f"sqlite:///{copy}")
    live = said(engine)
    assert len(live) == len(cases)
    assert sum(bool(alerts) for alerts in live.values()) == len(cases) - cases.count(HEALTHY)
    with writing(engine) as connection:
        for table in (schema.alert, schema.alert_event, schema.check, schema.snapshot):
            connection.execute(delete(table))
        connection.execute(delete(schema.comparison))
        connection.execute(update(schema.run).values(evaluated=0, evaluated_step=-1))
    assert not any(said(engine).values())
    worker = Worker(engine, threading.Event())
    worker.start()
    try:
        eventually(lambda: waiting(engine) == 0, timeout_s=60)
    finally:
        worker.stop()
    assert said(engine) == live


def waiting(engine):
    """Runs that are not evaluated to their end."""
    left = schema.run.c.arrivals > schema.run.c.evaluated
    with reading(engine) as connection:
        return connection.scalar(select(func.count()).select_from(schema.run).where(left))
