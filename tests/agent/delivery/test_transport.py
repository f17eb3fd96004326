"""What each answer of a server means for the batch."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from rankscope.agent import wire
from rankscope.agent.delivery.transport import Accepted, Away, Refused, TooLarge, Transport
from rankscope.agent.delivery.uploader import Uploader
from tests.support.collector import CLOSE, HANG, Collector, Reply, wait_until

BODY = wire.encode(wire.Batch(run="r", rank=0, seq=0))


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(params=["here", "here again", "by uploader", "by uploader again"])
def transport(collector: Collector, request: pytest.FixtureRequest) -> Iterator[Transport]:
    """Of all ways to post, which are to mean the same."""
    by_uploader = request.param.startswith("by uploader")
    made = Transport(collector.url, None, connect_timeout=1.0, read_timeout=0.3)
    if by_uploader:
        uploader = made._uploader = Uploader(*made._address)
        made._uploader_proven = True
        uploader.start()
        wait_until(uploader.ready)
    if request.param.endswith("again"):
        # Those after the first over a connection are made in another way.
        assert isinstance(made.post(wire.encode(wire.Batch(run="r", rank=0, seq=99))), Accepted)
        collector.requests = 0
        collector.authorizations.clear()
    yield made
    assert (made._uploader is not None) == by_uploader
    made.close()


def test_an_accepted_batch_brings_the_answer(collector: Collector, transport: Transport) -> None:
    collector.answer = {"dense_until": 70, "hello_wanted": True, "new_in_2030": [1]}

    first, second = transport.post(BODY), transport.post(BODY)

    assert first == Accepted(wire.Answer(accepted=0, dense_until=70, hello_wanted=True))
    assert isinstance(second, Accepted)
    assert second.answer.duplicate


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_trouble_that_passes(collector: Collector, transport: Transport, status: int) -> None:
    collector.always = Reply(status=status, body={"title": "Busy", "detail": "come\nback"})

    outcome = transport.post(BODY)

    assert outcome == Away(f"it answers {status}, come back")


@pytest.mark.parametrize("status", [301, 302, 307, 401, 403, 404, 405, 407])
def test_trouble_that_a_person_has_to_end(
    collector: Collector, transport: Transport, status: int
) -> None:
    # A redirect is not followed: it could take the token to another server.
    headers = {"Location": f"{collector.url}/elsewhere"}
    collector.always = Reply(status=status, headers=headers, body="<h1>No</h1>")

    outcome = transport.post(BODY)

    assert outcome == Away(f"it answers {status}, <h1>No</h1>", misdirected=True)
    assert collector.requests == 1


@pytest.mark.parametrize("status", [400, 409, 415, 422, 451])
def test_a_final_no(collector: Collector, transport: Transport, status: int) -> None:
    collector.always = Reply(status=status, body={"title": "No", "detail": "rank: is missing"})

    assert transport.post(BODY) == Refused(f"it answers {status}, rank: is missing")


def test_the_servers_own_words_come_from_the_problem(
    collector: Collector, transport: Transport
) -> None:
    outcome = transport.post(b"garbage")

    assert isinstance(outcome, Refused)
    assert "422" in outcome.why
    assert "is not msgpack" in outcome.why or "must be an object" in outcome.why


def test_too_large(collector: Collector, transport: Transport) -> None:
    collector.largest_body = 10

    assert transport.post(BODY) == TooLarge()


@pytest.mark.parametrize("body", ["<html>hello</html>", {"message": "hi"}, [], "x" * 200_000])
def test_another_service_is_no_server_of_ours(
    collector: Collector, transport: Transport, body: object
) -> None:
    collector.always = Reply(body=body)  # type: ignore[arg-type]
    if body == []:
        collector.always = Reply(body="[]")

    outcome = transport.post(BODY)

    assert isinstance(outcome, Away)
    assert outcome.misdirected
    collector.always = None
    assert isinstance(transport.post(BODY), Accepted)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("86400", 600.0),
        ("inf", 600.0),
        ("nan", None),
        ("soon", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 -0000", 0.0),
    ],
)
def test_retry_after(
    collector: Collector, transport: Transport, header: str, seconds: float | None
) -> None:
    collector.always = Reply(status=503, headers={"Retry-After": header})

    outcome = transport.post(BODY)

    assert isinstance(outcome, Away)
    assert outcome.retry_after == seconds


def test_retry_after_a_date(collector: Collector, transport: Transport) -> None:
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    collector.always = Reply(status=503, headers={"Retry-After": in_a_minute})

    outcome = transport.post(BODY)

    assert isinstance(outcome, Away)
    assert outcome.retry_after == pytest.approx(60, abs=15)


def test_no_server(transport: Transport, collector: Collector) -> None:
    collector.stop()

    assert transport.post(BODY) == Away("no connection (Connection refused)")


def test_no_such_name() -> None:
    outcome = Transport("http://no-such-host.invalid", None).post(BODY)

    assert isinstance(outcome, Away)
    assert "name" in outcome.why or "no connection" in outcome.why


def test_a_hanging_server(collector: Collector, transport: Transport) -> None:
    collector.always = HANG
    began = time.monotonic()

    outcome = transport.post(BODY)

    assert outcome == Away("no answer within 0.3 s")
    assert time.monotonic() - began < 2.0


def test_a_hanging_server_with_little_time_left(collector: Collector) -> None:
    collector.always = HANG
    patient = Transport(collector.url, None, read_timeout=30.0)
    began = time.monotonic()

    assert isinstance(patient.post(BODY, at_most=0.3), Away)
    assert time.monotonic() - began < 2.0
    patient.close()


def test_a_connection_without_an_answer(collector: Collector, transport: Transport) -> None:
    collector.always = CLOSE

    assert transport.post(BODY) == Away("it closed the connection without an answer")


def test_a_kept_connection_that_the_server_closed(
    collector: Collector, transport: Transport
) -> None:
    assert isinstance(transport.post(BODY), Accepted)
    collector.replies.append(CLOSE)

    # Not seen as trouble: the second attempt is made at once.
    assert isinstance(transport.post(BODY), Accepted)


def test_what_is_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        transport = Transport(f"http://127.0.0.1:{server.getsockname()[1]}", None, read_timeout=0.2)

        assert transport.post(BODY) == Away("no answer within 0.2 s")
        transport.close()


def test_one_connection_serves_many_batches(collector: Collector, transport: Transport) -> None:
    for _ in range(5):
        transport.post(BODY)

    assert collector.connections == 1


def test_the_token_is_sent_and_only_then(collector: Collector, transport: Transport) -> None:
    transport.post(BODY)
    with_token = Transport(collector.url, "s3cret")
    with_token.post(BODY)
    with_token.close()

    assert collector.authorizations == [None, "Bearer s3cret"]


def test_a_server_behind_a_path(collector: Collector) -> None:
    prefixed = Transport(f"{collector.url}/rankscope", None)

    outcome = prefixed.post(BODY)  # the collector knows no such path

    assert isinstance(outcome, Away)
    assert "404" in outcome.why
    prefixed.close()


def test_a_proxy_is_used_but_not_for_this_machine(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", collector.url)

    far = Transport("http://far.invalid", None).post(BODY)
    near = Transport(collector.url, None).post(BODY)

    assert isinstance(far, Away)
    assert "404" in far.why  # the collector, as a proxy, is asked for the whole address
    assert isinstance(near, Accepted)
