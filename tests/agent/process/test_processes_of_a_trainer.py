"""Processes that a trainer makes, and what is attached in them."""

import faulthandler
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope import agent
from rankscope.agent.delivery.sync import sync
from tests.support.servers.collector import HANG, Collector

PRELUDE = """
import os, sys
import torch
from torch import nn
from torch.nn import functional
from rankscope import agent

model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def attach(**more):
    return agent.attach(model, optimizer, server=sys.argv[1], spool=sys.argv[2], **more)

def train(batches):
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""

# Nothing but the loop is inside the guard: a worker that imports the script attaches, too.
SPAWNS = """
attach(run="run")
batches = torch.utils.data.TensorDataset(torch.randn(12, 6), torch.arange(12) % 3)
if __name__ == "__main__":
    train(
        torch.utils.data.DataLoader(
            batches, 4, num_workers=1, multiprocessing_context=sys.argv[3]
        )
    )
"""


@pytest.fixture
def collector():
    with Collector() as made:
        yield made


def run(folder, collector, body, *arguments):
    script = folder / "train.py"
    script.write_text(PRELUDE + body)
    done = subprocess.run(
        [sys.executable, script, collector.url, folder / "spool", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for batch in collector.batches:
        found[batch.session] = (batch.run, batch.state, batch.through_step)
    return sorted(found.values())


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_import_the_script_report_nothing(tmp_path, collector, method):
    assert run(tmp_path, collector, SPAWNS, method) == [("run", "finished", 2)]


@pytest.fixture
def _one_thread():
    # Threads of OpenMP do not survive a fork.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_a_forked_child_that_attaches_the_same_has_a_monitor_of_its_own(tmp_path, collector):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def attach(run):
        return agent.attach(model, optimizer, server=collector.url, spool=tmp_path, run=run)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            functional.cross_entropy(model(torch.randn(4, 6)), torch.arange(4) % 3).backward()
            optimizer.step()

    monitor = attach("parents")
    train(2)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            faulthandler.dump_traceback_later(60, exit=True)
            own = attach("childs")
            train(3)
            own.close()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0
    train(2)
    monitor.close()
    ends = {b.run: (b.state, b.through_step) for b in collector.batches}
    assert ends == {"parents": ("finished", 3), "childs": ("finished", 2)}


FAILS = """
import threading, time

with attach(run="run") as monitor:
    def tell():
        while not monitor.closed:
            time.sleep(0.001)
        os.write(1, b"fails\\n")

    threading.Thread(target=tell, daemon=True).start()
    train([(torch.randn(4, 6), torch.arange(4) % 3)] * 5)
    raise RuntimeError("Connection closed by peer")
"""


def test_a_rank_that_is_terminated_while_it_reports_its_failure_reports_it(tmp_path, collector):
    """As launchers do with the others as soon as one has failed: what is being said counts."""
    collector.always = HANG
    script, spool = tmp_path / "train.py", tmp_path / "spool"
    script.write_text(PRELUDE + FAILS)
    with subprocess.Popen(
        [sys.executable, script, collector.url, spool],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout.readline() == "fails\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
    collector.stop()
    collector.always = None
    collector.start()
    sync(spool, collector.url, None)
    last = collector.batches[-1]
    assert (last.state, last.through_step) == ("failed", 4)
    assert "Connection closed by peer" in last.error
