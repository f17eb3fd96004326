"""The Python client against a real server: every route, each answer as what its type says."""

import math
import re
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl, urlsplit

import pytest
import urllib3

from rankscope.agent import wire
from rankscope.client import Client, NotAllowed, NotFound, Problem, Unreachable, questions
from rankscope.client.models import AlertDetail, Matrix, Run, RunDetail
from rankscope.server.app import create_app
from rankscope.server.demo.processes import free_port
from rankscope.server.settings import Settings
from rankscope.server.storage.access import tokens
from rankscope.server.storage.database.engine import writing
from rankscope.server.storage.judgement import notifications
from tests.support.runs.fixture_run import SyntheticRun, post, wait_until_evaluated
from tests.support.servers.api import batch, column
from tests.support.servers.receivers import hook
from tests.support.servers.serve_app import serve_app

NAN_AT = 33
OTTER = SyntheticRun(run="otter", ranks=4, steps=200, desync=(2, 60), told=True, buckets=4)
GONE = SyntheticRun(run="gone", ranks=1, steps=20)
HERON = SyntheticRun(run="heron", ranks=2, steps=120, nan=(1, NAN_AT), project="birds", buckets=4)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    database = tmp_path_factory.mktemp("client") / "test.db"
    return create_app(Settings(database=f"sqlite:///{database}"))


@pytest.fixture(scope="module")
def address(app):
    with serve_app(app) as served:
        url = str(served.base_url).rstrip("/")
        for run in (OTTER, HERON, GONE):
            post(url, run)
        for run in (OTTER, HERON, GONE):
            wait_until_evaluated(url, run)
        yield url


@pytest.fixture
def client(address):
    with Client(address) as made:
        yield made


@pytest.fixture
def asked(monkeypatch):
    """Method, path and names of the parameters of each request that is sent meanwhile."""
    found = []
    send = urllib3.PoolManager.request

    def request(self, method, url, **more):
        parts = urlsplit(url)
        found.append((method, parts.path, {name for name, _ in parse_qsl(parts.query)}))
        return send(self, method, url, **more)

    monkeypatch.setattr(urllib3.PoolManager, "request", request)
    return found


