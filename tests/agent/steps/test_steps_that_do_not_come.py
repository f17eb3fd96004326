"""A step that does not end: the rank stands somewhere, or computes on."""

import time

import pytest
import torch

from rankscope.agent import monitor as monitors
from tests.support.watching import FEATURES, Watching, fix_plan, net

SHORT = 0.2


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(monitors, "_STALLED_SECONDS", SHORT)


def trained(watching, *, sparse=False):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watching.attach(model, optimizer)
    if sparse:
        fix_plan(monitor, 1 << 20)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, FEATURES)).square().sum().backward()
        optimizer.step()
    assert monitor.phase
    return model, optimizer, monitor


def events(watching, kind):
    return [e for batch in watching.batches() for e in batch.events if e.kind == kind]


def goes_on(monitor, one, *, times=5):
    """Runs something again and again for some times as long as a step may take."""
    end = time.monotonic() + times * SHORT
    while time.monotonic() < end:
        one()
        time.sleep(SHORT / 20)
        assert monitor.phase


@pytest.mark.parametrize("sparse", [False, True])
def test_steps_that_are_skipped_are_no_standstill(tmp_path, sparse):
    with Watching(tmp_path) as watching:
        model, optimizer, monitor = trained(watching, sparse=sparse)

        def skipped():
            optimizer.zero_grad()
            (model(torch.randn(4, FEATURES)).sum() * float("nan")).backward()

        goes_on(monitor, skipped)
        told = events(watching, "stalled")
        assert [event.data["phase"] for event in told] == ["passes"]
        assert told[0].data["step"] == 3
        (unstepped, *_) = events(watching, "unstepped")
        assert unstepped.step == unstepped.data["steps"] == 3
        assert unstepped.data["forwards"] >= 32


def test_a_rank_that_stands_says_where(tmp_path):
    with Watching(tmp_path) as watching:
        model, _, monitor = trained(watching)
        model(torch.randn(4, FEATURES))
        goes_on(monitor, lambda: None, times=3)
        told = events(watching, "stalled")
        assert told
        assert not [event for event in told if event.data["phase"] == "passes"]
        assert not events(watching, "unstepped")


def test_an_evaluation_is_no_training_without_steps(tmp_path):
    with Watching(tmp_path) as watching:
        model, _, monitor = trained(watching)
        model.eval()
        goes_on(monitor, lambda: model(torch.randn(4, FEATURES)), times=3)
        assert not [e for e in events(watching, "stalled") if e.data["phase"] == "passes"]
        assert not events(watching, "unstepped")


def test_one_that_stands_after_passes_without_a_step_counts_from_the_last_one(tmp_path):
    with Watching(tmp_path) as watching:
        model, _, monitor = trained(watching)
        goes_on(monitor, lambda: model(torch.randn(4, FEATURES)))
        goes_on(monitor, lambda: None, times=3)
        passes, *standing = events(watching, "stalled")
        assert passes.data["phase"] == "passes"
        assert standing
        # To a tenth of a second.
        assert standing[0].data["seconds"] <= 2 * SHORT + 0.1


@pytest.mark.parametrize(("training", "told"), [(True, [10]), (False, [])])
def test_passes_after_the_last_step_are_told_at_the_end(tmp_path, training, told):
    with Watching(tmp_path) as watching:
        model, optimizer, monitor = trained(watching)
        # Scores of inputs, or of parameters, are computed in evaluation mode.
        model.train(training)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, FEATURES)).square().sum().backward()
        monitor.close()
        assert [event.data["passes"] for event in events(watching, "unstepped")] == told
