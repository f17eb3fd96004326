"""The process that posts for a trainer: what it is, and that it is in nobody's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import collector as collectors
from support.collector import HANG, Collector, wait_until
from support.couriers import couriers

from rankscope.agent import wire
from rankscope.agent.courier import Courier, CourierLost, can_be_started
from rankscope.agent.posting import LARGEST_ANSWER, NoReply, Reply
from rankscope.agent.transport import Accepted, Transport

BODY = wire.encode(wire.Batch(run="r", rank=0, seq=0))
HEADERS = {"Content-Type": wire.CONTENT_TYPE, "Authorization": "Bearer s3cret"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture
def before() -> set[int]:
    """Couriers that others left."""
    return couriers()


@pytest.fixture
def courier(collector: Collector, before: set[int]) -> Iterator[Courier]:
    made = Courier(f"{collector.url}/api/v1/ingest", HEADERS, None)
    wait_until(made.ready)
    yield made
    made.close()


@pytest.fixture
def pid(courier: Courier, before: set[int]) -> int:
    """Of the courier."""
    (found,) = couriers() - before
    return found


def post(courier: Courier, body: bytes = BODY) -> Reply | NoReply:
    return courier.post(body, connect=1.0, read=0.3)


def test_what_it_posts_and_brings(collector: Collector, courier: Courier) -> None:
    reply = post(courier)

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
    courier = Courier(collector.url, {}, None)
    wait_until(courier.ready)
    assert children(os.getpid()) == before
    courier.close()
    assert children(os.getpid()) == before


def test_it_ends_with_its_socket(courier: Courier, pid: int) -> None:
    courier.close()
    wait_until(lambda: pid not in couriers())


def test_bodies_and_answers_larger_than_a_socket_holds(
    collector: Collector, courier: Courier
) -> None:
    large = wire.encode(wire.Batch(run="r" * 200, rank=0, seq=1, error="e" * 5_000_000))
    reply = post(courier, large)
    assert isinstance(reply, Reply)
    assert len(collector.batches[-1].error) == 5_000_000

    collector.always = collectors.Reply(body="x" * 200_000)
    reply = post(courier)
    assert isinstance(reply, Reply)
    assert len(reply.body) == LARGEST_ANSWER + 1


def test_one_that_was_killed_is_known_at_once(courier: Courier, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in couriers())
    began = time.monotonic()
    with pytest.raises(CourierLost, match="it has ended"):
        post(courier)
    assert time.monotonic() - began < 1.0


def test_one_that_is_killed_while_it_posts(collector: Collector, courier: Courier, pid: int):
    collector.always = HANG
    with subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {pid}"]):
        with pytest.raises(CourierLost, match="it has ended"):
            courier.post(BODY, connect=1.0, read=20.0)


def test_one_that_stands_still_is_not_waited_for(
    courier: Courier, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.agent.courier._PATIENCE_SECONDS", 0.2)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(CourierLost, match=r"no answer of it within 0\.5 s"):
            courier.post(b"x" * 10**7, connect=0.1, read=0.2)
        with pytest.raises(CourierLost):
            courier.post(BODY, connect=0.1, read=0.2)
    finally:
        courier.close()
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: pid not in couriers())


def test_no_program_to_run(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        Courier(collector.url, {}, None)


def test_a_program_that_is_no_python(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    made = Courier(collector.url, {}, None)
    with pytest.raises(CourierLost, match="it ended while it started"):
        wait_until(made.ready)
    made.close()


def test_one_that_does_not_come_up_is_given_up(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 5\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr("rankscope.agent.courier._START_SECONDS", 0.1)
    made = Courier(collector.url, {}, None)
    assert made.ready() is False
    with pytest.raises(CourierLost, match="it has not started within"):
        wait_until(made.ready)
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 1.0


# --------------------------------------------------------------------------------- in a transport


def test_it_takes_over_after_an_answer_and_some_time(
    collector: Collector, before: set[int]
) -> None:
    transport = Transport(collector.url, None, courier_after=0.2)
    for _ in range(3):
        assert isinstance(transport.post(BODY), Accepted)
    assert couriers() == before

    wait_until(lambda: isinstance(transport.post(BODY), Accepted) and collector.connections == 2)
    assert len(couriers() - before) == 1
    transport.close()
    wait_until(lambda: couriers() <= before)


def test_without_a_server_there_is_none(collector: Collector, before: set[int]) -> None:
    transport = Transport(collector.url, None, courier_after=0.0)
    collector.stop()
    for _ in range(3):
        transport.post(BODY)
    assert couriers() == before
    transport.close()


@pytest.mark.parametrize("program", ["", None, "/opt/app/trainer"])
def test_a_program_that_is_no_interpreter_is_not_started_again(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, program: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    monkeypatch.setattr("subprocess.Popen", None)
    transport = Transport(collector.url, None, courier_after=0.0)
    for _ in range(3):
        assert isinstance(transport.post(BODY), Accepted)
    transport.close()


def test_a_frozen_application_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_be_started()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not can_be_started()


def test_the_last_posts_are_made_without_it(collector: Collector, before: set[int]) -> None:
    transport = Transport(collector.url, None, courier_after=0.0)
    wait_until(lambda: isinstance(transport.post(BODY), Accepted) and collector.connections == 2)
    os.kill((couriers() - before).pop(), signal.SIGSTOP)
    began = time.monotonic()
    assert isinstance(transport.post(BODY, at_most=2.0), Accepted)
    assert time.monotonic() - began < 1.0
    for stopped in couriers() - before:
        os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: couriers() <= before)
    transport.close()


# ----------------------------------------------------------------------------------- in a trainer

TRAINER = """
import os, signal, sys, time
from pathlib import Path
from rankscope.agent import last_words, wire
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from rankscope.agent.records import Records
from rankscope.agent.sender import Pace, Sender

