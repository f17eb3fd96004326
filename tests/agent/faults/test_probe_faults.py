"""Each probe fails at each of its moments: it is switched off, told of once, and nothing else."""

from __future__ import annotations

import pytest
from support import saboteur

from rankscope.agent.probes import PROBES, Probe

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
@pytest.mark.parametrize("fault", [saboteur.raises, saboteur.allocates], ids=["raises", "memory"])
def test_a_moment_that_fails(house, monkeypatch, probe, moment, fault):
    monkeypatch.setattr(probe, moment, lambda self, *args: fault())
    house.train()
    house.told_once(probe.name, "Sabotage" if fault is saboteur.raises else "MemoryError")
    # The others go on.
    for metric, owner in {"loss": "loss", "lr": "optimizer", "grad_norm": "gradients"}.items():
        if owner != probe.name:
            assert house.collector.points(metric), metric
    assert house.collector.points("seen") == {step: step for step in range(saboteur.STEPS)}
