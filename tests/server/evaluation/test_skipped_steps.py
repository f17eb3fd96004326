"""Real trainings under a GradScaler that skips every step from some point on: the run just ends."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.judged import judged
from tests.support.watching import Watching


def infinite_inputs(model, x):
    x[:] = math.inf


def broken_parameters(model, x):
    with torch.no_grad():
        model[0].weight.fill_(math.nan)


@pytest.mark.parametrize(
    ("fault", "at"), [(infinite_inputs, 0), (infinite_inputs, 30), (broken_parameters, 30)]
)
def test_a_run_that_ends_in_skipped_steps(tmp_path, fault, at):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    with Watching(tmp_path / "spool") as watching:
        watching.attach(model, optimizer)
        for step in range(at + 40):
            x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
            if step >= at:
                fault(model, x)
            optimizer.zero_grad()
            scaler.scale(functional.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        found = judged(watching.batches(), tmp_path)
    alert = found.one("amp.scale_collapse")
    assert alert.severity == "critical"
    assert alert.state == "open"
    assert alert.first_step == at
    assert alert.evidence["in_a_row"] == 32
