"""Batches go past the router: their answers are those of any other route, errors too."""

import httpx
import numpy as np
import pytest
from sqlalchemy import text

from rankscope.agent import wire
from rankscope.dashboard import pages
from rankscope.server.app import create_app
from rankscope.server.settings import Settings
from tests.support.servers.serve_app import serve_app

MSGPACK = {"Content-Type": wire.CONTENT_TYPE}
PATH = "/api/v1/ingest"


@pytest.fixture
def app(tmp_path):
    return create_app(Settings(database=f"sqlite:///{tmp_path / 'test.db'}", evaluate=False))


@pytest.fixture
def client(app):
    with serve_app(app) as made:
        yield made


def body(seq=0):
    column = wire.Column(np.array([seq]), np.array([1.0]))
    return wire.encode(wire.Batch(run="r", rank=0, seq=seq, columns={"loss": column}))


def check_headers(answer):
    for name, value in pages.SECURITY_HEADERS.items():
        assert answer.headers[name] == value


def test_an_answer_has_the_headers_of_all_answers(client):
    answer = client.post(PATH, content=body(), headers=MSGPACK)
    assert answer.status_code == 200
    assert answer.json() == {
        "accepted": 1,
        "duplicate": False,
        "dense_until": None,
        "hello_wanted": True,
    }
    assert answer.headers["content-type"] == "application/json"
    check_headers(answer)


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"\xff", MSGPACK, 422),
        (body(), {"Content-Type": "text/plain"}, 415),
        (b"no gzip", {**MSGPACK, "Content-Encoding": "gzip"}, 422),
        (b"x" * (wire.MAX_BODY_BYTES + 1), MSGPACK, 413),
    ],
)
def test_what_is_refused_is_a_problem(client, content, headers, status):
    answer = client.post(PATH, content=content, headers=headers)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["instance"] == PATH
    check_headers(answer)


def test_what_the_server_fails_at_is_a_problem_and_the_next_batch_is_taken(app, client):
    with app.state.engine.begin() as connection:
        connection.execute(text("ALTER TABLE chunk RENAME TO away"))
    answer = client.post(PATH, content=body(), headers=MSGPACK)
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "Traceback" not in answer.text
    with app.state.engine.begin() as connection:
        connection.execute(text("ALTER TABLE away RENAME TO chunk"))
    # uvicorn closes the connection on which a request has failed.
    again = httpx.post(client.base_url.join(PATH), content=body(), headers=MSGPACK)
    assert (again.status_code, again.json()["accepted"]) == (200, 1)


def test_other_methods_are_answered_with_which_there_is(client):
    assert client.get(PATH).status_code == httpx.codes.METHOD_NOT_ALLOWED
