"""The audit log: each administrative act has its entry, and nothing else has one."""

import getpass
import json
import socket

from rankscope.agent import wire
from rankscope.server.app import create_app
from rankscope.server.commands.db import db
from rankscope.server.commands.notify import notify
from rankscope.server.commands.token import token
from rankscope.server.settings import Settings
from rankscope.server.storage.database.engine import open_engine
from rankscope.server.storage.maintenance.pruning import delete_run
from rankscope.server.storage.reading.runs import find_run
from tests.support.servers.api import batch, check_problem, column, desynced, evaluated, get, post
from tests.support.servers.serve_app import serve_app


def log(client, **asked):
    return get(client, "/audit", **asked)["items"]


def finished(client, run):
    sent = batch(run=run, state="finished", columns={"loss": column([0], [1.0])})
    assert post(client, sent).status_code == 200


def test_alerts_and_silences(client):
    desynced(client)
    evaluated(client)
    [alert] = get(client, "/runs/otter/alerts")["items"]
    path = f"/api/v1/alerts/{alert['id']}/acknowledge"
    said = {"name": "Ada", "reason": "known", "seconds": 3600}
    assert client.post(path, json=said).status_code == 200
    assert client.delete(path).status_code == 200
    silence = client.post(
        "/api/v1/runs/otter/silences", json={"kind": "loss.spike", "name": "Ada", "reason": "noise"}
    ).json()
    assert client.delete(f"/api/v1/silences/{silence['id']}").status_code == 204
    entries = log(client)
    assert [one["act"] for one in entries] == [
        "silence.end",
        "silence.create",
        "alert.unacknowledge",
        "alert.acknowledge",
    ]
    end, created, _, known = entries
    assert (end["subject"], created["subject"]) == (silence["id"], silence["id"])
    assert created["details"] == {
        "run": "otter",
        "kind": "loss.spike",
        "name": "Ada",
        "reason": "noise",
        "until": None,
    }
    assert known["subject"] == alert["id"]
    assert known["details"]["until"] > known["at"]
    # Of whom nothing is asked there is nothing to know but the address.
    assert {(one["name"], one["token"]) for one in entries} == {("", "")}
    assert all(one["origin"] for one in entries)
    assert [one["act"] for one in log(client, act="silence.end")] == ["silence.end"]


def test_what_was_refused_is_no_act(client):
    finished(client, "otter")
    for method, path in (
        ("DELETE", "/silences/none"),
        ("POST", "/alerts/none/acknowledge"),
        ("DELETE", "/runs/none"),
    ):
        check_problem(client.request(method, f"/api/v1{path}"), 404)
    changes = {"detectors": {"no.such": False}}
    check_problem(client.put("/api/v1/projects/default/detectors", json=changes), 422)
    post(client, batch(run="busy", columns={"loss": column([0], [1.0])}))
    check_problem(client.delete("/api/v1/runs/busy"), 409)
    assert log(client) == []


def test_settings_and_deletions(client):
    finished(client, "otter")
    changes = {"detectors": {"loss.spike": False}}
    answer = client.put("/api/v1/projects/default/detectors", json=changes)
    assert answer.status_code == 200, answer.text
    evaluated(client)
    assert client.delete("/api/v1/runs/otter").status_code == 204
    gone, changed = log(client)
    # It outlives what it was done to.
    assert (gone["act"], gone["subject"], gone["details"]) == (
        "run.delete",
        "otter",
        {"project": "default"},
    )
    assert (changed["act"], changed["subject"]) == ("project.detectors", "default")
    assert changed["details"]["detectors"]["loss.spike"] == {"enabled": False}


def test_pages_end(client):
    finished(client, "otter")
    for _ in range(5):
        client.post("/api/v1/runs/otter/silences", json={"kind": "loss.spike"})
    found, cursor = [], None
    while True:
        page = get(client, "/audit", limit=2, **({"cursor": cursor} if cursor else {}))
        found += [one["id"] for one in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert len(set(found)) == len(found) == 5


def test_an_act_of_a_token_names_it(database_url, capsys):
    engine = open_engine(database_url)
    try:
        assert token(["create", "ops", "--scope", "admin", "--db", database_url, "--json"]) == 0
        made = json.loads(capsys.readouterr().out)
        headers = {"Authorization": f"Bearer {made['token']}"}
        with serve_app(create_app(Settings(database=database_url))) as client:
            sent = wire.encode(batch(columns={"loss": column([0], [1.0])}))
            more = {"Content-Type": wire.CONTENT_TYPE, **headers}
            assert client.post("/api/v1/ingest", content=sent, headers=more).status_code == 200
            body = {"kind": "loss.spike"}
            answer = client.post("/api/v1/runs/otter/silences", json=body, headers=headers)
            assert answer.status_code == 201, answer.text
            entries = client.get("/api/v1/audit", headers=headers).json()["items"]
        silenced, created = entries
        assert (silenced["name"], silenced["token"]) == ("ops", made["id"])
        assert (created["act"], created["subject"]) == ("token.create", made["id"])
        assert created["name"] == getpass.getuser()
        assert created["origin"] == socket.gethostname()
        # The secret is nowhere in it.
        assert made["token"] not in json.dumps(entries)
        assert token(["revoke", made["id"], "--db", database_url]) == 0
        capsys.readouterr()
        assert db(["audit", "--db", database_url, "--json"]) == 0
        acts = [one["act"] for one in json.loads(capsys.readouterr().out)["items"]]
        assert acts == ["token.revoke", "silence.create", "token.create"]
        assert db(["audit", "--db", database_url, "--act", "token.revoke"]) == 0
        head, line = capsys.readouterr().out.splitlines()
        assert head.split() == ["WHEN", "WHO", "FROM", "ACT", "SUBJECT", "DETAILS"]
        assert made["id"] in line
    finally:
        engine.dispose()


def test_targets_of_notifications(database_url, capsys):
    address = "webhook://user:s3cret@127.0.0.1:9/hook"
    assert notify(["add", address, "--db", database_url, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert notify(["remove", made["id"], "--db", database_url]) == 0
    capsys.readouterr()
    assert db(["audit", "--db", database_url, "--json"]) == 0
    text = capsys.readouterr().out
    acts = [(one["act"], one["subject"]) for one in json.loads(text)["items"]]
    assert acts == [("target.remove", made["id"]), ("target.add", made["id"])]
    assert "s3cret" not in text


def test_what_the_server_deletes_by_its_rules_is_its_own_act(client, app):
    finished(client, "otter")
    evaluated(client)
    with app.state.engine.connect() as connection:
        key = find_run(connection, "otter").key
    assert delete_run(app.state.engine, key)
    [gone] = log(client)
    assert (gone["act"], gone["name"]) == ("run.delete", "rankscope serve")
