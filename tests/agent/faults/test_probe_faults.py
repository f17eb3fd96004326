"""Each probe fails at each of its moments: it is switched off, told of once, and nothing else."""

from __future__ import annotations

import pytest
from support import saboteur

from rankscope.agent.probes import PROBES, Probe
from rankscope.agent.probes.parameters import Parameters

pytestmark = pytest.mark.contained

MOMENTS = ("start", "prepare", "forward", "before_step", "after_step", "close")
PLACES = [
    (probe, moment)
    for probe in PROBES
    for moment in MOMENTS
    if getattr(probe, moment) is not getattr(Probe, moment)
]


def test_every_probe_is_sabotaged_somewhere():
    assert {probe for probe, _ in PLACES} == set(PROBES)


@pytest.mark.parametrize(
    ("probe", "moment"), PLACES, ids=[f"{p.name}-{moment}" for p, moment in PLACES]
)
def test_a_moment_that_fails(house, monkeypatch, probe, moment):
    monkeypatch.setattr(probe, moment, lambda self, *args: saboteur.raises())
    house.train()
    house.told_once(probe.name, "Sabotage")
    # The others go on.
    for metric, owner in {"loss": "loss", "lr": "optimizer", "grad_norm": "gradients"}.items():
        if owner != probe.name:
            assert house.collector.points(metric), metric
    assert house.collector.points("seen") == {step: step for step in range(saboteur.STEPS)}


@pytest.mark.parametrize("probe", PROBES, ids=[p.name for p in PROBES])
def test_a_probe_that_cannot_be_made_is_left_out(house, monkeypatch, probe):
    monkeypatch.setattr(probe, "__init__", saboteur.raises)
    house.train()
    house.told_once(probe.name, "Sabotage")
    assert house.collector.points("seen") == {step: step for step in range(saboteur.STEPS)}


@pytest.mark.parametrize("fault", [saboteur.allocates, saboteur.allocates_tensor])
def test_a_probe_without_memory(house, monkeypatch, fault):
    monkeypatch.setattr(Parameters, "_take", fault)
    house.train()
    house.told_once("parameters", "emory")


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
