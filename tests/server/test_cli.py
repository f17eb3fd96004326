"""Commands of the server side: wrong arguments, missing files, servers that are not there."""

import json
import resource
import socket
import sqlite3
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from rankscope.agent import wire
from rankscope.server import cli
from rankscope.server.app import create_app
from rankscope.server.commands import lists
from rankscope.server.commands.client import UNREACHABLE
from rankscope.server.commands.db import db
from rankscope.server.demo.processes import RANKSCOPE
from rankscope.server.settings import Settings
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, writing
from rankscope.server.storage.judgement import evaluation
from rankscope.server.storage.reading import runs
from tests.support.incidents import RUN, alert
from tests.support.servers.serve_app import serve_app
from tests.support.servers.service import eventually


def url(path):
    return f"sqlite:///{path}"


def refused(capsys):
    """What a command said on its way out; it must not have printed anything else."""
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def called(command, *arguments):
    try:
        return command(arguments)
    except SystemExit as ended:  # argparse's way
        return ended.code


@pytest.mark.parametrize("command", [lists.runs, lambda a: lists.alerts(["otter", *a])])
@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:8642", "ftp://host", "http://", "http://[::1", "http://host:99999"],
)
def test_what_is_no_address_of_a_server_is_reported(capsys, command, address):
    assert called(command, "--server", address) == cli.USAGE
    assert "is no URL of a server; write it like http://" in refused(capsys)


