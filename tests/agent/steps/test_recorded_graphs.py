"""While a CUDA graph is recorded nothing of the agent runs; the recording itself is simulated.

What a real device says is asked in `tests/gpu`.
"""

import contextlib

import pytest
import torch
from torch.nn import functional

from tests.support.watching import CLASSES, FEATURES, Watching, net


@pytest.fixture
def watching(tmp_path):
    with Watching(tmp_path) as made:
        yield made


@pytest.fixture
def recording(monkeypatch):
    """A block in which the device records."""

    @contextlib.contextmanager
    def block():
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            yield

    return block


def step(model, optimizer, monitor, value):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, FEATURES, generator=generator)
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), torch.arange(4) % CLASSES)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    monitor.log(value=torch.tensor(value))


def test_a_recorded_step_is_no_step_and_said_to_be_unseen(watching, recording):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watching.attach(model, optimizer)
    for value in (0.0, 1.0):
        step(model, optimizer, monitor, value)
    with recording():
        step(model, optimizer, monitor, 2.0)
        step(model, optimizer, monitor, 3.0)
    step(model, optimizer, monitor, 4.0)
    assert watching.points("value") == {0: 0.0, 1: 1.0, 2: 4.0}
    assert set(watching.points("loss")) == {0, 1, 2}
    [(at, text)] = watching.events("agent.note")
    assert at == 2
    assert "CUDA graph" in text
    assert "not counted" in text


def test_the_first_pass_after_a_recording_is_followed_as_any_other(watching, recording):
    model, twin = net(), net()
    found = []
    for each, recorded in ((model, True), (twin, False)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        run = f"run-{len(found)}"
        monitor = watching.attach(each, optimizer, run=run)
        for value in range(6):
            if recorded and value == 3:
                with recording():
                    each(torch.zeros(1, FEATURES)).sum().backward()
            step(each, optimizer, monitor, float(value))
        found.append({m: watching.points(m, run) for m in ("loss", "grad_norm", "accuracy")})
    assert found[0] == found[1]


def test_a_replayed_training_is_not_taken_for_a_stalled_one(watching, recording):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watching.attach(model, optimizer)
    step(model, optimizer, monitor, 0.0)
    with recording():
        step(model, optimizer, monitor, 1.0)
    monitor._stood = (monitor._count.step, -1e9)
    monitor._report_stalled("device")
    assert not watching.events("stalled")


def test_one_that_stands_before_any_recording_is(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watching.attach(model, optimizer)
    step(model, optimizer, monitor, 0.0)
    monitor._stood = (monitor._count.step, -1e9)
    monitor._report_stalled("device")
    assert watching.events("stalled")
