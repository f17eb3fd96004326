"""Parameters that something else than the optimizer wrote."""

import pytest
import torch
from torch import nn

from rankscope.agent.probes.parameters.outside_writes import OutsideWrites
from rankscope.agent.wire import RANK_LOCAL
from tests.support.probe_harness import Harness


@pytest.fixture
def job():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    harness = Harness(model, optimizer, probes=[OutsideWrites])
    yield harness
    harness.close()


def train(harness, steps, outside_writes_before=()):
    model = harness.context.model
    for step in range(steps):
        if step in outside_writes_before:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.clone())
        harness.optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        harness.optimizer.step()
    return [facts.scalars.get("parameters_written") for facts in harness.steps]


def test_what_the_optimizer_does_is_not_reported(job):
    assert train(job, 4) == [None] * 4


def test_a_copy_between_two_steps_is_reported_even_if_it_changes_nothing(job):
    assert train(job, 6, outside_writes_before=(0, 2, 5)) == [None, None, 1.0, None, None, 1.0]


def test_of_rank_local_tensors_the_first_is_observed(job):
    job.tracked.declare(f"{RANK_LOCAL}0", "bias")
    job.context.parameters = job.tracked.group
    model = job.context.model
    assert train(job, 2) == [None] * 2
    with torch.no_grad():
        model.weight.copy_(model.weight.clone())
    assert train(job, 1)[2:] == [None]
    with torch.no_grad():
        model.bias.copy_(model.bias.clone())
    assert train(job, 2)[3:] == [1.0, None]


def test_steps_that_were_not_sampled_are_no_change(job):
    train(job, 2)
    # What a step without a sample has done counts as the optimizer's work.
    job.probes[0]._step -= 1
    assert train(job, 1) == [None, None, None]


@pytest.fixture
def asked(job):
    """Steps for which dense sampling is requested."""
    asked = []
    job.context.schedule.ask_dense = lambda until, since: asked.append((since, until))
    return asked


def test_the_steps_around_the_next_write_are_sampled_where_writes_come_at_one_interval(job, asked):
    train(job, 24, outside_writes_before=range(4, 24, 4))
    assert asked == [(15, 16), (19, 20), (23, 24)]


def test_writes_at_no_interval_ask_for_nothing(job, asked):
    train(job, 24, outside_writes_before=(2, 5, 9, 14, 16, 23))
    assert asked == []


def test_after_the_first_rounds_few_are_sampled(job, asked):
    train(job, 200, outside_writes_before=range(1, 200))
    # Without a plan every tier is due at every step: one in four of later rounds.
    assert asked[:8] == [(step, step + 1) for step in range(3, 11)]
    assert asked[8:] == [(step - 1, step) for step in range(12, 204, 4)]


def test_a_round_that_does_not_come_ends_it(job, asked):
    train(job, 24, outside_writes_before=(4, 8, 12))
    assert asked == [(15, 16)]
