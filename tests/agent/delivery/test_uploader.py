"""The process that posts for a trainer: what it is, and that it is in nobody's way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.agent.delivery import uploader as uploader_module
from rankscope.agent.delivery.http import LARGEST_ANSWER, NoReply, Reply
from rankscope.agent.delivery.outcome import Accepted, Away
from rankscope.agent.delivery.uploader import Uploader, UploaderLost, can_be_started
from tests.support.servers import collector as collectors
from tests.support.servers.collector import HANG, Collector, wait_until
from tests.support.servers.sending import BODY, Posting
from tests.support.servers.uploaders import assert_ended, children, uploaders

DeliverTo = Callable[..., Posting]
HEADERS = {"Content-Type": wire.CONTENT_TYPE, "Authorization": "Bearer s3cret"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture
def before() -> set[int]:
    """Uploaders that others left; they may end at any time."""
    return uploaders()


@pytest.fixture
def uploader(collector: Collector, before: set[int]) -> Iterator[Uploader]:
    made = Uploader(f"{collector.url}/api/v1/ingest", HEADERS, None)
    made.start()
    wait_until(made.ready)
    yield made
    made.close()


@pytest.fixture
def pid(uploader: Uploader, before: set[int]) -> int:
    """Of the uploader."""
    (found,) = uploaders(os.getpid()) - before
    return found


def post(uploader: Uploader, body: bytes = BODY) -> Reply | NoReply:
    return uploader.post(body, connect=30.0, read=30.0)  # longer than a busy machine takes


def test_what_it_posts_and_brings(collector: Collector, uploader: Uploader) -> None:
    reply = post(uploader)

    assert isinstance(reply, Reply)
    assert reply.status == 200
    assert b'"accepted"' in reply.body
    assert collector.authorizations == ["Bearer s3cret"]
    assert [batch.run for batch in collector.batches] == ["r"]


def test_it_has_the_lowest_priority_and_no_secrets_to_be_seen(pid: int) -> None:
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    process = Path(f"/proc/{pid}")
    assert b"s3cret" not in (process / "cmdline").read_bytes()
    assert b"s3cret" not in (process / "environ").read_bytes()


def test_the_trainer_has_no_child_and_no_zombie(collector: Collector) -> None:
    before = children(os.getpid())
    uploader = Uploader(collector.url, {}, None)
    uploader.start()
    # Not even while it starts.
    assert children(os.getpid()) <= before
    wait_until(uploader.ready)
    assert children(os.getpid()) <= before
    uploader.close()
    assert children(os.getpid()) <= before


def test_it_ends_with_its_socket(uploader: Uploader, pid: int) -> None:
    uploader.close()
    assert_ended(pid)
    with pytest.raises(UploaderLost, match="Bad file descriptor"):
        post(uploader)


def test_bodies_and_answers_larger_than_a_socket_holds(
    collector: Collector, uploader: Uploader
) -> None:
    drawn = np.random.default_rng(0).standard_normal(500_000)
    column = wire.Column(np.arange(len(drawn)), drawn)
    large = wire.encode(wire.Batch(run="r", rank=0, seq=1, columns={"loss": column}))
    assert len(large) > 3_000_000
    reply = post(uploader, large)
    assert isinstance(reply, Reply)
    assert (collector.batches[-1].columns["loss"].values == drawn).all()

    collector.always = collectors.Reply(body="x" * 200_000)
    reply = post(uploader)
    assert isinstance(reply, Reply)
    assert len(reply.body) == LARGEST_ANSWER + 1


def test_one_that_was_killed_is_known_at_once(uploader: Uploader, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert_ended(pid)
    began = time.monotonic()
    with pytest.raises(UploaderLost, match="it has ended"):
        post(uploader)
    assert time.monotonic() - began < 1.0


def test_one_that_is_killed_while_it_posts(collector: Collector, uploader: Uploader, pid: int):
    collector.always = HANG
    with subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {pid}"]):
        with pytest.raises(UploaderLost, match="it has ended"):
            uploader.post(BODY, connect=1.0, read=20.0)


def test_one_that_stands_still_is_not_waited_for(
    uploader: Uploader, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.agent.delivery.uploader._PATIENCE_SECONDS", 0.2)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(UploaderLost, match=r"no answer of it within 0\.5 s"):
            uploader.post(b"x" * 10**7, connect=0.1, read=0.2)
        with pytest.raises(UploaderLost):
            uploader.post(BODY, connect=0.1, read=0.2)
    finally:
        uploader.close()
        os.kill(pid, signal.SIGCONT)
    assert_ended(pid)


def test_no_program_to_run(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    made = Uploader(collector.url, {}, None)
    with pytest.raises(UploaderLost, match="No such file"):
        made.start()
    made.close()


def test_a_program_that_is_no_python(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    made = Uploader(collector.url, {}, None)
    made.start()
    with pytest.raises(UploaderLost, match="it ended while it started"):
        wait_until(made.ready)
    made.close()


def test_one_that_does_not_come_up_is_given_up(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 20\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr("rankscope.agent.delivery.uploader._START_SECONDS", 0.1)
    made = Uploader(collector.url, {}, None)
    made.start()
    with pytest.raises(UploaderLost, match="it has not started within"):
        wait_until(made.ready)
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 1.0


# -------------------------------------------------------------------------------- in a delivery


def test_it_takes_over_after_an_answer_and_some_time(
    collector: Collector, deliver_to: DeliverTo, before: set[int]
) -> None:
    posting = deliver_to(collector.url, uploader_after=0.2)
    for _ in range(3):
        assert isinstance(posting.post(), Accepted)
    assert uploaders(os.getpid()) <= before

    wait_until(lambda: isinstance(posting.post(), Accepted) and collector.connections == 2)
    assert len(uploaders(os.getpid()) - before) == 1
    posting.close()
    wait_until(lambda: uploaders(os.getpid()) <= before)


def by_uploader(posting: Posting) -> None:
    """Posts until the uploader does."""
    wait_until(lambda: isinstance(posting.post(), Accepted) and posting.by_uploader)


def test_an_answer_that_was_not_read_is_not_taken_for_the_next(
    collector: Collector, deliver_to: DeliverTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    posting = deliver_to(collector.url, uploader_after=0.0)
    by_uploader(posting)

    def no_memory(*given: object) -> None:
        raise MemoryError

    with monkeypatch.context() as changed:
        changed.setattr(uploader_module, "_reply", no_memory)
        with pytest.raises(MemoryError):
            posting.post()
    collector.always = collectors.Reply(status=503)
    assert isinstance(posting.post(), Away)
    posting.close()


def test_a_lost_one_is_reported_once_and_another_comes(
    collector: Collector,
    deliver_to: DeliverTo,
    before: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rankscope.agent.delivery.uploader._AGAIN_SECONDS", 0.1)
    posting = deliver_to(collector.url, uploader_after=0.0)
    for _ in range(2):
        by_uploader(posting)
        (pid,) = uploaders(os.getpid()) - before
        os.kill(pid, signal.SIGKILL)
        assert_ended(pid)
        assert isinstance(posting.post(), Accepted)
    by_uploader(posting)
    posting.close()
    assert len(posting.reasons) == 1
    assert posting.reasons[0].startswith("it has ended")


def test_one_that_does_not_reach_the_server_is_not_believed(
    collector: Collector,
    deliver_to: DeliverTo,
    before: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A name that this process alone knows, as it may be with a certificate or a proxy.
    known = socket.getaddrinfo

    def resolve(host: str, *given: Any, **named: Any) -> Any:
        return known("127.0.0.1" if host == "trainer-only.invalid" else host, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    posting = deliver_to(f"http://trainer-only.invalid:{collector.port}", uploader_after=0.0)

    def given_up() -> bool:
        assert isinstance(posting.post(), Accepted)
        return bool(posting.reasons)

    wait_until(given_up)
    assert posting.reasons[0].startswith("it does not reach the server: ")
    wait_until(lambda: uploaders(os.getpid()) <= before)
    assert isinstance(posting.post(), Accepted)
    posting.close()


def test_a_server_that_goes_away_is_away_for_both(
    collector: Collector, deliver_to: DeliverTo
) -> None:
    posting = deliver_to(collector.url, uploader_after=0.0)
    by_uploader(posting)
    collector.stop()
    assert posting.post() == Away("no connection (Connection refused)")
    collector.start()
    assert isinstance(posting.post(), Accepted)
    assert posting.by_uploader
    assert posting.reasons == []
    posting.close()


def test_without_a_server_there_is_none(
    collector: Collector, deliver_to: DeliverTo, before: set[int]
) -> None:
    posting = deliver_to(collector.url, uploader_after=0.0)
    collector.stop()
    for _ in range(3):
        posting.post()
    assert uploaders(os.getpid()) <= before
    posting.close()


@pytest.mark.parametrize(
    "program", ["", None, "/opt/app/trainer", "/opt/app/python_trainer", "/usr/bin/python-mpi"]
)
def test_a_program_that_is_no_interpreter_is_not_started_again(
    collector: Collector,
    deliver_to: DeliverTo,
    monkeypatch: pytest.MonkeyPatch,
    program: str | None,
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    monkeypatch.setattr("subprocess.Popen", None)
    posting = deliver_to(collector.url, uploader_after=0.0)
    for _ in range(3):
        assert isinstance(posting.post(), Accepted)
    posting.close()


@pytest.mark.parametrize("name", ["python", "python3", "python3.13", "python3.13t", "pypy3.11"])
def test_an_interpreter_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "executable", f"/usr/bin/{name}")
    assert can_be_started()


def test_neither_frozen_nor_first_nor_zipped(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, value in (
        (sys, "frozen", True),
        (os, "getpid", lambda: 1),
        (uploader_module, "_SCRIPT", Path("/app.pyz/rankscope/agent/delivery/uploader_process.py")),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, attribute, value, raising=False)
            assert not can_be_started()
    assert can_be_started()


def test_the_last_posts_are_made_without_it(
    collector: Collector, deliver_to: DeliverTo, before: set[int]
) -> None:
    posting = deliver_to(collector.url, uploader_after=0.0)
    by_uploader(posting)
    (pid,) = uploaders(os.getpid()) - before
    os.kill(pid, signal.SIGSTOP)
    posting.put()
    began = time.monotonic()
    posting.delivery.run(began + 2.0, closing=True)
    assert time.monotonic() - began < 1.0
    assert not posting.queue
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: uploaders(os.getpid()) <= before)
    posting.close()
