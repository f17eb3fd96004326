"""Series as arrays, and answers that a client has already."""

import math

import msgpack
import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.app import create_app
from rankscope.server.settings import Settings
from tests.support.servers.serve_app import serve_app

BINARY = {"Accept": "application/msgpack"}
PATH = "/api/v1/runs/otter/series"


@pytest.fixture
def client(tmp_path):
    with serve_app(create_app(Settings(database=f"sqlite:///{tmp_path / 'a.db'}"))) as made:
        yield made


def post(client, steps, values, *, rank=0, seq=0):
    column = wire.Column(np.array(steps, np.int64), np.array(values, np.float64))
    sent = wire.Batch(run="otter", rank=rank, seq=seq, session="s", columns={"loss": column})
    answer = client.post(
        "/api/v1/ingest",
        content=wire.encode(sent),
        headers={"Content-Type": wire.CONTENT_TYPE},
    )
    assert answer.status_code == 200, answer.text


def array(series, name):
    return np.frombuffer(series[name], series["dtype"])


def test_points_come_as_arrays(client):
    values = [1.5, math.nan, math.inf, -math.inf, 2.5]
    post(client, [0, 2, 4, 6, 8], values)
    post(client, [0, 1, 7], [1e300, 1.0, 2.0], rank=1)
    answer = client.get(PATH, params={"metric": "loss"}, headers=BINARY)
    assert answer.headers["content-type"] == "application/msgpack"
    reported = msgpack.unpackb(answer.content)
    first, second = reported["series"]
    assert (reported["metric"], first["rank"], first["width"]) == ("loss", 0, 1)
    assert first["steps"] == [0, 2, 5]
    assert first["dtype"] == "<f4"
    np.testing.assert_array_equal(array(first, "values"), values)
    assert "min" not in first
    assert np.frombuffer(second["steps"], "<i8").tolist() == [0, 1, 7]
    # Too large for float32.
    assert array(second, "values").tolist() == [1e300, 1.0, 2.0]


def test_arrays_say_what_the_json_says(client):
    rng = np.random.default_rng(0)
    post(client, range(5000), rng.normal(3.0, 1.0, 5000))
    asked = {"metric": "loss", "max_points": 300}
    (packed,) = msgpack.unpackb(client.get(PATH, params=asked, headers=BINARY).content)["series"]
    (plain,) = client.get(PATH, params=asked).json()["series"]
    first, stride, count = packed["steps"]
    assert stride == packed["width"]
    assert plain["steps"] == [first + stride * n for n in range(count)]
    for name in ("values", "min", "max"):
        np.testing.assert_allclose(array(packed, name), plain[name], rtol=1e-5, atol=1e-3)


def test_what_has_not_changed_is_not_sent_again(client):
    post(client, range(5000), np.zeros(5000))
    early = {"metric": "loss", "from_step": 0, "to_step": 999}
    tags = {}
    for name, asked in {"whole": {"metric": "loss"}, "early": early}.items():
        answer = client.get(PATH, params=asked)
        tags[name] = answer.headers["etag"]
        again = client.get(PATH, params=asked, headers={"If-None-Match": tags[name]})
        assert (again.status_code, again.content) == (304, b"")
    # More steps change the view of all of them, not that of early ones; a late point does.
    post(client, range(5000, 6000), np.ones(1000), seq=1)
    changed = client.get(PATH, params={"metric": "loss"}, headers={"If-None-Match": tags["whole"]})
    assert changed.status_code == 200
    same = client.get(PATH, params=early, headers={"If-None-Match": tags["early"]})
    assert same.status_code == 304
    post(client, [500], [7.0], seq=2)
    late = client.get(PATH, params=early, headers={"If-None-Match": tags["early"]})
    assert late.status_code == 200
    assert max(late.json()["series"][0]["max"]) == 7
    # JSON is no answer for who asks for arrays.
    other = {"If-None-Match": late.headers["etag"]} | BINARY
    assert client.get(PATH, params=early, headers=other).status_code == 200


def test_only_what_gets_shorter_is_compressed(client):
    rng = np.random.default_rng(0)
    post(client, range(20_000), rng.normal(size=20_000))
    asked = {"metric": "loss", "max_points": 20_000}
    noise = client.get(PATH, params=asked, headers=BINARY | {"Accept-Encoding": "gzip"})
    assert "content-encoding" not in noise.headers
    text = client.get(PATH, params=asked, headers={"Accept-Encoding": "gzip"})
    assert text.headers["content-encoding"] == "gzip"
    assert len(text.json()["series"][0]["values"]) == 20_000
