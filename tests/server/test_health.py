"""What ends unexpectedly is started again, and the server is not ready meanwhile."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from contextlib import closing

import pytest
from sqlalchemy import event

from rankscope.server import health
from rankscope.server.app import create_app
from rankscope.server.evaluation.budget import Budget, Overdue
from rankscope.server.health import Failures, Health, Kept, Sparingly
from rankscope.server.settings import Settings
from tests.support.servers.api import check_problem
from tests.support.servers.serve_app import serve_app
from tests.support.servers.service import eventually

PARTS = ("writer", "worker", "compactor", "lease", "watchdog")


class Boom(BaseException):
    """What nobody expects."""


@pytest.fixture
def in_threads(tmp_path):
    """An application whose background work is in threads of its process."""
    return create_app(Settings(database=f"sqlite:///{tmp_path / 'test.db'}", background="threads"))


class Held:
    """Ends each part of a server once, and keeps it from being started again until asked to."""

    def __init__(self, monkeypatch, parts):
        self.left = {*parts}
        self.go_on = threading.Event()
        made = Kept.__init__

        def spoilt(kept, name, work, *, health, stopping):
            def once():
                if name in self.left:
                    self.left.discard(name)
                    raise Boom(f"no {name} today")
                work()

            class Patient:
                """`stopping`, but a pause lasts until the test says so."""

                is_set = stopping.is_set

                @staticmethod
                def wait(timeout=None):
                    self.go_on.wait(60)
                    return stopping.is_set()

            made(kept, name, once, health=health, stopping=Patient())

        monkeypatch.setattr(Kept, "__init__", spoilt)


@pytest.mark.parametrize("part", PARTS)
def test_a_thread_that_ends_is_started_again_and_missed_meanwhile(
    tmp_path, monkeypatch, part, caplog
):
    held = Held(monkeypatch, [part])
    app = create_app(Settings(database=f"sqlite:///{tmp_path / 'a.db'}", background="threads"))
    with serve_app(app) as client:
        problem = eventually(
            lambda: (a := client.get("/readyz")).status_code == 503 and check_problem(a, 503),
            timeout_s=30,
        )
        assert problem["missing"] == [part]
        assert f"{part}: Boom: no {part} today" in problem["detail"]
        # It answers, and says what it knows.
        assert client.get("/healthz").status_code == 200
        assert "rankscope_background_restarts_total 1\n" in client.get("/metrics").text
        held.go_on.set()
        eventually(lambda: client.get("/readyz").status_code == 200, timeout_s=30)
        sent = {"run": "r", "rank": 0, "seq": 0}
        assert client.post("/api/v1/ingest", json=sent).status_code == 200
    said = [r for r in caplog.records if f"the {part} has ended unexpectedly" in r.message]
    assert len(said) == 1
    assert said[0].exc_info


def test_one_that_was_asked_to_end_is_not_started_again():
    stopping, state, ran = threading.Event(), Health(), []
    kept = Kept("x", lambda: ran.append(stopping.wait(30)), health=state, stopping=stopping)
    kept.start()
    stopping.set()
    kept.join(30)
    assert not kept.alive
    assert ran == [True]
    assert state.report() == {"missing": {}, "counts": {}, "failing": {}}


def test_failures_are_counted_and_logged_once(caplog):
    time, state = [0.0], Health()
    failures = Failures("evaluation", state, clock=lambda: time[0])
    pauses = []
    with caplog.at_level(logging.INFO):
        for _ in range(9):
            assert failures.due(7)
            failures.failed(7, "run otter", ValueError("bad"))
            begin = time[0]
            while not failures.due(7):
                time[0] += 0.5
            pauses.append(time[0] - begin)
        failures.failed(8, "run seal", ValueError("bad"))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert [r.message.partition(":")[0] for r in caplog.records] == ["run otter", "run seal"]
    assert state.report()["counts"] == {"evaluation_failures": 10}
    assert state.report()["failing"] == {"evaluation": 2}
    # One that took long is waited for longer.
    failures.failed(8, "run seal", Overdue(), took=60.0)
    time[0] += 1199.0
    assert not failures.due(8)
    time[0] += 1.0
    assert failures.due(8)
    failures.succeeded(8)
    failures.keep([])
    assert state.report()["failing"] == {"evaluation": 0}


def test_reports_of_two_processes_are_one():
    inside, outside = Health(), Health()
    inside.count("evaluation_failures")
    inside.missing("compactor", "why not")
    inside.failing("compaction", 2)
    outside.count("evaluation_failures")
    outside.receive(inside.report())
    assert outside.report() == {
        "missing": {"compactor": "why not"},
        "counts": {"evaluation_failures": 2},
        "failing": {"compaction": 2},
    }
    inside.there("compactor")
    outside.receive(inside.report())
    assert outside.report()["missing"] == {}


def test_what_never_returns_is_ended_and_what_does_is_not():
    budget, stopping = Budget(0.3), threading.Event()
    watching = threading.Thread(target=budget.watch, args=(stopping,))
    watching.start()
    try:
        with pytest.raises(Overdue), budget.spent():
            sum(1 for _ in iter(int, 1))
        # Where it gets lost it comes again.
        with budget.spent():
            for _ in range(3):
                with pytest.raises(Overdue):
                    sum(1 for _ in iter(int, 1))
        # Time in which nothing is computed does not count.
        with budget.spent():
            threading.Event().wait(2 * health._FIRST_PAUSE_S)
        with budget.spent():
            assert sum(range(1000)) == 499_500
    finally:
        stopping.set()
        watching.join(30)


def test_the_same_failure_is_said_sparingly(caplog):
    logger = logging.getLogger("rankscope.test")
    sparingly = Sparingly(seconds=0.2)
    for _ in range(50):
        sparingly.warn(logger, "disk full")
    time.sleep(0.25)
    sparingly.warn(logger, "disk full")
    assert [r.message for r in caplog.records] == [
        "disk full",
        "disk full (49 more since the last line)",
    ]


def test_a_disk_with_room_for_a_row_and_none_for_a_batch_is_not_ready(tmp_path):
    """A probe fits where batches do not; what is stored again says that it is over."""
    path = tmp_path / "full.db"
    app = create_app(Settings(database=f"sqlite:///{path}", evaluate=False))

    def post(client, seq, series):
        steps = list(range(400))
        columns = {
            f"m{seq}_{n}": {"steps": steps, "values": [(x * 1.37 + n) % 1 for x in steps]}
            for n in range(series)
        }
        sent = {"run": "r", "rank": 0, "seq": seq, "through_step": 400, "columns": columns}
        return client.post("/api/v1/ingest", json=sent).status_code

    with serve_app(app) as client:
        assert post(client, 0, 1) == 200
        with closing(sqlite3.connect(path)) as connection:
            pages = connection.execute("PRAGMA page_count").fetchone()[0]

        def limit(connection, record, proxy):
            connection.execute(f"PRAGMA max_page_count = {pages + 4}")

        event.listen(app.state.engine, "checkout", limit)
        assert post(client, 1, 40) == 503
        for seq in (2, 3):
            assert "takes nothing" in check_problem(client.get("/readyz"), 503)["detail"]
            assert post(client, seq, 40) == 503
        event.remove(app.state.engine, "checkout", limit)
        event.listen(
            app.state.engine,
            "checkout",
            lambda connection, *_: connection.execute("PRAGMA max_page_count = 1000000"),
        )
        assert post(client, 4, 40) == 200
        assert client.get("/readyz").status_code == 200
