"""The sender in processes that fork, end, crash and are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.agent.delivery.sync import sync
from tests.support.servers.collector import HANG, Collector

# A trainer without torch: publishes three steps and says so; then `END` happens.
TRAINER = """
import logging, multiprocessing, os, signal, sys, threading, time
from pathlib import Path
from rankscope.agent import wire
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from rankscope.agent.delivery.records import Records
from rankscope.agent.delivery.sender import Sender

server, spool = sys.argv[1:3]

def begin(rank=0):
    records = Records()
    sender = Sender(
        records,
        options=Options(server=server, spool=Path(spool)),
        identity=Identity(run="run", rank=rank),
        hello=lambda: wire.Hello(started_at=1.0),
        phase=lambda: "step",
    )
    sender.start()
    return records, sender

def train(records, first=0, steps=3):
    for step in range(first, first + steps):
        records.scalars(step, {"loss": float(step)})
        records.complete(step)

def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

def child(rank, end):
    records, sender = begin(rank)
    train(records)
    if end == "raise":
        raise RuntimeError("boom")
    if end == "exit":
        sys.exit(3)

if __name__ == "__main__":
"""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def command(tmp_path: Path, collector: Collector, end: str) -> list[str]:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER + "".join(f"    {line}\n" for line in end.strip().splitlines()))
    # From 3.12 on Python itself warns of each fork of a process with threads.
    forks = "ignore:This process:DeprecationWarning"
    return [sys.executable, "-W", forks, str(script), collector.url, str(tmp_path / "spool")]


def run(tmp_path: Path, collector: Collector, end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(tmp_path, collector, end), capture_output=True, text=True, timeout=60
    )


def test_a_process_that_just_ends_has_sent_everything(
    tmp_path: Path, collector: Collector, spool: Path
) -> None:
    done = run(tmp_path, collector, "records, sender = begin()\ntrain(records)")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert collector.points("loss") == {0: 0.0, 1: 1.0, 2: 2.0}
    assert collector.batches[-1].state == "finished"
    assert collector.batches[-1].through_step == 2
    assert not spool.exists()


@pytest.mark.parametrize(
    ("end", "state", "error"),
    [
        ("raise RuntimeError('boom')", "failed", "RuntimeError: boom"),
        ("sys.exit(0)", "finished", ""),
        ("threading.Thread(target=time.sleep, args=(0.1,)).start()", "finished", ""),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass", "finished", ""),
    ],
)
def test_how_a_process_ended_is_said(
    tmp_path: Path, collector: Collector, end: str, state: str, error: str
) -> None:
    run(tmp_path, collector, f"records, sender = begin()\ntrain(records)\n{end}")

    last = collector.batches[-1]
    assert last.state == state
    assert last.error.startswith(error)
    assert bool(last.error) == bool(error)
    assert len(collector.points("loss")) == 3


@pytest.mark.parametrize(
    ("method", "end", "state"),
    [
        ("fork", "", "finished"),
        ("fork", "raise", "failed"),
        ("fork", "exit", "failed"),
        ("spawn", "", "finished"),
        ("spawn", "raise", "failed"),
    ],
)
def test_a_rank_that_multiprocessing_started_sends_its_exit_report(
    tmp_path: Path, collector: Collector, method: str, end: str, state: str
) -> None:
    run(
        tmp_path,
        collector,
        f"context = multiprocessing.get_context({method!r})\n"
        f"process = context.Process(target=child, args=(1, {end!r}))\n"
        "process.start()\n"
        "process.join()",
    )

    assert len(collector.points("loss", rank=1)) == 3
    assert collector.batches[-1].state == state


def test_without_a_server_one_line_is_printed(tmp_path: Path, spool: Path) -> None:
    nobody = Collector()
    done = run(
        tmp_path,
        nobody,
        "records, sender = begin()\n"
        "train(records, steps=300)\n"
        "while sender.counters.failures < 4:\n"
        "    time.sleep(0.01)\n",
    )

    assert (done.returncode, done.stdout) == (0, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"rankscope: the server {nobody.url} is away")
    with nobody:
        report = sync(spool, nobody.url, None)
        assert (report.left, report.duplicates) == (0, 0)
        assert list(nobody.points("loss")) == list(range(300))
        assert nobody.batches[-1].state == "finished"


def test_a_hanging_server_holds_the_exit_up_for_five_seconds_at_most(
    tmp_path: Path, collector: Collector, spool: Path
) -> None:
    collector.always = HANG
    done = run(
        tmp_path,
        collector,
        """
records, sender = begin()
train(records)
began = time.monotonic()
sender.close()
say(str(time.monotonic() - began))
""",
    )

    assert done.returncode == 0
    assert float(done.stdout) < 5.2
    collector.stop()
    collector.always = None
    collector.start()
    sync(spool, collector.url, None)
    assert len(collector.points("loss")) == 3


def test_a_forked_child_is_silent(tmp_path: Path, collector: Collector, spool: Path) -> None:
    done = run(
        tmp_path,
        collector,
        """
