"""Time for which the training thread had no processor."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from rankscope.agent.probes.machine.run_queue_delay import RunQueueDelay
from tests.support.probe_harness import Harness

COUNTER = Path("/proc/thread-self/schedstat")

pytestmark = pytest.mark.skipif(not COUNTER.exists(), reason="the kernel does not count it")


def counted():
    return int(COUNTER.read_text(encoding="ascii").split()[1]) * 1e-9


@pytest.fixture
def job():
    model = nn.Linear(3, 2)
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[RunQueueDelay])
    yield harness
    harness.close()


@pytest.fixture
def crowded():
    """This process on one core together with one that never rests."""
    allowed = os.sched_getaffinity(0)
    core = {min(allowed)}
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(busy.pid, core)
    os.sched_setaffinity(0, core)
    yield
    os.sched_setaffinity(0, allowed)
    busy.kill()
    busy.wait()


def step(harness, seconds=0.0):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    harness.optimizer.zero_grad()
    harness.context.model(torch.ones(4, 3)).sum().backward()
    harness.optimizer.step()


@pytest.mark.alone
def test_run_queue_delay_is_reported_as_the_kernel_counts_it(job, crowded):
    step(job)
    before = counted()
    for _ in range(10):
        step(job, 0.03)
    whole = counted() - before
    reported = [facts.scalars.get("queued_seconds", 0.0) for facts in job.steps[1:]]
    # What is below half a millisecond is not reported.
    assert sum(reported) == pytest.approx(whole, abs=10 * 5e-4 + 0.01 * whole)
    assert sum(reported) > 0.02
    ran = [facts.scalars.get("processor_seconds", 0.0) for facts in job.steps[1:]]
    assert [t > 0 for t in reported] == [r > 0 for r in ran]
    assert 0.03 <= max(ran) < 0.06


def test_the_first_step_and_one_after_a_step_without_a_sample_have_no_beginning(job, crowded):
    step(job, 0.03)
    job.probes[0]._step -= 1
    step(job, 0.03)
    assert [facts.scalars.get("queued_seconds") for facts in job.steps] == [None, None]


def test_its_file_is_closed(job):
    step(job)
    held = job.probes[0]._time._file
    os.fstat(held)
    job.probes[0].close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)
