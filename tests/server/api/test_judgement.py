"""What the REST interface says of runs that were evaluated: divergence, alerts, verdicts."""

import math
import time
from dataclasses import replace

import pytest
from sqlalchemy import update

from rankscope.server.app import create_app
from rankscope.server.settings import Settings
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import writing
from tests.support.runs.fixture_run import SyntheticRun
from tests.support.servers.api import batch, column, desynced, evaluated, get, post
from tests.support.servers.collector import wait_until
from tests.support.servers.serve_app import serve_app


def test_divergence_shows_who_since_when_and_which_tensor(client):
    desynced(client)
    evaluated(client)
    items = get(client, "/runs/otter/divergence", stage="parameters")["items"]
    assert (items[0]["step"], items[0]["until_step"], items[0]["equal"]) == (0, 29, True)
    first = items[1]
    assert (first["step"], first["equal"]) == (30, False)
    assert first["clusters"] == [[0, 1, 3], [2]]
    sampled = next(i for i in items if i["first_tensor"])
    assert sampled["first_tensor"]["name"] == "b.weight"
    assert sampled["first_tensor"]["ranks"] == [2]
    matrix = get(client, "/runs/otter/divergence", matrix=True)["matrix"]
    assert matrix["step"] == 56
    assert matrix["distance"][2][0] == pytest.approx(0.5 * math.sqrt(8))
    assert matrix["distance"][0][1] == 0.0


def test_an_alert_can_be_read_acknowledged_and_silenced(client):
    desynced(client)
    evaluated(client)
    [alert] = get(client, "/runs/otter/alerts")["items"]
    promised = (
        "id run kind severity state title ranks tensors first_step last_step opened_at resolved_at "
        "acknowledged stage cause remedy evidence consequences"
    )
    assert set(promised.split()) <= set(alert)
    assert (alert["kind"], alert["ranks"], alert["first_step"], alert["tensors"]) == (
        "desync.parameters",
        [2],
        30,
        ["b.weight"],
    )
    assert get(client, "/alerts")["items"][0]["id"] == alert["id"]
    assert get(client, "/runs/otter/alerts", rank=1)["items"] == []
    assert get(client, "/runs/otter/alerts", rank=2)["items"] != []
    detail = get(client, f"/alerts/{alert['id']}")
    assert detail["history"][0]["what"] == "opened"
    assert get(client, "/runs/otter/verdict")["verdict"] == "fail"

    short = {name: alert[name] for name in ("id", "kind", "severity", "title")}
    assert get(client, "/runs")["items"][0]["worst_alert"] == short

    answer = client.post(f"/api/v1/alerts/{alert['id']}/acknowledge")
    assert answer.json()["acknowledged"] is True
    silence = {"kind": "desync.parameters", "reason": "known"}
    assert client.post("/api/v1/runs/otter/silences", json=silence).status_code == 201
    assert get(client, "/runs/otter/verdict")["verdict"] == "pass"
    run = get(client, "/runs/otter")
    assert (run["worst_alert"], run["open_alerts"]) == (None, 1)

    [held] = get(client, "/runs/otter/silences")["items"]
    assert (held["kind"], held["reason"], held["until"]) == ("desync.parameters", "known", None)
    assert client.delete(f"/api/v1/silences/{held['id']}").status_code == 204
    assert get(client, "/runs/otter/silences") == {"items": [], "next_cursor": None}
    assert get(client, "/runs/otter/verdict")["verdict"] == "fail"
    gone = client.delete(f"/api/v1/silences/{held['id']}")
    assert gone.status_code == 404
    assert "/silences lists them" in gone.json()["detail"]
    answer = client.delete(f"/api/v1/alerts/{alert['id']}/acknowledge")
    assert answer.json()["acknowledged"] is False
    assert client.delete("/api/v1/alerts/none/acknowledge").status_code == 404


def test_a_silence_that_has_ended_is_not_listed(client):
    desynced(client)
    for seconds in (0.2, 3600.0):
        silence = {"kind": "desync.parameters", "seconds": seconds, "reason": f"{seconds}"}
        assert client.post("/api/v1/runs/otter/silences", json=silence).status_code == 201
    wait_until(lambda: len(get(client, "/runs/otter/silences")["items"]) == 1)
    [held] = get(client, "/runs/otter/silences")["items"]
    assert held["reason"] == "3600.0"
    assert held["created_at"] < held["until"]
    assert client.get("/api/v1/runs/nobody/silences").status_code == 404


def test_a_run_that_goes_on_is_judged_as_if_it_ended_now(client):
    healthy = SyntheticRun(run="healthy", ranks=2, steps=200)
    for sent in healthy.batches(0, 150):
        assert post(client, sent).status_code == 200
    evaluated(client, "healthy")
    verdict = get(client, "/runs/healthy/verdict")
    assert (verdict["verdict"], verdict["so_far"]) == ("pending", "pass")
    assert get(client, "/runs/healthy/verdict", kind="desync.batch")["so_far"] == "pending"
    for sent in healthy.batches(150):
        assert post(client, sent).status_code == 200
    evaluated(client, "healthy")
    verdict = get(client, "/runs/healthy/verdict")
    assert (verdict["verdict"], verdict["so_far"]) == ("pass", "pass")


