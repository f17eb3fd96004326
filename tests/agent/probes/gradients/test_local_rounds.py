"""Large gradients that are given to a device one by one: as those that are read where they are.

The device is simulated: torch's own operations stand for its kernels.
"""

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.agent.fingerprint import FingerprintPlan, OpenSketches
from rankscope.agent.fingerprint.device import DeviceTensors
from rankscope.agent.probes.gradients.sums import Rounds
from tests.support.watching import Watching

HOST = torch.device("cpu")


@pytest.fixture
def watching(tmp_path):
    with Watching(tmp_path) as made:
        yield made


@pytest.fixture
def device(monkeypatch):
    """From now on large gradients lie on a device of this kind; its runs."""
    runs = []
    made, plans = FingerprintPlan.__init__, {}

    def noted(plan, names, tensors):
        made(plan, names, tensors)
        plans[id(plan)] = (plan, list(tensors))

    def opened(plan):
        tensors = plans[id(plan)][1]
        rows = list(range(len(tensors)))
        runs.append(OpenSketches(DeviceTensors(rows, tensors, HOST).open(), rows, len(rows)))
        return runs[-1]

    def begin():
        monkeypatch.setattr(FingerprintPlan, "__init__", noted)
        monkeypatch.setattr(FingerprintPlan, "open", opened)
        real = Rounds.__init__

        def on_device(rounds, names=(), large=None):
            real(rounds, names, large)
            rounds._taken = bool(large)

        monkeypatch.setattr(Rounds, "__init__", on_device)
        return runs

    return begin


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 260), nn.Tanh(), nn.Linear(260, 300), nn.Linear(300, 3))


def train(watching, run, micro, skipped=-1):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching.attach(model, optimizer, run=run)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        optimizer.zero_grad()
        if step == skipped:
            model(torch.full((4, 300), torch.nan)).sum().backward()
            optimizer.zero_grad()
        for _ in range(micro):
            (model(torch.randn(4, 300, generator=generator)).square().mean() / micro).backward()
        optimizer.step()
    watching.close()
    sketches = {
        one.step: np.asarray(one.sketches)
        for batch in watching.batches(run)
        for one in batch.prints
        if one.stage == "local_gradient"
    }
    return (
        sketches,
        watching.points("grad_norm_local", run),
        watching.events("gradient.skipped", run),
    )


@pytest.mark.parametrize("micro", [1, 3])
def test_they_are_the_same(watching, device, micro):
    here = train(watching, "here", micro)
    runs = device()
    there = train(watching, "there", micro)
    assert len(runs) == 5 * micro
    assert set(here[0]) == set(there[0]) == set(range(5))
    for step in range(5):
        np.testing.assert_allclose(there[0][step], here[0][step], rtol=1e-6, atol=1e-8)
        assert there[1][step] == pytest.approx(here[1][step], rel=1e-5)


def test_a_pass_that_was_given_up_is_told_of(watching, device):
    here = train(watching, "here", 1, skipped=2)
    device()
    there = train(watching, "there", 1, skipped=2)
    assert there[2] == here[2] != []
    assert there[1] == pytest.approx(here[1], rel=1e-5)
