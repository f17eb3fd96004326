"""A disk that takes nothing more: said where it is asked, nothing lost, well again by itself."""

import resource
import socket

import httpx
import pytest

from rankscope.agent import wire
from tests.support.servers.api import MSGPACK, batch, check_problem, column
from tests.support.servers.service import Service, eventually

pytestmark = pytest.mark.e2e


@pytest.fixture
def service(tmp_path):
    with Service(tmp_path) as made:
        yield made


def post(client, seq):
    sent = batch(seq=seq, columns={"loss": column([seq], [1.0 + seq])})
    return client.post("/api/v1/ingest", content=wire.encode(sent), headers=MSGPACK)


def test_a_full_disk(service):
    with httpx.Client(base_url=service.url, timeout=30) as client:
        assert post(client, 0).status_code == 200
        # No file of the server's may grow any more.
        before = resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        for seq in range(1, 31):
            answer = post(client, seq)
            body = check_problem(answer, 503)
            assert "takes nothing" in body["detail"]
            assert "send it again" in body["detail"]
            assert int(answer.headers["retry-after"]) > 0
        assert "takes nothing" in check_problem(client.get("/readyz"), 503)["detail"]
        assert client.get("/healthz").status_code == 200
        resource.prlimit(service.pid, resource.RLIMIT_FSIZE, before)
        eventually(lambda: client.get("/readyz").status_code == 200, timeout_s=30)
        assert [post(client, seq).json()["accepted"] for seq in (1, 2)] == [1, 1]
        series = client.get("/api/v1/runs/otter/series", params={"metric": "loss"}).json()
        assert series["series"][0]["steps"] == [0, 1, 2]


def test_uploads_that_break_off_leave_no_traceback(service, tmp_path):
    head = (
        "POST /api/v1/ingest HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: {wire.CONTENT_TYPE}\r\nContent-Length: 1000\r\n\r\n"
    )
    address = (httpx.URL(service.url).host, httpx.URL(service.url).port)
    for _ in range(20):
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(head.encode() + b"\x81")
    with httpx.Client(base_url=service.url) as client:
        assert post(client, 0).status_code == 200
    assert "Traceback" not in (tmp_path / "server.log").read_text()
