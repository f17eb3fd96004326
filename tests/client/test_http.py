"""What the client does with servers that are busy, old, new, or something else."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rankscope.client import Client, NotRankscope, TryLater, Unreachable
from rankscope.client.models import Project

OK = (200, {}, {"items": [{"name": "vision", "runs": 3}], "next_cursor": None})


def busy(status=503, **headers):
    """An answer of a server that is busy."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, {"status": status, "title": "Busy", "detail": "ask again"}


@contextmanager
def answering(*answers):
    """A server that gives these answers in turn, the last one for ever; when each was asked for."""
    times = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, body = answers[min(len(times), len(answers) - 1)]
            times.append(time.monotonic())
            content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *said):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", times
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says(status):
    with answering(busy(status, Retry_After="1"), busy(status, Retry_After="0"), OK) as (
        url,
        times,
    ):
        with Client(url) as client:
            assert list(client.projects()) == [Project("vision", 3)]
    first, second, third = times
    assert second - first >= 1
    assert third - second < 1


def test_without_a_time_it_is_asked_again_after_a_second():
    with answering(busy(), OK) as (url, times), Client(url) as client:
        assert len(list(client.projects())) == 1
    assert times[1] - times[0] >= 1


@pytest.mark.parametrize(("after", "retries", "asked"), [("0", 2, 3), ("0", 0, 1), ("3600", 3, 1)])
def test_one_that_stays_busy_is_an_error(after, retries, asked):
    with (
        answering(busy(Retry_After=after)) as (url, times),
        Client(url, retries=retries) as client,
        pytest.raises(TryLater, match="ask again") as later,
    ):
        list(client.projects())
    assert (len(times), later.value.retry_after) == (asked, float(after))


def test_whether_it_is_ready_is_asked_once():
    with (
        answering(busy(Retry_After="0")) as (url, times),
        Client(url) as client,
        pytest.raises(TryLater),
    ):
        client.is_ready()
    assert len(times) == 1


def test_a_newer_server_s_members_are_left_out():
    newer = {"items": [{"name": "vision", "runs": 3, "colour": "red"}], "next_cursor": None}
    with answering((200, {}, newer)) as (url, _), Client(url) as client:
        assert list(client.projects()) == [Project("vision", 3)]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, "<h1>Welcome</h1>"),
        (200, ["a list"]),
        (200, {"status": "ok"}),
        (200, {"items": [{"name": "vision"}]}),
        (200, {"items": ["vision"]}),
        (404, "nothing here"),
        (502, "<h1>Bad gateway</h1>"),
    ],
)
def test_another_service_is_told_from_a_server(status, body):
    with (
        answering((status, {}, body)) as (url, _),
        Client(url) as client,
        pytest.raises(NotRankscope) as other,
    ):
        list(client.projects())
    assert other.value.status == status
    assert url in str(other.value)


@pytest.mark.parametrize("body", [{"matrix": {"step": 3}}, {"matrix": ["?"]}])
def test_a_part_of_an_answer_that_cannot_be_read_is_told(body):
    with (
        answering((200, {}, body)) as (url, _),
        Client(url) as client,
        pytest.raises(NotRankscope, match=r"/divergence cannot be read: .*Matrix"),
    ):
        client.distances("otter")


def test_silence_ends_a_request():
    with answering(busy(Retry_After="0")) as (url, _):
        pass  # nobody listens there any more
    with Client(url) as client, pytest.raises(Unreachable):
        list(client.projects())
    listener = threading.Event()

    class Silent(BaseHTTPRequestHandler):
        def do_GET(self):
            listener.wait(20)

        def log_message(self, *said):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    began = time.monotonic()
    with Client(f"http://127.0.0.1:{server.server_port}", timeout=0.3) as client:
        with pytest.raises(Unreachable, match="timed out"):
            list(client.projects())
    assert time.monotonic() - began < 10
    listener.set()
    server.shutdown()
    server.server_close()