def test_a_server_that_is_not_there_is_reported(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert called(lists.runs, "--server", address) == UNREACHABLE
    said = refused(capsys)
    assert f"{address} does not answer: " in said
    assert "Connection refused. Is the server running?" in said


@pytest.mark.parametrize("body", [b"<html>", b"[1]"])
def test_something_else_that_answers_is_reported(capsys, body):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        address = f"http://127.0.0.1:{other.server_port}"
        assert called(lists.runs, "--server", address) == UNREACHABLE
        thread.join()
    assert "something else than Rankscope" in refused(capsys)


# `..` would be taken out of the path by the client: the alerts of all runs came as those of one.
@pytest.mark.parametrize("run", ["", ".", "..", "a/b"])
def test_what_is_no_id_of_a_run_is_reported(capsys, run):
    assert called(lists.alerts, run) == cli.USAGE
    assert "is no id of a run" in refused(capsys)


@pytest.fixture
def address(tmp_path):
    with serve_app(create_app(Settings(database=url(tmp_path / "r.db")))) as client:
        loss = {"loss": {"steps": [0], "values": [1.0]}}
        for run, columns in (("short", loss), ("n" * 200, loss), ("early", {})):
            batch = {"run": run, "rank": 0, "seq": 0, "columns": columns}
            assert client.post("/api/v1/ingest", json=batch).status_code == 200
        yield str(client.base_url).rstrip("/")


def test_runs_stand_in_columns_however_long_a_name_is(capsys, address):
    assert called(lists.runs, "--server", address) == cli.OK
    head, early, long, short = capsys.readouterr().out.splitlines()
    assert len(head) < 120
    assert long.startswith("n" * 200 + "  default")
    assert short.index("default") == early.index("default") == head.index("PROJECT")
    # No step has been done: -1 is nobody's number.
    assert early.split()[4] == "-"


def test_alerts_name_their_ranks_in_short(capsys, address):
    for rank in range(4):
        values = [1.0] * 7 + ["NaN" if rank < 3 else 1.0]
        loss = {"loss": {"steps": list(range(8)), "values": values}}
        sent = {"run": "nans", "rank": rank, "seq": 0, "world_size": 4, "columns": loss}
        sent |= {"through_step": 7, "state": "finished"}
        httpx.post(f"{address}/api/v1/ingest", json=sent).raise_for_status()
    reported = []

    def found():
        assert called(lists.alerts, "nans", "--server", address) == cli.OK
        reported[:] = capsys.readouterr().out.splitlines()
        return reported != ["No alerts."]

    eventually(found, timeout_s=60)
    assert reported[1] == "  since step 7, ranks 0-2"


def test_alerts_of_further_models_are_listed_with_their_run(capsys, address):
    """Each of them has a run of its own, and the verdict of the first counts it."""
    hello = {"host": "h", "pid": 1, "local_rank": 0, "started_at": 0.0}
    for run, last in (("gan", 1.0), ("gan.2", "NaN")):
        loss = {"loss": {"steps": list(range(8)), "values": [1.0] * 7 + [last]}}
        sent = {"run": run, "rank": 0, "seq": 0, "world_size": 1, "columns": loss}
        sent |= {"through_step": 7, "state": "finished"}
        sent |= {"hello": {**hello, "config": {"first_run": "gan"} if run == "gan.2" else {}}}
        httpx.post(f"{address}/api/v1/ingest", json=sent).raise_for_status()
    reported = []

    def found():
        assert called(lists.alerts, "gan", "--server", address) == cli.OK
        reported[:] = capsys.readouterr().out.splitlines()
        return reported != ["No alerts."]

    eventually(found, timeout_s=60)
    assert reported[1:3] == [
        "  since step 7",
        "  in run gan.2, of a further model in the same processes",
    ]


def test_what_follows_is_shown_with_its_root_which_is_as_grave(capsys, tmp_path):
    database = url(tmp_path / "r.db")
    with serve_app(create_app(Settings(database=database, evaluate=False))) as client:
        loss = {"loss": {"steps": [0], "values": [1.0]}}
        batch = {"run": RUN, "rank": 0, "seq": 0, "columns": loss}
        assert client.post("/api/v1/ingest", json=batch).status_code == 200
        engine = open_engine(database)
        with writing(engine) as connection:
            alerts = (
                alert("update.missing", 0, id="root", key="held", consequences=("a", "b")),
                alert("gradient.accumulating", 1, id="b", severity="critical", parent="root"),
                alert("clipping.saturated", 0, id="a", severity="info", parent="root"),
                alert("loss.spike", 5, id="other"),
                alert("loss.plateau", 9, id="newest", severity="info"),
                alert("loss.nonfinite", 9, id="over", severity="critical", state="resolved"),
            )
            key = runs.find_run(connection, RUN).key
            evaluation.save_alerts(connection, run=key, alerts=alerts)
        engine.dispose()
        asked = (RUN, "--server", str(client.base_url).rstrip("/"))
        assert called(lists.alerts, *asked) == cli.OK
        reported = capsys.readouterr().out.splitlines()
        roots = [line.split()[:2] for line in reported if line and not line.startswith(" ")]
        # What somebody has to act on first, whatever came last.
        assert roots == [
            ["CRITICAL", "update.missing"],
            ["WARNING", "loss.spike"],
            ["INFO", "loss.plateau"],
            ["CRITICAL", "loss.nonfinite"],
        ]
        place = reported.index("  consequences: 2")
        assert [line.split()[:2] for line in reported[place + 1 : place + 3]] == [
            ["INFO", "clipping.saturated"],
            ["CRITICAL", "gradient.accumulating"],
        ]
        # Scripts read root causes, one an item.
        assert called(lists.alerts, *asked, "--json") == cli.OK
        items = json.loads(capsys.readouterr().out)["items"]
        assert {a["id"]: a["severity"] for a in items} == {
            "root": "critical",
            "other": "warning",
            "newest": "info",
            "over": "critical",
        }
        path = f"/api/v1/runs/{RUN}/alerts"
        for severity, expected in (
            ("critical", {"root", "over"}),
            ("warning", {"other"}),
            ("info", {"newest"}),
        ):
            found = client.get(path, params={"severity": severity}).json()["items"]
            assert {a["id"] for a in found} == expected
        assert client.get("/api/v1/alerts/root").json()["severity"] == "critical"
        assert client.get("/api/v1/runs").json()["items"][0]["worst_alert"] == {
            "id": "root",
            "kind": "update.missing",
            "severity": "critical",
            "title": "update.missing seen at 0",
        }


def test_no_run_is_reported(capsys, address):
    assert called(lists.runs, "--server", address, "--project", "none") == cli.OK
    assert capsys.readouterr().out == "No runs.\n"
    assert called(lists.runs, "--server", address, "--project", "none", "--json") == cli.OK
    assert json.loads(capsys.readouterr().out)["items"] == []


def test_a_list_that_is_cut_says_so(capsys, tmp_path):
    with serve_app(create_app(Settings(database=url(tmp_path / "r.db"), evaluate=False))) as client:
        for number in range(101):
            batch = wire.Batch(run=f"run{number}", rank=0, seq=0)
            client.post(
                "/api/v1/ingest",
                content=wire.encode(batch),
                headers={"Content-Type": wire.CONTENT_TYPE},
            )
        assert called(lists.runs, "--server", str(client.base_url)) == cli.OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 102
    assert lines[-1] == "These are the newest 100; the dashboard has the others."


@pytest.mark.parametrize(
    "command", [lambda a: cli.serve(["--port", "0", *a]), lambda a: db([*a, "current"])]
)
def test_a_folder_that_is_not_there_is_named(capsys, tmp_path, command):
    assert called(command, "--db", url(tmp_path / "none" / "r.db")) == cli.USAGE
    assert f"there is no folder {tmp_path / 'none'}; make it first" in refused(capsys)


def test_a_file_of_settings_that_is_not_there_is_named(capsys, tmp_path):
    missing = tmp_path / "none.toml"
    assert called(cli.serve, "--detectors", str(missing)) == cli.USAGE
    assert refused(capsys) == f"rankscope: {missing}: No such file or directory\n"


def test_why_it_cannot_listen_is_distinguished(capsys, tmp_path):
    database = ("--db", url(tmp_path / "r.db"))
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        assert called(cli.serve, "--port", port, *database) == cli.USAGE
        assert "Is a server running there already? --port 0 takes a free port." in refused(capsys)
    # An address of a network for documentation (RFC 5737): no machine has it.
    elsewhere = ("--host", "192.0.2.1", "--port", "0", "--no-authentication")
    assert called(cli.serve, *elsewhere, *database) == cli.USAGE
    said = refused(capsys)
    assert "--host is an address of this machine" in said
    assert "already" not in said


@pytest.mark.parametrize("action", [("prune", "--older-than", "1d"), ("partition",)])
def test_a_database_that_nobody_has_used_is_reported(capsys, tmp_path, action):
    assert called(db, *action, "--db", url(tmp_path / "new.db")) == cli.USAGE
    assert "is empty: no server has used it. Is it the right one?" in refused(capsys)


@pytest.mark.parametrize("action", [("upgrade",), ("prune", "--older-than", "1d")])
def test_a_database_of_a_newer_version_is_left_alone(capsys, tmp_path, action):
    path = tmp_path / "newer.db"
    engine = open_engine(url(path))
    migrate.upgrade(engine)
    engine.dispose()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    assert called(db, *action, "--db", url(path)) == cli.USAGE
    said = refused(capsys)
    assert "a newer one has migrated it. Update Rankscope, or use another database." in said
    assert "rankscope db upgrade" not in said


@pytest.mark.parametrize("age", ["0d", "00h"])
def test_an_age_of_nothing_does_not_delete_all_runs(tmp_path, capsys, age):
    path = tmp_path / "some.db"
    assert called(db, "prune", "--older-than", age, "--database", url(path)) == 2
    assert "would be all runs" in refused(capsys)
    assert not path.exists()


def test_few_open_files_are_reported_and_all_there_are_are_taken(tmp_path):
    """Each rank that posts keeps a connection open."""
    few = 1000
    command = [*RANKSCOPE, "serve", "--port", "0", "--db", f"sqlite:///{tmp_path / 'test.db'}"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, few)),
    ) as server:
        try:
            assert server.stdout.readline().startswith("Rankscope listens on")
            assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (few, few)
        finally:
            server.terminate()
            _, err = server.communicate(timeout=60)
    assert f"may open {few} files" in err
    assert "ulimit -n" in err
