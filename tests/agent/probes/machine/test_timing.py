"""Where the time of a step goes, with real delays."""

import time

import pytest
import torch
from torch import nn

from rankscope.agent.probes.machine.timing import CollectiveWait, Timing
from tests.support.device_events import FakeEvents
from tests.support.jobs.ddp_timing import DELAY, worker
from tests.support.jobs.ranks import forked_ranks, forking
from tests.support.probe_harness import Harness


@pytest.fixture
def job():
    model = nn.Linear(3, 2)
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[Timing])
    yield harness
    harness.close()


def train_step(harness, *, data=0.0, compute=0.0, micro_batches=1):
    model = harness.context.model
    time.sleep(data)
    for _ in range(micro_batches):
        model(torch.ones(4, 3)).sum().backward()
    time.sleep(compute)
    harness.optimizer.step()
    return harness.steps[-1].scalars


def test_a_step_is_split_at_its_first_forward(job):
    assert train_step(job, data=DELAY) == {}
    slow = train_step(job, data=DELAY)
    busy = train_step(job, compute=DELAY, micro_batches=3)
    for reported in (slow, busy):
        total = reported["data_seconds"] + reported["compute_seconds"]
        assert total == pytest.approx(reported["step_seconds"])
    assert slow["data_seconds"] >= DELAY
    assert busy["compute_seconds"] >= DELAY
    assert busy["data_seconds"] < DELAY
    assert busy["samples_per_second"] == pytest.approx(12 / busy["step_seconds"])


def test_what_another_rank_has_computed_is_no_data(job):
    """A stage of a pipeline sends the gradient of its input back."""
    model, encoder = job.context.model, nn.Linear(3, 3)
    inputs = {
        "read": torch.ones(4, 3),
        "received": torch.ones(4, 3, requires_grad=True),
        "computed here": encoder(torch.ones(4, 3)),
    }
    train_step(job)
    flagged = {}
    for name, given in inputs.items():
        model(given).sum().backward()
        job.optimizer.step()
        scalars = job.steps[-1].scalars
        assert "data_seconds" in scalars
        flagged[name] = scalars.get("input_received")
    assert flagged == {"read": None, "received": 1.0, "computed here": None}


def test_an_evaluation_is_no_waiting_for_data(job):
    train_step(job)
    job.context.model.eval()
    with torch.no_grad():
        job.context.model(torch.ones(4, 3))
    job.context.model.train()
    assert train_step(job) == {}
    assert "data_seconds" in train_step(job)


def test_a_forward_that_was_not_seen_leaves_the_step_whole(job):
    train_step(job)
    model = job.context.model
    functional = nn.functional.linear(torch.ones(4, 3), model.weight, model.bias)
    functional.sum().backward()
    job.optimizer.step()
    assert set(job.steps[-1].scalars) == {"step_seconds"}


def two_ranks(folder, where, *, on_device=False):
    results = forking.Queue()
    forked_ranks(worker, str(folder), results, where, on_device, ranks=2)
    (_, first, hooks), (_, second, _) = sorted(results.get() for _ in range(2))
    return first, second, hooks


@pytest.mark.parametrize("where", ["wrapper", "trainer", "shards"])
def test_the_rank_that_is_kept_waiting_says_so(tmp_path, where):
    first, second, hooks = two_ranks(tmp_path, where)
    assert None not in first + second
    assert first[2] >= 5 * DELAY
    assert second[2] < first[2] - 3 * DELAY
    assert not any(hooks)


def test_where_ranks_average_after_the_step_nothing_is_reported(tmp_path):
    first, second, _ = two_ranks(tmp_path, "afterwards")
    assert first == second == [None] * 3


def test_without_other_ranks_nothing_is_waited_for():
    model = nn.Linear(3, 2)
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[CollectiveWait])
    assert not model.weight._backward_hooks
    assert train_step(harness) == {}
    harness.close()


class Device:
    """A device's clock, and what is under way on it."""

    def __init__(self):
        self.time = 0.0
        self.events = FakeEvents(lambda: self.time, behind=10**9)

    def catch_up(self, facts):
        """All that was given to it is done: what waited for that is delivered."""
        self.events.behind = 0
        for pending, deliver in facts.later:
            assert pending.ready()
            deliver()
        self.events.behind = 10**9


@pytest.fixture
def device(job):
    device = Device()
    job.context.events = device.events
    return device


def device_step(harness, device, *, data, compute):
    device.time += data
    output = harness.context.model(torch.ones(4, 3))
    device.time += compute
    output.sum().backward()
    harness.optimizer.step()
    return harness.steps[-1]


def test_on_a_device_its_own_time_is_split_once_it_has_passed(job, device):
    device_step(job, device, data=1.0, compute=1.0)
    facts = device_step(job, device, data=3.0, compute=5.0)
    # Nothing was waited for.
    assert not {"data_seconds", "compute_seconds"} & facts.scalars.keys()
    assert not any(pending.ready() for pending, _ in facts.later)
    device.catch_up(facts)
    assert facts.scalars["data_seconds"] == 3.0
    assert facts.scalars["compute_seconds"] == 5.0
    assert 0 < facts.scalars["step_seconds"] < 3.0  # the host's, which ran ahead


def test_what_cannot_be_marked_is_not_timed(job, device):
    device_step(job, device, data=1.0, compute=1.0)
    device.events.mark = lambda tensor: None
    facts = device_step(job, device, data=1.0, compute=1.0)
    assert facts.later == []
    assert "step_seconds" in facts.scalars


@pytest.mark.parametrize("where", ["wrapper", "trainer", "shards"])
def test_on_devices_the_rank_that_is_kept_waiting_says_so(tmp_path, where):
    first, second, hooks = two_ranks(tmp_path, where, on_device=True)
    assert None not in first + second
    assert first[2] >= 5 * DELAY
    assert second[2] < first[2] - 3 * DELAY
    assert not any(hooks)
