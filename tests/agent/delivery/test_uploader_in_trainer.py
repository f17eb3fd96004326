"""The process that posts for a trainer ends with it, and whatever befalls it costs no data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.collector import Collector, wait_until
from tests.support.servers.uploaders import assert_ended, children

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
    assert_ended(pid)
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
    assert_ended(pid)


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
    assert process.returncode == -signal.SIGKILL
    os.kill(pid, signal.SIGCONT)
    assert_ended(pid)


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
        assert_ended(pid)
        assert Path(f"/proc/{worker}").exists()
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
