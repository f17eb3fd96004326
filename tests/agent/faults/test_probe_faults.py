"""Each probe fails at each of its moments: it is switched off, reported once, and nothing else."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope.agent import probes
from rankscope.agent.probes import PROBES, Probe
from rankscope.agent.probes.parameters.trained import Parameters
from tests.support import saboteur

pytestmark = pytest.mark.contained

# Whatever a probe may be asked at: a moment that is added is sabotaged from then on.
MOMENTS = tuple(n for n, f in vars(Probe).items() if inspect.isfunction(f) and n[0] != "_")
PLACES = [
    (probe, moment)
    for probe in PROBES
    for moment in MOMENTS
    if getattr(probe, moment) is not getattr(Probe, moment)
]
# The moment at which each is asked most.
MOST = {probe: max(m for p, m in PLACES if p is probe if m != "close") for probe in PROBES}
MOST |= {probe: "after_step" for probe, moment in PLACES if moment == "after_step"}


class Players(nn.Module):
    """Two players of a game, of which one learns from what the other makes."""

    def __init__(self):
        super().__init__()
        self.maker, self.critic = nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, noise, *, learns):
        made = self.maker(noise)
        return self.critic(made if learns else made.detach())


def play(house):
    """Some steps of both, each with an optimizer of its own."""
    model = Players()
    own, other = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model.maker, model.critic))
    monitor = house.attach(model, own)
    for step in range(saboteur.STEPS):
        for optimizer in (other, own):
            optimizer.zero_grad()
            scores = model(torch.randn(8, 3), learns=optimizer is own)
            functional.cross_entropy(scores, torch.randint(0, 3, (8,))).backward()
            optimizer.step()
        monitor.log(seen=step)
    monitor.close()


def test_every_probe_is_sabotaged_somewhere():
    assert {probe for probe, _ in PLACES} == set(PROBES)
    assert {moment for _, moment in PLACES} == set(MOMENTS)


def test_every_probe_there_is_is_asked():
    """A file with a probe that nobody asks would be sabotaged by nothing, either."""
    modules = pkgutil.walk_packages(probes.__path__, f"{probes.__name__}.")
    made = {
        value
        for module in modules
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, type) and issubclass(value, Probe) and value is not Probe
    }
    assert made == set(PROBES)


@pytest.mark.parametrize(
    ("probe", "moment"), PLACES, ids=[f"{p.name}-{moment}" for p, moment in PLACES]
)
def test_a_moment_that_fails(house, monkeypatch, probe, moment):
    monkeypatch.setattr(probe, moment, lambda self, *args: saboteur.raises())
    if moment == "other_step":
        play(house)
    else:
        house.train()
    house.reported_once(probe.name, "Sabotage")
    # The others go on.
    for metric, owner in {"loss": "loss", "lr": "optimizer", "grad_norm": "gradients"}.items():
        if owner != probe.name:
            assert house.collector.points(metric), metric
    assert house.collector.points("seen") == {step: step for step in range(saboteur.STEPS)}


@pytest.mark.parametrize("probe", PROBES, ids=[p.name for p in PROBES])
def test_a_probe_that_cannot_be_made_is_left_out(house, monkeypatch, probe):
    monkeypatch.setattr(probe, "__init__", saboteur.raises)
    house.train()
    house.reported_once(probe.name, "Sabotage")
    assert house.collector.points("seen") == {step: step for step in range(saboteur.STEPS)}


@pytest.mark.parametrize("fault", [saboteur.allocates, saboteur.allocates_tensor])
@pytest.mark.parametrize("probe", PROBES, ids=[p.name for p in PROBES])
def test_a_probe_without_memory(house, monkeypatch, probe, fault):
    monkeypatch.setattr(probe, MOST[probe], fault)
    house.train()
    house.reported_once(probe.name, "emory")
    assert house.collector.points("seen") == {step: step for step in range(saboteur.STEPS)}


def test_ctrl_c_is_the_trainers(house, monkeypatch):
    once = saboteur.Once(Parameters.after_step, saboteur.interrupts, first=4)
    monkeypatch.setattr(Parameters, "after_step", once)
    with pytest.raises(KeyboardInterrupt):
        saboteur.train(house.attach)
    assert house.faults == []
    # The same process trains again, as in a notebook.
    house.monitors[-1].close()
    house.train()
    assert house.collector.batches[-1].through_step == saboteur.STEPS - 1
