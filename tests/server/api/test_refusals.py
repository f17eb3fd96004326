"""What cannot be taken or is not there: a problem that says what, where, and what to do."""

import gzip

import pytest

from rankscope.agent import wire
from tests.support.servers.api import MSGPACK, batch, check_problem, column, get, post


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/v1/runs/none", 404),
        ("GET", "/api/v1/runs/none/series?metric=loss", 404),
        ("GET", "/api/v1/alerts/none", 404),
        ("POST", "/api/v1/alerts/none/acknowledge", 404),
        ("GET", "/api/v1/nothing", 404),
        ("GET", "/nothing", 404),
        ("DELETE", "/api/v1/runs", 405),
        ("GET", "/api/v1/runs?limit=0", 422),
        ("GET", "/api/v1/runs?state=sleeping", 422),
        ("GET", "/api/v1/runs?cursor=bogus", 422),
        ("GET", "/api/v1/alerts?severity=loud", 422),
    ],
)
def test_every_error_is_a_problem(shared_client, method, path, status):
    check_problem(shared_client.request(method, path), status)


@pytest.mark.parametrize(
    ("body", "headers", "status", "phrase"),
    [
        (b"garbage", MSGPACK, 422, "msgpack"),
        (b"{", {"Content-Type": "application/json"}, 422, "JSON"),
        (b"{}", {"Content-Type": "application/json"}, 422, "rank: is missing"),
        (b"", {"Content-Type": "text/plain"}, 415, "text/plain"),
        (b"xx", MSGPACK | {"Content-Encoding": "gzip"}, 422, "gzip"),
        (b"xx", MSGPACK | {"Content-Encoding": "br"}, 415, "br"),
        (b"x" * (wire.MAX_BODY_BYTES + 1), MSGPACK, 413, "larger"),
    ],
)
def test_what_cannot_be_taken_says_why(shared_client, body, headers, status, phrase):
    answer = shared_client.post("/api/v1/ingest", content=body, headers=headers)
    assert phrase in check_problem(answer, status)["detail"]


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"run": " "}, "run: has spaces at its begin or end"),
        ({"project": "digits "}, "project: has spaces at its begin or end"),
        ({"run": ".."}, "run: stands in addresses, where dots alone"),
        ({"run": "a/b"}, "run: stands in addresses, so it cannot have a slash"),
    ],
)
def test_a_name_that_nobody_could_call_up_is_refused_with_the_reason(shared_client, fields, phrase):
    sent = {"run": "otter", "rank": 0, "seq": 0, **fields}
    body = check_problem(shared_client.post("/api/v1/ingest", json=sent), 422)
    assert phrase in body["detail"]
    assert body["errors"][0]["where"] in fields
    assert get(shared_client, "/runs")["items"] == []


def test_a_small_body_cannot_fill_the_memory(shared_client):
    bomb = gzip.compress(b"\0" * (4 * wire.MAX_BODY_BYTES))
    answer = shared_client.post(
        "/api/v1/ingest", content=bomb, headers=MSGPACK | {"Content-Encoding": "gzip"}
    )
    check_problem(answer, 413)


@pytest.mark.parametrize(
    ("spoil", "phrase"),
    [
        (lambda packed: packed[: len(packed) // 2], "breaks off before its end"),
        # All data are there, but what they were checked with is not.
        (lambda packed: packed[:-4], "breaks off before its end"),
        (lambda packed: packed[:-8] + bytes(8), "gzip"),
        (lambda packed: packed + b"more", "goes on behind its end"),
    ],
)
def test_a_gzip_that_is_not_whole_is_not_taken(client, spoil, phrase):
    packed = gzip.compress(wire.encode(batch(columns={"loss": column([0], [1.0])})))
    headers = MSGPACK | {"Content-Encoding": "gzip"}
    answer = client.post("/api/v1/ingest", content=spoil(packed), headers=headers)
    assert phrase in check_problem(answer, 422)["detail"]
    assert get(client, "/runs")["items"] == []
    assert client.post("/api/v1/ingest", content=packed, headers=headers).status_code == 200


def test_what_was_sent_is_quoted_in_short(shared_client):
    for path in (f"/api/v1/runs/{'n' * 5000}", f"/api/v1/alerts/{'n' * 5000}"):
        detail = check_problem(shared_client.get(path), 404)["detail"]
        assert len(detail) < 2100
        assert detail.startswith("there is no ")
        assert detail.endswith("lists them")


def test_silences_are_checked(client):
    post(client, batch())
    for body in ({"kind": "no.such"}, {"kind": "loss.spike", "seconds": -1}, {}, {"x": 1}):
        check_problem(client.post("/api/v1/runs/otter/silences", json=body), 422)
    check_problem(client.post("/api/v1/runs/none/silences", json={"kind": "loss.spike"}), 404)
    # Half of a surrogate pair, which no database takes.
    half = client.post(
        "/api/v1/runs/otter/silences",
        content=b'{"kind": "loss.spike", "comment": "a\\ud800b"}',
        headers={"Content-Type": "application/json"},
    )
    assert half.status_code == 201, half.text
    assert half.json()["reason"] == "a?b"
