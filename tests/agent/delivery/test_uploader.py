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
from tests.support.servers.uploaders import uploaders

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
    wait_until(lambda: pid not in uploaders())


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
    wait_until(lambda: pid not in uploaders())
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
    wait_until(lambda: pid not in uploaders())


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
        wait_until(lambda pid=pid: pid not in uploaders())
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


# ----------------------------------------------------------------------------------- in a trainer

TRAINER = """
import os, signal, sys, time
from pathlib import Path
from rankscope.agent import wire
from rankscope.agent.delivery import process_exit
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from rankscope.agent.delivery.records import Records
from rankscope.agent.delivery.pace import Pace
from rankscope.agent.delivery.sender import Sender

sys.path.insert(0, sys.argv[3])
from tests.support.servers.uploaders import uploaders

# A shell that starts something in the background has it ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
records = Records()
sender = Sender(
    records,
    options=Options(server=sys.argv[1], spool=Path(sys.argv[2])),
    identity=Identity(run="run", rank=0),
    hello=lambda: wire.Hello(started_at=1.0),
    phase=lambda: "step",
    pace=Pace(batch=0.02, uploader_after=0.0),
)
before = uploaders()
sender.start()
process_exit.add(sender.close)
step = 0

def train(until=lambda: False):
    global step
    while not until():
        records.scalars(step, {"loss": float(step)})
        records.complete(step)
        step += 1
        time.sleep(0.005)

def up():
    # It takes the lowest priority when it has come up; what it is started by ends at once.
    try:
        return [os.getpriority(0, pid) for pid in uploaders(os.getpid()) - before] == [19]
    except ProcessLookupError:
        return False

train(until=up)
have = sender.counters.posts
train(until=lambda: sender.counters.posts > have + 20)
sys.stdout.write(f"{(uploaders(os.getpid()) - before).pop()}\\n")
sys.stdout.flush()
"""


@pytest.fixture
def begin(tmp_path: Path, collector: Collector) -> Iterator[object]:
    """Starts a trainer that goes on with some lines of Python; it, and its uploader's process."""
    running: list[subprocess.Popen[str]] = []

    def start(lines: str) -> tuple[subprocess.Popen[str], int]:
        script = tmp_path / "trainer.py"
        script.write_text(TRAINER + lines)
        repository = str(Path(__file__).parents[3])
        process = subprocess.Popen(
            [sys.executable, str(script), collector.url, str(tmp_path / "spool"), repository],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    yield start
    for process in running:
        process.kill()
        process.communicate()


def all_arrived(collector: Collector) -> None:
    steps = list(collector.points("loss"))
    assert steps == list(range(len(steps)))
    assert len({batch.session for batch in collector.batches}) == 1


def test_a_trainer_ends_and_so_does_its_uploader(collector: Collector, begin) -> None:
    process, pid = begin("")
    assert process.wait(20) == 0
    wait_until(lambda: pid not in uploaders())
    all_arrived(collector)
    assert collector.batches[-1].state == "finished"
    assert not [e for batch in collector.batches for e in batch.events]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_leaves_time_for_the_exit_report(
    collector: Collector, begin, number: signal.Signals
) -> None:
    process, pid = begin("train()")
    os.killpg(process.pid, number)
    assert process.wait(20) != 0
    all_arrived(collector)
    last = collector.batches[-1]
    assert last.state == "failed"
    assert ("SIGTERM" if number == signal.SIGTERM else "KeyboardInterrupt") in last.error
    wait_until(lambda: pid not in uploaders())


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_that_the_trainer_handles_does_not_end_its_uploader(
    collector: Collector, begin, number: signal.Signals
) -> None:
    # As a scheduler asks a job to save itself and to come back.
    process, pid = begin(
        f"""
received = []
alive = uploaders(os.getpid()) - before
signal.signal({int(number)}, lambda *_: received.append(1))
sys.stdout.write("ready\\n")
sys.stdout.flush()
train(until=lambda: received)
have = sender.counters.posts
train(until=lambda: sender.counters.posts > have + 5)
assert uploaders(os.getpid()) - before == alive
"""
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, number)
    assert process.wait(20) == 0
    all_arrived(collector)


def test_sigpipe_of_a_lost_uploader_does_not_end_the_trainer(collector: Collector, begin) -> None:
    process, _ = begin(
        """
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.kill((uploaders(os.getpid()) - before).pop(), 9)
have = sender.counters.posts
train(until=lambda: sender.counters.posts > have + 5)
"""
    )
    assert process.wait(20) == 0
    all_arrived(collector)


def test_an_uploader_that_stands_still_does_not_cost_the_exit_report(
    collector: Collector, begin
) -> None:
    process, pid = begin(
        """
os.kill((uploaders(os.getpid()) - before).pop(), signal.SIGSTOP)
# Long enough for the next post to have begun.
began = time.monotonic()
train(until=lambda: time.monotonic() - began > 0.3)
sender.close("failed", "its exit report")
assert time.monotonic() - began < 2.0
"""
    )
    try:
        assert process.wait(20) == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    all_arrived(collector)
    assert collector.batches[-1].error == "its exit report"
    assert not [e for batch in collector.batches for e in batch.events]


def test_a_trainer_that_is_killed_takes_its_uploader_along_and_frees_its_output(
    collector: Collector, begin
) -> None:
    process, pid = begin("train()")
    os.kill(pid, signal.SIGSTOP)
    process.kill()
    # Whoever reads the trainer's output to its end does not wait for the uploader.
    process.communicate(timeout=5)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: pid not in uploaders())


def test_a_worker_that_outlives_the_trainer_does_not_keep_the_uploader(begin) -> None:
    process, pid = begin(
        """
if os.fork() == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
train()
"""
    )
    wait_until(lambda: bool(children(process.pid)))
    (worker,) = children(process.pid)
    try:
        process.kill()
        wait_until(lambda: pid not in uploaders())
    finally:
        os.kill(worker, signal.SIGKILL)


def test_an_uploader_that_is_killed_costs_nothing(collector: Collector, begin) -> None:
    process, pid = begin(
        """
os.kill((uploaders(os.getpid()) - before).pop(), 9)
have = sender.counters.posts
train(until=lambda: sender.counters.posts > have + 5)
"""
    )
    assert process.wait(20) == 0
    all_arrived(collector)
    (note,) = [e for batch in collector.batches for e in batch.events]
    assert note.kind == "agent.note"
    assert "it has ended" in note.text


def children(parent: int) -> list[int]:
    """Process ids."""
    done = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]