records, sender = begin()
train(records)
began = time.monotonic()
pid = os.fork()
if pid == 0:
    # Everything that a worker may do with what it inherited, and then an ordinary exit.
    waiting = records.waiting
    train(records, first=100)
    assert records.waiting == waiting, "nobody would ever drain it"
    sender.start()
    sender.close("failed", "the child")
    assert sender.counters.posts == 0
    assert threading.active_count() == 1
    sys.exit(0)
_, status = os.waitpid(pid, 0)
say(f"{status} {time.monotonic() - began < 2.0}")
train(records, first=3)
""",
    )

    assert done.stdout == "0 True\n"
    assert done.stderr == ""
    assert list(collector.points("loss")) == list(range(6))
    assert {batch.state for batch in collector.batches} == {"running", "finished"}
    assert len({batch.session for batch in collector.batches}) == 1
    assert not spool.exists()


def test_a_forked_child_leaves_the_spool_of_its_parent_alone(tmp_path: Path, spool: Path) -> None:
    nobody = Collector()
    done = run(
        tmp_path,
        nobody,
        """
records, sender = begin()
train(records)
while sender.counters.spooled < 3:
    time.sleep(0.01)
files = sorted(Path(spool).rglob("*.batch"))
pid = os.fork()
if pid == 0:
    sender.close()
    sys.exit(0)
os.waitpid(pid, 0)
assert set(files) <= set(Path(spool).rglob("*.batch"))
from rankscope.agent.delivery.spool import SpoolFolder
assert not SpoolFolder(files[0].parent).acquire(), "the parent's lock is gone"
""",
    )

    assert done.returncode == 0, done.stderr
    with nobody:
        sync(spool, nobody.url, None)
        assert len(nobody.points("loss")) == 3


def test_a_killed_process_loses_nothing_that_waited_for_the_server(
    tmp_path: Path, spool: Path
) -> None:
    nobody = Collector()
    end = """
records, sender = begin()
first = 0
while True:
    train(records, first)
    first += 3
    while sender.counters.spooled < first:
        time.sleep(0.005)
    say(str(first))
"""
    with subprocess.Popen(
        command(tmp_path, nobody, end), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        published = [int(process.stdout.readline()) for _ in range(3)][-1]
        process.send_signal(signal.SIGKILL)
        process.wait()

    with nobody:
        # The rank's next process sends it, without being asked.
        restarted = run(tmp_path, nobody, "records, sender = begin()\ntrain(records, first=1000)")
        assert restarted.stderr == ""
        arrived = list(nobody.points("loss"))
    assert arrived[:published] == list(range(published))
    assert arrived[-3:] == [1000, 1001, 1002]
    assert len({batch.session for batch in nobody.batches}) == 2
    assert list(spool.rglob("*.batch")) == []


def test_a_killed_process_loses_half_a_second_at_most(tmp_path: Path, collector: Collector) -> None:
    end = """
records, sender = begin()
for step in range(10**9):
    train(records, step, steps=1)
    say(f"{step} {time.time()}")
    time.sleep(0.002)
"""
    with subprocess.Popen(
        command(tmp_path, collector, end), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        collector.wait_for(lambda c: len(c.points("loss")) > 300)
        process.send_signal(signal.SIGKILL)
        lines = [line.split() for line in process.stdout.read().splitlines()]
    times = {int(step): float(at) for step, at in lines if at}

    arrived = collector.points("loss")
    assert list(arrived) == list(range(len(arrived)))
    last = max(times)
    assert times[last] - times[min(len(arrived), last)] < 1.0


def test_another_process_cannot_take_a_living_ones_spool(tmp_path: Path, spool: Path) -> None:
    nobody = Collector()
    end = """
records, sender = begin()
train(records)
while sender.counters.spooled < 3:
    time.sleep(0.01)
say("ready")
sys.stdin.read()
"""
    with subprocess.Popen(
        command(tmp_path, nobody, end),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        # A server that only `sync` can reach.
        with Collector() as elsewhere:
            report = sync(spool, elsewhere.url, None)
            assert (report.sent, report.in_use) == (0, 1)
            process.kill()
            process.wait()
            report = sync(spool, elsewhere.url, None)
            assert report.in_use == 0
            assert len(elsewhere.points("loss")) == 3


def test_a_worker_that_outlives_its_parent_does_not_keep_the_spool(
    tmp_path: Path, spool: Path
) -> None:
    nobody = Collector()
    end = """
records, sender = begin()
train(records)
while sender.counters.spooled < 3:
    time.sleep(0.01)
if os.fork() == 0:
    # By now it has let go of what it was born with.
    say(str(os.getpid()))
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""
    with subprocess.Popen(
        command(tmp_path, nobody, end), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
        process.wait()
        try:
            with nobody:
                report = sync(spool, nobody.url, None)
        finally:
            os.kill(worker, signal.SIGKILL)

    assert (report.in_use, report.left) == (0, 0)
    assert len(nobody.points("loss")) == 3


def test_importing_the_sender_needs_neither_torch_nor_the_server() -> None:
    heavy = "{'torch', 'fastapi', 'sqlalchemy', 'plotly', 'pydantic', 'tensorboard', 'requests'}"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, rankscope.agent.delivery.sender; print({heavy} & set(sys.modules))",
        ],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )

    assert done.stdout == "set()\n"
