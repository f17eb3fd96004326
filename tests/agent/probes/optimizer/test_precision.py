"""Which precision autocast computes in, as far as it is on where the model is called."""

import pytest
import torch
from torch import nn

from rankscope.agent.probes.optimizer.precision import Precision
from tests.support.probe_harness import Harness


@pytest.mark.parametrize(
    ("dtype", "bits"), [(None, 0.0), (torch.bfloat16, 8.0), (torch.float16, 11.0)]
)
def test_bits_of_the_significand(dtype, bits):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness = Harness(model, optimizer, probes=(Precision,))
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(torch.ones(3, 4)).float().sum()
        with torch.no_grad():
            model(torch.ones(3, 4))  # an evaluation in full precision says nothing of training
        loss.backward()
        optimizer.step()
    assert [facts.scalars["autocast"] for facts in harness.steps] == [bits, bits]


def test_of_a_device_that_autocast_does_not_know_nothing_is_said():
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=(Precision,))
    model(torch.ones(3, 4, device="meta")).sum().backward()
    harness.optimizer.step()
    assert not harness.steps[0].scalars
