"""Parameters that no optimizer is to move: what is read, when, and what is reported."""

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.agent.probes.parameters import frozen
from rankscope.agent.probes.parameters.frozen import EVENT, PARTS, FrozenParameters, turn
from rankscope.agent.probes.parameters.trained import Parameters
from rankscope.agent.tripwires import SAMPLES
from rankscope.agent.wire import RANK_LOCAL
from tests.support.probe_harness import Harness


class Model(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.base = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        self.base.requires_grad_(False)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.base(x))


@pytest.fixture
def job():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    harness = Harness(model, optimizer, probes=[Parameters, FrozenParameters], dense_steps=10_000)
    yield harness
    harness.close()


def train(job, steps, before=lambda step: None):
    for _ in range(steps):
        before(job.facts.step)
        job.optimizer.zero_grad()
        job.context.model(torch.ones(2, 4)).sum().backward()
        job.optimizer.step()


def prints(facts):
    return [made for made in facts.fingerprints if made.stage == "frozen"]


def events(job):
    return [(step, data["tensors"]) for step, kind, _, data in job.events if kind == EVENT]


def write(job, value=2.0):
    with torch.no_grad():
        job.context.model.base[1].weight.fill_(value)


@pytest.mark.parametrize("parts", range(1, PARTS + 1))
@pytest.mark.parametrize("interval", [1, 2, 8, 64])
def test_any_16_samples_in_a_row_read_all_parts(parts, interval):
    for first in range(1, 200, 7):
        steps = range(first * interval, (first + SAMPLES) * interval, interval)
        assert {turn(step, parts) for step in steps} == set(range(parts))


def test_all_are_read_at_attach_with_sketches_and_later_digests_alone(job):
    [begun] = prints(job.start)
    assert begun.sketches is not None
    train(job, 3)
    for facts in job.steps:
        [made] = prints(facts)
        assert made.sketches is None
        assert np.array_equal(made.digests, begun.digests)
    assert job.announced[begun.table].names == (
        *("base.0.weight", "base.0.bias", "base.1.weight"),
        *("base.1.bias", "base.2.weight", "base.2.bias"),
    )


def test_nothing_is_read_where_nothing_is_frozen():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Harness(model, optimizer, probes=[Parameters, FrozenParameters])
    train(job, 2)
    job.close()
    assert not any(prints(facts) for facts in (job.start, *job.steps))


def test_one_that_was_still_is_reported_with_its_sketch(job):
    train(job, 20, lambda step: write(job) if step == 12 else None)
    assert events(job) == [(12, ["base.1.weight"])]
    [made] = prints(job.steps[12])
    assert made.sketches is not None
    assert job.context.schedule.plan(12 + SAMPLES)[3]


def test_what_torch_does_not_count_is_seen_as_well(job):
    def flip(step):
        if step == 12:
            job.context.model.base[1].weight.data.numpy().reshape(-1).view("int32")[3] ^= 1

    train(job, 14, flip)
    assert events(job) == [(12, ["base.1.weight"])]


def test_what_moves_all_the_time_is_not_reported_and_is_sketched(job):
    train(job, 24, lambda step: write(job, float(step)))
    assert events(job) == []
    assert all(prints(facts)[0].sketches is not None for facts in job.steps)


def test_a_second_time_is_reported_and_no_third(job):
    train(job, 60, lambda step: write(job, float(step)) if step % 15 == 0 and step else None)
    assert [step for step, _ in events(job)] == [15, 30]


def test_a_copy_of_what_is_trained_is_no_event(job):
    model = job.context.model

    def copy(step):
        if step == 12:
            model.base[1].load_state_dict(model.head.state_dict())

    train(job, 14, copy)
    assert events(job) == []


def test_what_is_unfrozen_belongs_to_the_trained_ones(job):
    train(job, 3)
    job.context.model.base[0].requires_grad_(True)
    assert job.tracked.changed()
    job.tracked.renew()
    job.context.parameters = job.tracked.group
    train(job, 2)
    [made] = prints(job.steps[-1])
    assert made.table == "frozen/0@1"
    assert "base.0.weight" not in job.announced[made.table].names


def test_large_ones_are_read_in_parts_of_like_size(monkeypatch):
    monkeypatch.setattr(frozen, "_AT_ONCE", 1)
    model = Model(layers=40)
    job = Harness(
        model,
        torch.optim.SGD(model.head.parameters(), lr=0.1),
        probes=[Parameters, FrozenParameters],
        dense_steps=10_000,
    )
    tables = {made.table for made in prints(job.start)}
    assert len(tables) == PARTS
    sizes = [sum(np.prod(s) for s in job.announced[name].shapes) for name in tables]
    assert max(sizes) < 1.5 * min(sizes)
    train(job, SAMPLES + 1)
    assert {prints(facts)[0].table for facts in job.steps[1:]} == tables
    job.close()


def test_what_was_declared_is_said_of_frozen_ones_too(job):
    job.tracked.declare(f"{RANK_LOCAL}1", "base.1.*")
    job.probes[1].declare(job.tracked.parts_of)
    assert job.announced["frozen/0"].shards == ("", "", f"{RANK_LOCAL}1", f"{RANK_LOCAL}1", "", "")
