"""What each answer of a server means for the batch."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from rankscope.agent import wire
from rankscope.agent.delivery.outcome import Accepted, Away, Refused, TooLarge
from tests.support.servers.collector import CLOSE, HANG, Collector, Reply, wait_until
from tests.support.servers.sending import Posting

DeliverTo = Callable[..., Posting]

LONG_SECONDS = 30.0
"""Longer than a busy machine takes for an answer."""


@pytest.fixture(params=["here", "here again", "by uploader"])
def posting(
    collector: Collector, deliver_to: DeliverTo, request: pytest.FixtureRequest
) -> Iterator[Posting]:
    """Of all ways to post, which are to mean the same."""
    by_uploader = request.param == "by uploader"
    pace = {"uploader_after": 0.0} if by_uploader else {}
    made = deliver_to(
        collector.url, connect_timeout=LONG_SECONDS, read_timeout=LONG_SECONDS, **pace
    )
    earlier = wire.encode(wire.Batch(run="r", rank=0, seq=99))
    if by_uploader:
        wait_until(lambda: isinstance(made.post(earlier), Accepted) and made.by_uploader)
    elif request.param == "here again":
        # Those after the first over a connection are made in another way.
        assert isinstance(made.post(earlier), Accepted)
    collector.requests = collector.connections = 0
    collector.authorizations.clear()
    yield made
    assert made.by_uploader == by_uploader


def test_an_accepted_batch_brings_the_answer(collector: Collector, posting: Posting) -> None:
    collector.answer = {"dense_until": 70, "hello_wanted": True, "new_in_2030": [1]}

    first, second = posting.post(), posting.post()

    assert first == Accepted(wire.Answer(accepted=0, dense_until=70, hello_wanted=True))
    assert isinstance(second, Accepted)
    assert second.answer.duplicate


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_a_fault_that_passes(collector: Collector, posting: Posting, status: int) -> None:
    collector.always = Reply(status=status, body={"title": "Busy", "detail": "come\nback"})

    outcome = posting.post()

    assert outcome == Away(f"it answers {status}, come back", busy=status == 429)


@pytest.mark.parametrize("status", [301, 302, 307, 401, 403, 404, 405, 407])
def test_a_fault_that_a_person_has_to_end(
    collector: Collector, posting: Posting, status: int
) -> None:
    # A redirect is not followed: it could take the token to another server.
    headers = {"Location": f"{collector.url}/elsewhere"}
    collector.always = Reply(status=status, headers=headers, body="<h1>No</h1>")

    outcome = posting.post()

    why = f"it answers {status}, <h1>No</h1>"
    # 403 may be for the project of this batch; another one's may be taken.
    assert outcome == Away(why, misdirected=True, this_batch=status == 403)
    assert collector.requests == 1


@pytest.mark.parametrize("status", [400, 409, 415, 422, 451])
def test_a_final_no(collector: Collector, posting: Posting, status: int) -> None:
    collector.always = Reply(status=status, body={"title": "No", "detail": "rank: is missing"})

    assert posting.post() == Refused(f"it answers {status}, rank: is missing")


@pytest.mark.parametrize("status", [400, 409, 410, 415, 418, 422, 431, 451])
@pytest.mark.parametrize(
    "body",
    [
        "<h1>Bad Request</h1>",
        '{"title": "Gone", "status": 410, "detail": "no such tenant", "instance": "/tenants/7"}',
    ],
)
def test_a_no_of_a_proxy_ends_no_batch(
    collector: Collector, posting: Posting, status: int, body: str
) -> None:
    collector.always = Reply(status=status, body=body)

    outcome = posting.post()

    assert isinstance(outcome, Away)
    assert outcome.misdirected
    collector.always = None
    assert isinstance(posting.post(), Accepted)
    assert posting.lost == {}


def test_what_the_server_refuses_stays_on_disk_up_to_a_bound(
    collector: Collector, deliver_to: DeliverTo, tmp_path: Path
) -> None:
    collector.always = Reply(status=422, body={"detail": "rank: is missing"})
    one = deliver_to(collector.url)
    for seq in range(120):
        one.queue.put(seq, wire.encode(wire.Batch(run="r", rank=0, seq=seq)), points=1, hello=False)
        assert isinstance(one.post(), Refused)

    kept = sorted(tmp_path.rglob("*.refused"))
    assert len(kept) == 100
    assert not list(tmp_path.rglob("*.batch"))
    assert kept[7].name == "000007.refused"
    assert wire.encode(wire.Batch(run="r", rank=0, seq=7)) in kept[7].read_bytes()
    assert one.lost == {"refused": 120}


def test_the_servers_own_explanation_comes_from_the_problem(
    collector: Collector, posting: Posting
) -> None:
    outcome = posting.post(b"garbage")

    assert isinstance(outcome, Refused)
    assert "422" in outcome.why
    assert "is not msgpack" in outcome.why or "must be an object" in outcome.why


def test_too_large(collector: Collector, posting: Posting) -> None:
    collector.largest_body = 10

    assert posting.post() == TooLarge()


@pytest.mark.parametrize("body", ["<html>hello</html>", {"message": "hi"}, [], "x" * 200_000])
def test_another_service_is_no_server_of_ours(
    collector: Collector, posting: Posting, body: object
) -> None:
    collector.always = Reply(body=body)  # type: ignore[arg-type]
    if body == []:
        collector.always = Reply(body="[]")

    outcome = posting.post()

    assert isinstance(outcome, Away)
    assert outcome.misdirected
    collector.always = None
    assert isinstance(posting.post(), Accepted)


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
    collector: Collector, posting: Posting, header: str, seconds: float | None
) -> None:
    collector.always = Reply(status=503, headers={"Retry-After": header})

    outcome = posting.post()

    assert isinstance(outcome, Away)
    assert outcome.retry_after == seconds


def test_retry_after_a_date(collector: Collector, posting: Posting) -> None:
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    collector.always = Reply(status=503, headers={"Retry-After": in_a_minute})

    outcome = posting.post()

    assert isinstance(outcome, Away)
    assert outcome.retry_after == pytest.approx(60, abs=15)


def test_no_server(posting: Posting, collector: Collector) -> None:
    collector.stop()

    assert posting.post() == Away("no connection (Connection refused)")


def test_no_such_name(deliver_to: DeliverTo) -> None:
    outcome = deliver_to("http://no-such-host.invalid").post()

    assert isinstance(outcome, Away)
    assert "name" in outcome.why or "no connection" in outcome.why


def test_a_hanging_server(collector: Collector, posting: Posting) -> None:
    collector.always = HANG
    posting.delivery._pace = replace(posting.delivery._pace, read_timeout=0.3)
    began = time.monotonic()

    outcome = posting.post()

    assert outcome == Away("no answer within 0.3 s")
    assert time.monotonic() - began < 2.0


def test_a_hanging_server_with_little_time_left(
    collector: Collector, deliver_to: DeliverTo
) -> None:
    collector.always = HANG
    patient = deliver_to(collector.url, read_timeout=30.0)
    patient.put()
    began = time.monotonic()

    patient.delivery.run(began + 0.3, closing=True)

    assert time.monotonic() - began < 2.0
    assert collector.requests
    assert len(patient.queue) == 1


def test_a_connection_without_an_answer(collector: Collector, posting: Posting) -> None:
    collector.always = CLOSE

    assert posting.post() == Away("it closed the connection without an answer")


def test_a_kept_connection_that_the_server_closed(collector: Collector, posting: Posting) -> None:
    assert isinstance(posting.post(), Accepted)
    collector.replies.append(CLOSE)

    # Not seen as a fault: the second attempt is made at once.
    assert isinstance(posting.post(), Accepted)


def test_what_is_no_http(deliver_to: DeliverTo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        one = deliver_to(f"http://127.0.0.1:{server.getsockname()[1]}", read_timeout=0.2)

        assert one.post() == Away("no answer within 0.2 s")


def test_one_connection_serves_many_batches(collector: Collector, posting: Posting) -> None:
    for _ in range(5):
        posting.post()

    assert collector.connections <= 1


def test_the_token_is_sent_and_only_then(
    collector: Collector, posting: Posting, deliver_to: DeliverTo
) -> None:
    posting.post()
    deliver_to(collector.url, "s3cret").post()

    assert collector.authorizations == [None, "Bearer s3cret"]


def test_a_server_behind_a_path(collector: Collector, deliver_to: DeliverTo) -> None:
    outcome = deliver_to(f"{collector.url}/rankscope").post()  # the collector knows no such path

    assert isinstance(outcome, Away)
    assert "404" in outcome.why


def test_a_proxy_is_used_but_not_for_this_machine(
    collector: Collector, deliver_to: DeliverTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", collector.url)

    far = deliver_to("http://far.invalid").post()
    near = deliver_to(collector.url).post()

    assert isinstance(far, Away)
    assert "404" in far.why  # the collector, as a proxy, is asked for the whole address
    assert isinstance(near, Accepted)
