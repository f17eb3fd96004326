"""What is over a limit is answered by a problem that names it; what is within is kept."""

import base64
import json

import pytest

from rankscope.agent import wire
from rankscope.agent.wire import limits
from tests.support.servers.api import MSGPACK, batch, check_problem, column, get, post


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"attempt": 2**31 - 1}, "attempt"),
        ({"seq": 2**63 - 1}, "seq"),
        ({"rank": 2**31 - 1}, "rank"),
        ({"world_size": 5_000_000}, "world_size"),
        ({"through_step": 2**63 - 1}, "through_step"),
        ({"hello": {"config": {"text": "x" * 400_000}}}, "hello.config"),
        (
            {"hello": {"config": {"sharded_over": {"first": 0, "step": 1, "count": 10**15}}}},
            "hello.config.sharded_over.count",
        ),
        ({"hello": {"heartbeat_seconds": 1e18}}, "hello.heartbeat_seconds"),
        ({"columns": {"loss": {"steps": [2**63 - 1], "values": [0.5]}}}, "columns.loss.steps"),
    ],
)
def test_a_refusal_names_the_field(shared_client, fields, where):
    sent = {"run": "otter", "rank": 0, "seq": 0, **fields}
    body = check_problem(shared_client.post("/api/v1/ingest", json=sent), 422)
    assert [error["where"] for error in body["errors"]] == [where]
    assert get(shared_client, "/runs")["items"] == []


def test_what_is_at_its_limit_is_stored_and_can_be_followed(client):
    # As far as the integers of every database must reach.
    last = limits.STEP.most
    fields = {
        "rank": limits.RANK.most,
        "world_size": limits.RANKS.most,
        "attempt": limits.ATTEMPT.most,
    }
    hello = wire.Hello(started_at=5.0, pid=limits.PID.most, local_rank=limits.RANK.most)
    for n, session in enumerate(("a", "b")):
        for seq in (limits.SEQ.most - 1, limits.SEQ.most):
            sent = {
                "run": "otter",
                "session": session,
                "seq": seq,
                "through_step": last,
                "columns": {"loss": {"steps": [last - 1, last], "values": [n, n + 0.5]}},
                **fields,
            }
            answer = post(client, wire.from_json(sent | {"hello": {"pid": hello.pid}}))
            assert answer.status_code == 200, answer.text
            assert answer.json()["accepted"] == 2
    run = get(client, "/runs/otter")
    assert (run["last_step"], run["world_size"]) == (last, limits.RANKS.most)
    assert run["rank_status"][0]["attempt"] == limits.ATTEMPT.most + 1
    [line] = get(client, "/runs/otter/series", metric="loss", from_step=last)["series"]
    assert (line["steps"], line["values"]) == ([last], [1.5])


def test_a_run_has_so_many_series_at_most(client, monkeypatch):
    monkeypatch.setattr(
        limits, "SERIES_OF_RUN", wire.Limit((), 3, "series of a run", "for this test")
    )
    loss = column([0], [1.0])
    assert post(client, batch(columns={"a": loss, "b": loss, "c": loss})).status_code == 200
    answer = post(client, batch(seq=1, columns={"a": column([1], [1.0]), "d": loss}))
    body = check_problem(answer, 422)
    assert body["errors"][0]["where"] == "columns.d"
    assert "it can have 3" in body["detail"]
    # What it has goes on.
    assert post(client, batch(seq=2, columns={"a": column([1], [2.0])})).status_code == 200
    assert post(client, batch(run="seal", columns={"d": loss})).status_code == 200
    [line] = get(client, "/runs/otter/series", metric="a")["series"]
    assert line["values"] == [1.0, 2.0]


@pytest.mark.parametrize(
    "after",
    ['["a\\ud800b"]', "[NaN, 1]", "[1e400, 1]", "[1.0, 9223372036854775808]", "[" * 2000, "7"],
)
def test_a_cursor_that_nobody_gave_out_is_refused(client, after):
    post(client, batch(columns={"loss": column([0], [1.0])}))
    cursor = base64.urlsafe_b64encode(after.encode()).decode()
    for path in ("/runs", "/runs/otter/metrics", "/runs/otter/alerts", "/runs/otter/divergence"):
        answer = client.get(f"/api/v1{path}", params={"cursor": cursor})
        # Numbers that are none are before or behind all others.
        if answer.status_code != 200:
            check_problem(answer, 422)
    check_problem(client.get("/api/v1/runs", params={"cursor": "x" * 30_000}), 422)


def test_halves_of_surrogate_pairs_do_not_reach_the_database(client):
    half = json.dumps({"run": "otter", "rank": 0, "seq": 0, "error": "a\ud800b"})
    answer = client.post(
        "/api/v1/ingest", content=half, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200
    assert get(client, "/runs/otter")["rank_status"][0]["error"] == "a?b"
    column_name = json.dumps(
        {"run": "otter", "rank": 0, "seq": 1, "columns": {"\ud800": {"steps": [], "values": []}}}
    )
    answer = client.post(
        "/api/v1/ingest", content=column_name, headers={"Content-Type": "application/json"}
    )
    check_problem(answer, 422)


def test_too_many_values_are_answered_by_a_problem(shared_client):
    many = 2 * limits.OBJECTS.most
    body = b"\x81\xa1x\xdd" + many.to_bytes(4, "big") + b"\x80" * many
    problem = check_problem(
        shared_client.post("/api/v1/ingest", content=body, headers=MSGPACK), 422
    )
    assert problem["errors"][0]["where"] == "body"
