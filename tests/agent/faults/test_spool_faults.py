"""The disk is full, read-only or cleaned up under way, while the server is away."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import subprocess
import sys

import pytest

from rankscope.agent.delivery import spool
from rankscope.agent.delivery.spool import SpoolFolder
from tests.support import saboteur
from tests.support.servers.collector import wait_until


def full(path, mode="r", *args, **kwargs):
    """What is written goes to a device that is full, always."""
    return builtins.open("/dev/full" if "w" in mode else path, mode, *args, **kwargs)


def no_room(*args, **kwargs):
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


@pytest.fixture
def away_until(house, collector):
    """Has the server away until a number of requests have failed, and calls something there."""

    def train(then=lambda: None, *, back=True):
        collector.stop()
        sender = None

        def each(step):
            nonlocal sender
            sender = house.monitors[-1]._connection.sender
            if step == 3:
                wait_until(lambda: sender.counters.failures >= 2)
                then()
            if step == 6:
                failures = sender.counters.failures
                wait_until(lambda: sender.counters.failures >= failures + 2)
                if back:
                    collector.start()
                    collector.wait_for(lambda c: len(c.batches) > 1)

        outcome = house.train(each=each)
        return outcome, sender

    return train


def only_faults(house):
    return sorted(event.text.split(":")[0] for event in house.faults)


@pytest.mark.parametrize("fault", ["full", "quota", "file", "sealed"])
def test_a_disk_that_cannot_be_written(house, monkeypatch, away_until, fault):
    if fault == "full":
        monkeypatch.setattr(spool, "open", full, raising=False)
    elif fault == "quota":
        monkeypatch.setattr(os, "replace", no_room)
    elif fault == "file":
        house.spool.mkdir()
        (house.spool / "run").write_text("somebody has put a file there")
    else:
        house.spool.mkdir(mode=0o500)
        if os.access(house.spool, os.W_OK):
            pytest.skip("root may write everywhere")
    _, sender = away_until()
    # Nothing is lost: it waits in memory.
    assert sender.counters.dropped == {}
    assert house.collector.points("seen") == {s: s for s in range(saboteur.STEPS)}
    faults = only_faults(house)
    assert faults.count("spool") == 1
    assert set(faults) <= {"spool", "server"}


def test_a_full_disk_and_no_server_at_the_end(house, monkeypatch, away_until, caplog):
    monkeypatch.setattr(spool, "open", full, raising=False)
    outcome, sender = away_until(back=False)
    assert outcome.close_seconds < 2
    assert sender.counters.dropped["spool_failed"] > 0
    reported = [r.getMessage() for r in caplog.records]
    assert sum("No space left" in text and "lost" in text for text in reported) == 1


def test_a_disk_that_has_room_again(house, monkeypatch, away_until):
    monkeypatch.setattr(spool, "open", full, raising=False)
    _, sender = away_until(lambda: monkeypatch.delattr(spool, "open"), back=False)
    assert sender.counters.dropped == {}
    assert sender.counters.spooled > 0


def test_a_folder_that_was_deleted(house, away_until):
    _, sender = away_until(lambda: shutil.rmtree(house.spool), back=False)
    # What was in it is gone; what came later is there.
    assert set(sender.counters.dropped) <= {"spool_removed"}
    assert list(house.spool.rglob("*.batch"))


def test_a_folder_that_was_deleted_while_the_server_comes_back(house, away_until):
    _, sender = away_until(lambda: shutil.rmtree(house.spool))
    seen = house.collector.points("seen")
    assert set(range(6, saboteur.STEPS)) <= set(seen)
    assert sender.counters.dropped.get("spool_removed", 0) > 0
    assert house.collector.batches[-1].dropped["spool_removed"] > 0


@pytest.mark.contained
@pytest.mark.parametrize(
    "name", ["write", "acquire", "read", "remove", "size", "sequence", "close"]
)
def test_the_spool_itself_fails(house, monkeypatch, away_until, name):
    once = saboteur.Once(getattr(SpoolFolder, name))
    monkeypatch.setattr(SpoolFolder, name, once)
    away_until()
    sabotaged = [e.text for e in house.faults if "Sabotage" in e.text]
    assert len(sabotaged) == (once.calls > 0 and name != "close")
    assert len(house.collector.points("seen")) >= saboteur.STEPS - 6


CHILD = """
import resource, signal, sys
sys.path.insert(0, sys.argv[1])
from tests.support import saboteur
from rankscope import agent

attach_it = agent.attach
alone = saboteur.train().digest
seen = []
def attach(model, optimizer):
    seen.append(attach_it(model, optimizer, server=sys.argv[2], run="run", spool=sys.argv[3]))
    return seen[0]
{limit}
watched = saboteur.train(attach, each=lambda step: {each})
assert watched.digest == alone
assert watched.close_seconds < 5.5, watched.close_seconds
print(seen[0]._connection.sender.counters.dropped)
"""


def child(house, limit, each="None"):
    script = CHILD.format(limit=limit, each=each)
    repository = str(saboteur.AGENT.parent)
    done = subprocess.run(
        [sys.executable, "-c", script, repository, house.collector.url, str(house.spool)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout, done.stderr)
    return done


def test_files_may_not_grow(house, collector):
    """A limit of the system on the size of files."""
    collector.stop()
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    done = child(house, limit)
    assert "spool_failed" in done.stdout
    assert "File too large" in done.stderr


def test_no_more_files_may_be_opened(house):
    """All descriptors are taken when the agent wants its first socket."""
    limit = (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "import os\n"
        "taken = []\n"
        "try:\n"
        "    while True: taken.append(os.dup(1))\n"
        "except OSError: pass\n"
        "free = lambda step: [os.close(taken.pop()) for _ in range(20)] if step == 8 else None\n"
    )
    done = child(house, limit, "free(step)")
    assert done.stdout.strip() == "{}"
    assert house.collector.points("seen") == {s: s for s in range(saboteur.STEPS)}


def test_no_memory_is_left(house):
    """Address space for the trainer, and none for what the agent wants to have."""
    limit = (
        "from rankscope.agent.probes.parameters.trained import Parameters\n"
        "from rankscope.agent import wire\n"
        "import numpy\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))\n"
        "Parameters._take = lambda *a, **k: numpy.ones(2**26)\n"
        "wire.encode = saboteur.Once(wire.encode, lambda batch: b' ' * 2**29)\n"
    )
    done = child(house, limit)
    faults = [event.text for event in house.faults]
    assert len(faults) == 2, (faults, done.stderr)
    assert all("emory" in text for text in faults)
    assert {text.split(":")[0] for text in faults} == {"parameters", "encoder"}
    assert house.collector.points("seen") == {s: s for s in range(saboteur.STEPS)}