def test_a_run_passes_with_the_further_models_of_its_processes(client):
    """Each has a run of its own, that says whose it is; a user may call a run so, too."""
    runs = {
        "gan": ({}, None),
        "gan.2": ({"first_run": "gan"}, (1, 100)),
        "gpt": ({}, None),
        "gpt.2": ({}, (1, 100)),
    }
    for name, (config, desync) in runs.items():
        run = SyntheticRun(run=name, ranks=2, steps=200, desync=desync)
        for sent in run.batches():
            if sent.hello is not None:
                sent = replace(sent, hello=replace(sent.hello, config=config))
            assert post(client, sent).status_code == 200
    for name in runs:
        evaluated(client, name)
    found = {name: get(client, f"/runs/{name}/verdict") for name in runs}
    said = {name: verdict["verdict"] for name, verdict in found.items()}
    assert said == {"gan": "fail", "gan.2": "fail", "gpt": "pass", "gpt.2": "fail"}
    assert found["gan"]["reasons"][0].startswith("run gan.2, of a further model")
    only = get(client, "/runs/gan/verdict", kind="loss.spike")
    assert only["verdict"] == "pass"
    listed = {
        (name, beside): {a["run"] for a in get(client, f"/runs/{name}/alerts", **more)["items"]}
        for name in ("gan", "gpt")
        for beside, more in ((False, {}), (True, {"beside": True}))
    }
    assert listed == {
        ("gan", False): set(),
        ("gan", True): {"gan.2"},
        ("gpt", False): set(),
        ("gpt", True): set(),
    }


def test_data_that_nobody_reads_are_reported(database_url):
    """An evaluation that stands still must not read as one that will be there in a second."""
    app = create_app(Settings(database=database_url, evaluate=False))
    with serve_app(app) as client:
        post(client, batch(columns={"loss": column([0], [1.0])}, through_step=0, state="finished"))
        assert "ask again in a second" in get(client, "/runs/otter/verdict")["reasons"][-1]
        with writing(app.state.engine) as connection:
            connection.execute(update(schema.run).values(last_seen_at=time.time() - 600))
        said = get(client, "/runs/otter/verdict")
        assert said["verdict"] == "pending"
        assert "have not been evaluated for 10 min" in said["reasons"][-1]
        assert "its log says why" in said["reasons"][-1]


def test_the_same_data_evaluated_again_make_the_same_alerts(database_url):
    def alerts():
        with serve_app(create_app(Settings(database=database_url))) as client:
            if not get(client, "/runs")["items"]:
                desynced(client)
            evaluated(client)
            time.sleep(0.3)  # a second evaluation must have had its chance to change something
            return get(client, "/runs/otter/alerts", consequences=True)["items"]

    first = alerts()
    assert len(first) == 1
    assert alerts() == first


def test_ranks_that_do_not_know_how_many_they_are_are_compared(client):
    for rank in (2, 0, 1):
        losses = {"steps": list(range(8)), "values": [1.0 - 0.1 * step for step in range(8)]}
        digests = {"steps": list(range(8)), "values": [f"{7 if rank == 1 else 5:016x}"] * 8}
        sent = {"run": "otter", "rank": rank, "seq": 0, "session": f"s{rank}", "through_step": 7}
        sent |= {"columns": {"loss": losses}, "words": {"parameters": digests}, "state": "finished"}
        assert client.post("/api/v1/ingest", json=sent).status_code == 200
    run = evaluated(client)
    assert (run["world_size"], run["ranks"], run["state"]) == (3, [0, 1, 2], "finished")
    [alert] = get(client, "/runs/otter/alerts")["items"]
    assert (alert["kind"], alert["ranks"]) == ("desync.parameters", [1])


def test_what_is_sampled_began_at_some_step_since_the_sample_before(client):
    steps = [0, 16, 32, 48, 64]
    for rank in range(4):
        digests = [step + 1 + 1000 * (rank == 1 and step >= 48) for step in steps]
        loss = {"steps": list(range(65)), "values": [1.0 - 0.01 * step for step in range(65)]}
        parameters = {"steps": steps, "values": [f"{digest:016x}" for digest in digests]}
        sent = {"run": "otter", "rank": rank, "seq": 0, "session": f"s{rank}", "through_step": 64}
        sent |= {"columns": {"loss": loss}, "words": {"parameters": parameters}}
        sent |= {"world_size": 4, "state": "finished"}
        assert client.post("/api/v1/ingest", json=sent).status_code == 200
    evaluated(client)
    [alert] = get(client, "/runs/otter/alerts")["items"]
    assert (alert["kind"], alert["first_step"], alert["since"]) == (
        "desync.parameters",
        48,
        {"after": 32, "by": 48},
    )