sys.path.insert(0, sys.argv[3])
from support.couriers import couriers

# A shell that starts something in the background has it ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
records = Records()
sender = Sender(
    records,
    options=Options(server=sys.argv[1], spool=Path(sys.argv[2])),
    identity=Identity(run="run", rank=0),
    hello=lambda: wire.Hello(started_at=1.0),
    phase=lambda: "step",
    pace=Pace(batch=0.02, courier_after=0.0),
)
before = couriers()
sender.start()
last_words.add(sender.close)
step = 0

def train(until=lambda: False):
    global step
    while not until():
        records.scalars(step, {"loss": float(step)})
        records.complete(step)
        step += 1
        time.sleep(0.005)

train(until=lambda: couriers() - before)
have = sender.counters.posts
train(until=lambda: sender.counters.posts > have + 20)
sys.stdout.write(f"{(couriers() - before).pop()}\\n")
sys.stdout.flush()
"""


@pytest.fixture
def begin(tmp_path: Path, collector: Collector) -> Iterator[object]:
    """Starts a trainer that goes on with some lines of Python; it, and its courier's process."""
    running: list[subprocess.Popen[str]] = []

    def start(lines: str) -> tuple[subprocess.Popen[str], int]:
        script = tmp_path / "trainer.py"
        script.write_text(TRAINER + lines)
        tests = str(Path(__file__).parents[1])
        process = subprocess.Popen(
            [sys.executable, str(script), collector.url, str(tmp_path / "spool"), tests],
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


def test_a_trainer_ends_and_so_does_its_courier(collector: Collector, begin) -> None:
    process, pid = begin("")
    assert process.wait(20) == 0
    wait_until(lambda: pid not in couriers())
    all_arrived(collector)
    assert collector.batches[-1].state == "finished"
    assert not [e for batch in collector.batches for e in batch.events]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_leaves_time_for_last_words(
    collector: Collector, begin, number: signal.Signals
) -> None:
    process, pid = begin("train()")
    os.killpg(process.pid, number)
    assert process.wait(20) != 0
    all_arrived(collector)
    last = collector.batches[-1]
    assert last.state == "failed"
    assert ("SIGTERM" if number == signal.SIGTERM else "KeyboardInterrupt") in last.error
    wait_until(lambda: pid not in couriers())


def test_a_trainer_that_is_killed_takes_its_courier_along_and_frees_its_output(
    collector: Collector, begin
) -> None:
    process, pid = begin("train()")
    os.kill(pid, signal.SIGSTOP)
    process.kill()
    # Whoever reads the trainer's output to its end does not wait for the courier.
    process.communicate(timeout=5)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: pid not in couriers())


def test_a_worker_that_outlives_the_trainer_does_not_keep_the_courier(begin) -> None:
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
        wait_until(lambda: pid not in couriers())
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_courier_that_is_killed_costs_nothing(collector: Collector, begin) -> None:
    process, pid = begin(
        """
os.kill((couriers() - before).pop(), 9)
have = sender.counters.posts
train(until=lambda: sender.counters.posts > have + 5)
"""
    )
    assert process.wait(20) == 0
    all_arrived(collector)
    (fault,) = [e for batch in collector.batches for e in batch.events]
    assert fault.kind == "agent.fault"
    assert fault.text.startswith("courier: CourierLost: it has ended")


def children(parent: int) -> list[int]:
    """Process ids."""
    done = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]
