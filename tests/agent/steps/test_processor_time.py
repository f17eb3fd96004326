"""What samples cost is counted in processor time: a busy machine does not make them rarer."""

import threading
import time

import pytest
import torch
from torch import nn

from rankscope.agent.probes.base import StepFacts
from rankscope.agent.steps.own_time import Spent


def idle(seconds):
    """Has the thread off its processor for so long, as one that another process has taken."""
    threading.Event().wait(seconds)


def test_a_block_during_which_the_thread_did_not_run_costs_what_it_ran():
    facts = StepFacts(0)
    with facts.charged("full"):
        idle(0.2)
    assert facts.tiers["full"] < 0.05
    with facts.charged("word"):
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
    assert facts.tiers["word"] >= 0.02


def test_what_lasts_many_times_its_processor_time_costs_more():
    spent = Spent([torch.zeros(1)])
    tiers = {"word": 1e-3, "full": 3e-3}
    # Five hundredths off the processor, a quarter of which counts.
    spent.begin()
    idle(0.05)
    spent.end()
    cost = spent.total(tiers, 0.0)
    assert 0.05 / 4 <= cost
    assert tiers["full"] == pytest.approx(3 * tiers["word"])
    assert tiers["word"] > 1e-3
    # The next step begins with nothing, and what takes processor time costs it.
    spent.begin()
    began = time.thread_time()
    while time.thread_time() - began < 0.02:
        pass
    spent.end()
    assert spent.total({}, 0.01) >= 0.03
    assert spent.total({}, 0.0) == 0.0


def test_what_waits_for_a_device_costs_the_wait():
    class Elsewhere:
        device = torch.device("xla")

    spent = Spent([torch.zeros(1)])
    spent.of([torch.zeros(1), Elsewhere()])
    spent.begin()
    idle(0.05)
    spent.end()
    assert spent.total({}, 0.0) >= 0.05


def test_losses_and_rates_alone_are_measured_by_the_clock():
    spent = Spent([torch.zeros(1)])
    spent.begin(exact=False)
    idle(0.02)
    spent.end()
    assert spent.total({}, 0.0) >= 0.02


def test_what_a_step_is_noted_with_does_not_count_what_others_took(watching, monkeypatch):
    """A probe of the sample is interrupted for long at each step."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watching.attach(model, optimizer)
    noted = []
    note = monitor._schedule.note

    def heard(step, *, tiers, **more):
        noted.append(sum(tiers.values()))
        note(step, tiers=tiers, **more)

    monkeypatch.setattr(monitor._schedule, "note", heard)
    taken = monitor._parameters._take

    def interrupted(*given, **more):
        idle(0.05)
        taken(*given, **more)

    monkeypatch.setattr(monitor._parameters, "_take", interrupted)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    monitor.close()
    # By the clock each took 50 ms and more.
    assert min(noted) < 0.025