def call_everything(client, app):
    """Calls each method with all that it takes, and reads each list to its end."""
    later = datetime.now(UTC) + timedelta(hours=1)
    list(client.runs(project="digits", state="finished", q="ott", order="attention"))
    by_steps = [run.last_step for run in client.runs(project="digits", sort="-last_step")]
    assert by_steps == sorted(by_steps, reverse=True)
    assert isinstance(client.run("otter"), RunDetail)
    assert client.change_tags("otter", add=["kept", "old"]).tags == ["kept", "old"]
    assert client.change_tags("otter", remove=["old"]).tags == ["kept"]
    assert [run.id for run in client.runs(tags=["kept"])] == ["otter"]
    assert [rank.rank for rank in client.data("otter", from_step=1, to_step=9).ranks] == []
    assert {project.name for project in client.projects()} >= {"digits", "birds"}
    assert [run.id for run in client.compare("otter", "heron").runs] == ["otter", "heron"]
    assert next(iter(client.events("otter"))).name == "state"
    names = {metric.name for metric in client.metrics("otter", tensors=False)}
    assert "loss" in names
    assert client.metric_families("otter")[0].tensors
    client.series("otter", "loss", ranks=[0, 3], from_step=5, to_step=150, max_points=20)
    list(client.divergence("otter", from_step=50, to_step=80, stage="parameters"))
    assert isinstance(client.distances("otter", stage="parameters"), Matrix)
    client.ingest({"version": 1, "run": "wren", "rank": 0, "seq": 0, "session": "s"})
    some = {"state": "open", "severity": "critical", "kind": "desync.*", "rank": 2, "q": "rank"}
    list(client.alerts(project="digits", consequences=True, **some))
    found = list(client.run_alerts("otter", consequences=True, beside=True, **some))
    alert = client.alert(found[0].id)
    assert isinstance(alert, AlertDetail)
    assert client.alert_context(alert.id).console == []
    known = client.acknowledge(alert.id, name="Ada", reason="seen", until=later)
    assert known.acknowledgement.until == later
    assert client.take_back_acknowledgement(alert.id).acknowledgement is None
    silence = client.silence("otter", alert.kind, name="Ada", reason="known", seconds=60)
    assert [s.id for s in client.silences("otter")] == [silence.id]
    client.end_silence(silence.id)
    assert list(client.silences("otter")) == []
    verdict = client.verdict("otter", fail_on="critical", kinds=[alert.kind], ignore=["loss.spike"])
    assert verdict.verdict == "fail"
    assert client.fleet(project="digits", days=2).days == 2
    assert {item.kinds[0] for item in client.detectors().items}
    assert client.run_detectors("otter").detectors
    client.project_detectors("birds")
    client.set_project_detectors("birds", {"loss.spike": False}, profile="adversarial")
    after = client.change_project_detectors("birds", {"detectors": {"loss.spike": None}})
    assert (after.profile, after.overrides["detectors"]) == ("adversarial", {})
    with hook() as receiver, writing(app.state.engine) as connection:
        target = notifications.add_target(
            connection,
            url=f"webhook://127.0.0.1:{receiver.port}/here",
            name="ops",
            projects=["none"],
            kinds=None,
            severity="info",
            now=0.0,
        )
        connection.commit()
        assert [t.id for t in client.notification_targets()] == [target.id]
        assert client.test_notification_target(target.id).delivered
    list(client.notifications(run="otter", alert=alert.id, pending=True, limit=10))
    acts = [entry.act for entry in client.audit(act="silence.create")]
    assert acts == ["silence.create"]
    assert client.is_alive()
    assert client.is_ready()
    assert "rankscope_batches_total" in client.server_metrics()
    client.baseline("otter")
    assert [run.id for run in client.runs(baseline=True)] == ["otter"]
    client.baseline("otter", marked=False)
    client.delete_run("gone")


def test_every_route_is_there_with_all_that_it_takes(app, client, asked):
    call_everything(client, app)
    missing = []
    for path, methods in app.openapi()["paths"].items():
        pattern = re.compile(re.sub(r"\{\w+\}", "[^/]+", path))
        for method, operation in methods.items():
            sent = [n for m, p, n in asked if m == method.upper() and pattern.fullmatch(p)]
            if not sent:
                missing.append(f"{method.upper()} {path}")
            takes = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"}
            # Pages are the client's own matter; whether it goes on to the next is tried below.
            takes -= {"cursor"}
            missing += [f"{path}?{name}" for name in takes - set().union(*sent)]
    assert missing == []


def test_values_are_what_they_are(client):
    before = datetime.now(UTC)
    [run] = client.runs(q="heron")
    assert isinstance(run, Run)
    assert run.ranks == [0, 1]
    assert before - timedelta(minutes=30) < run.started_at < before
    [line] = client.series("heron", ranks=[1]).series
    assert math.isnan(line.values[NAN_AT])
    wanted = HERON.values("loss", 1)
    assert line.values[:NAN_AT] == pytest.approx(wanted[:NAN_AT])
    assert line.steps == list(range(120))
    [alert] = client.run_alerts("otter", kind="desync.*")
    assert alert.ranks == [2]
    assert alert.since.by == alert.first_step


def test_what_is_sent_comes_back(client):
    values = [1.0, math.nan, math.inf, -math.inf]
    sent = wire.encode(batch(run="packed", columns={"loss": column(range(4), values)}))
    assert client.ingest(sent).accepted == 4
    assert client.ingest(sent).duplicate
    assert client.ingest(wire.to_json(wire.decode(sent)) | {"run": "plain"}).accepted == 4
    for run in ("packed", "plain"):
        [line] = client.series(run).series
        assert repr(line.values) == repr(values)


