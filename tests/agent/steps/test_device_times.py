"""Times that come from a device after their step has ended."""

import pytest
import torch

from rankscope.agent.process import device_events
from tests.support.device_events import FakeEvents

STEPS = 12


@pytest.fixture
def device(monkeypatch):
    """Its clock goes on by a second at each mark; it is three marks behind."""
    made = FakeEvents(behind=3)
    made.now = lambda: float(made.recorded)
    monkeypatch.setattr(device_events, "events", lambda: made)
    return made


def train(watching, log=None):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watching.attach(model, optimizer)
    for _ in range(STEPS):
        model(torch.ones(4, 3)).sum().backward()
        if log:
            monitor.log(**log)
        optimizer.step()


def test_they_arrive_with_their_step_and_all_others_do(device, watching):
    train(watching)
    # A step has two marks, at its first pass and at its end. The last three of all never pass: the
    # end of the last step but one is the third.
    assert watching.points("data_seconds") == dict.fromkeys(range(1, STEPS - 2), 1.0)
    assert watching.points("compute_seconds") == dict.fromkeys(range(1, STEPS - 2), 1.0)
    assert watching.points("step_seconds").keys() == set(range(1, STEPS))
    assert not watching.events("agent.fault")


def test_what_the_user_logs_under_their_names_wins(device, watching):
    train(watching, log={"data_seconds": 7.0})
    assert watching.points("data_seconds") == dict.fromkeys(range(STEPS), 7.0)
    assert watching.points("compute_seconds").keys() == set(range(1, STEPS - 2))
