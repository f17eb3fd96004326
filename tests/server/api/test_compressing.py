"""JSON answers are compressed where the client takes that, and are what they were."""

import pytest

from tests.support.servers.api import desynced, evaluated


@pytest.fixture
def run(client):
    desynced(client)
    evaluated(client)
    return client


def test_a_client_that_takes_it(run):
    path = "/api/v1/runs/otter/verdict"
    plain = run.get(path, headers={"Accept-Encoding": "identity"})
    packed = run.get(path, headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert "Accept-Encoding" in packed.headers["vary"]
    assert packed.json() == plain.json()
    assert int(packed.headers["content-length"]) < len(plain.content) / 2


def test_short_answers_and_pages_stay_as_they_are(run):
    short = run.get("/healthz", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in short.headers
    page = run.get("/", headers={"Accept-Encoding": "gzip", "Accept": "text/html"})
    assert "content-encoding" not in page.headers
    assert page.text.startswith("<!doctype html>")


def test_events_are_not_held_up(run):
    with run.stream("GET", "/api/v1/runs/otter/stream", headers={"Accept-Encoding": "gzip"}) as it:
        assert "content-encoding" not in it.headers
        assert next(it.iter_lines()).startswith("event: state")


def test_an_answer_without_content(run):
    created = run.post("/api/v1/runs/otter/silences", json={"kind": "loss.spike"}).json()
    gone = run.delete(f"/api/v1/silences/{created['id']}", headers={"Accept-Encoding": "gzip"})
    assert (gone.status_code, gone.content) == (204, b"")