def test_lists_are_read_page_by_page(client, asked, monkeypatch):
    monkeypatch.setattr(questions, "_PAGE", "2")
    names = [metric.name for metric in client.metrics("otter")]
    assert len(names) == len(set(names)) > 6
    pages = [n for _, path, n in asked if path.endswith("/metrics")]
    assert len(pages) == math.ceil(len(names) / 2)
    assert ["cursor" in page for page in pages] == [False] + [True] * (len(pages) - 1)
    asked.clear()
    next(client.metrics("otter"))
    assert len(asked) == 1


def test_events_come_as_they_happen(address, client):
    post(address, SyntheticRun(run="live", ranks=1, steps=40, state="running"), end=20)
    events = client.events("live")
    first = next(events)
    assert (first.name, first.data["state"]) == ("state", "running")
    post(address, SyntheticRun(run="live", ranks=1, steps=40, state="running"), first=20)
    while (event := next(events)).name != "points":
        pass
    assert event.data["last_step"] == 39


def test_errors_say_what_the_server_says(client):
    with pytest.raises(NotFound, match="no run 'nobody'") as missing:
        client.run("nobody")
    assert (missing.value.status, missing.value.title) == (404, "Not Found")
    with pytest.raises(NotFound):
        next(client.events("nobody"))
    with pytest.raises(Problem) as wrong:
        client.series("otter", max_points=1)
    assert wrong.value.status == 422
    assert wrong.value.body["errors"][0]["where"] == "query.max_points"
    for name in ("", ".", ".."):
        with pytest.raises(ValueError, match="no id"):
            client.run(name)
    # No run has such an id, and it is no way to another route.
    with pytest.raises(NotFound):
        client.run("../detectors")
    with (
        Client(f"http://127.0.0.1:{free_port()}") as nobody,
        pytest.raises(Unreachable, match="refused"),
    ):
        nobody.run("otter")


def test_a_token_is_shown(tmp_path, monkeypatch):
    app = create_app(Settings(database=f"sqlite:///{tmp_path / 'test.db'}"))
    with serve_app(app) as served:
        url = str(served.base_url)
        with writing(app.state.engine) as connection:
            _, secret = tokens.create(
                connection, name="ci", scopes=["read"], projects=None, now=time.time()
            )
        with Client(url) as anybody, pytest.raises(NotAllowed) as refused:
            list(anybody.runs())
        assert refused.value.status == 401
        monkeypatch.setenv("RANKSCOPE_SERVER", url)
        monkeypatch.setenv("RANKSCOPE_TOKEN", secret)
        with Client() as known:
            assert list(known.runs()) == []
            with pytest.raises(NotAllowed) as refused:
                known.ingest({"version": 1, "run": "r", "rank": 0, "seq": 0, "session": "s"})
        assert refused.value.status == 403


@pytest.mark.parametrize("token", ["two\nlines", "\u0442\u043e\u043a\u0435\u043d", "a b"])
def test_a_token_that_cannot_be_one_is_refused_and_not_shown(token):
    with pytest.raises(ValueError, match="ASCII text without spaces") as refused:
        Client(token=token)
    assert token not in str(refused.value)


def test_it_loads_nothing_heavy_and_the_commands_load_little_of_it():
    program = (
        "import sys; import {module}; print(*sorted(m for m in sys.modules"
        " if m.split('.')[0] in ('numpy', 'pydantic', 'fastapi', 'sqlalchemy', 'torch')"
        " or m.startswith('rankscope.client.')))"
    )

    def loaded(module):
        words = [sys.executable, "-c", program.format(module=module)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()

    every = loaded("rankscope.client.rest")
    assert "rankscope.client.models.runs" in every
    assert [name for name in every if not name.startswith("rankscope.")] == []
    of_the_gate = [name for name in loaded("rankscope.server.gate.gate") if "client" in name]
    assert of_the_gate == ["rankscope.client.errors", "rankscope.client.http"]
