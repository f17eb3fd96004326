"""Real trainings in which something becomes NaN: where it came from, and one alert for it."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.judged import judged
from tests.support.watching import Watching

FEATURES, CLASSES = 6, 3


class Logarithm(nn.Module):
    broken = False

    def forward(self, x):
        return torch.log(x) if self.broken else torch.tanh(x)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), Logarithm(), nn.Linear(16, CLASSES))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (8,), generator=generator)


def nan_input(model, step, x, y):
    x[3, 2] = math.nan
    return functional.cross_entropy(model(x), y)


def bad_module(model, step, x, y):
    model[1].broken = True
    return functional.cross_entropy(model(x), y)


def bad_loss(model, step, x, y):
    return model(x).square().sum() * 0 / torch.zeros(())


def bad_target(model, step, x, y):
    target = torch.full((8, CLASSES), math.nan)
    return functional.mse_loss(model(x), target)


def bad_gradient(model, step, x, y):
    out = model(x)
    return functional.cross_entropy(out, y) + (out - out.detach()).abs().sum().sqrt()


def trained(tmp_path, fault, at, *, steps=24, before=lambda model: None):
    model = net()
    before(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watching(tmp_path / "spool") as watching:
        watching.attach(model, optimizer)
        for step in range(steps):
            x, y = batch(step)
            optimizer.zero_grad()
            if step == at:
                loss = fault(model, step, x, y)
            else:
                loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return judged(watching.batches(), tmp_path)


# fault -> what the cause says, and what nothing speaks for
SAYS = {
    nan_input: "The inputs of the model held values that are not finite on rank 0",
    bad_module: "the output of 1",
    bad_loss: "The model's output at step {step} was finite, and the loss is not",
    bad_target: "The target that `mse_loss` was given at step {step} is not finite",
}


@pytest.mark.parametrize("at", [0, 10])
@pytest.mark.parametrize("fault", SAYS, ids=lambda f: f.__name__)
def test_the_cause_is_what_was_seen_before_the_update(tmp_path, fault, at):
    found = trained(tmp_path, fault, at)
    assert found.kinds() == ["loss.nonfinite"]
    alert = found.one("loss.nonfinite")
    assert alert.first_step == at
    assert SAYS[fault].format(step=at) in alert.cause
    assert "step before it was too large" not in alert.cause
    assert "Only rank" not in alert.cause
    assert "every rank" not in alert.title
    if at == 0:
        assert "checkpoint from before step 0" not in alert.remedy
        assert "there is none before it" in alert.remedy
    assert found.below(alert) == ["gradient.nonfinite"]
    below = found.one("gradient.nonfinite")
    # The update has spread it to all parameters: the first module is nobody's fault.
    assert "first in 0" not in below.title
    assert below.evidence["module"] == ("1" if fault is bad_module else "")


@pytest.mark.parametrize("at", [0, 10])
def test_a_gradient_that_breaks_while_the_loss_is_finite(tmp_path, at):
    found = trained(tmp_path, bad_gradient, at)
    assert found.kinds() == ["gradient.nonfinite"]
    alert = found.one("gradient.nonfinite")
    assert alert.first_step == at
    assert "they arose where the backward pass begins" in alert.cause
    assert "first in" not in alert.title
    assert found.below(alert) == ["loss.nonfinite"]


def test_parameters_that_are_not_finite_at_attach(tmp_path):
    def spoil(model):
        with torch.no_grad():
            model[2].weight[1, 1] = math.nan

    found = trained(tmp_path, None, -1, before=spoil)
    assert found.kinds() == ["loss.nonfinite"]
    cause = found.one("loss.nonfinite").cause
    assert "before the first step, on rank 0: 2.weight" in cause
    assert "checkpoint that was loaded" in cause


def test_parameters_that_are_written_over_between_two_steps(tmp_path):
    def spoil(model, step, x, y):
        with torch.no_grad():
            model[2].weight[1, 1] = math.nan
        return functional.cross_entropy(model(x), y)

    found = trained(tmp_path, spoil, 10)
    (root,) = (a for a in found.roots if a.severity == "critical")
    reported = found.one("loss.nonfinite")
    assert "when the loss of step 10 was computed, before its update, on rank 0: 2.weight" in (
        reported.cause
    )
    assert root.kind in ("loss.nonfinite", "desync.parameters")


def test_where_the_step_was_not_sampled_in_full_inputs_and_parameters_are_known(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watching(tmp_path / "spool") as watching:
        monitor = watching.attach(model, optimizer)
        monitor._schedule.plan = lambda step: (True, False, False, False, False)
        monitor._schedule.next_due = lambda step: step + 1
        for step in range(12):
            x, y = batch(step)
            optimizer.zero_grad()
            make = nan_input if step == 9 else lambda m, s, x, y: functional.cross_entropy(m(x), y)
            make(model, step, x, y).backward()
            optimizer.step()
        events = [e.data for b in watching.batches() for e in b.events if e.kind == "nonfinite"]
    assert events[0]["batch_finite"] is False
    assert (events[0]["batch_values"], events[0]["batch_rows"]) == (1, [3])
    assert events[0]["model_finite"] is True


# ------------------------------------------------------------------ replicas that post arrays


def parameters():
    random = np.random.default_rng(0)
    return {
        "dense.kernel": random.normal(0, 0.4, (FEATURES, CLASSES)).astype("f4"),
        "dense.bias": np.zeros(CLASSES, "f4"),
    }


def gradients(held, x, y):
    """Loss and gradients of a softmax regression."""
    z = x @ held["dense.kernel"] + held["dense.bias"]
    e = np.exp(z - z.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    loss = float(-np.log(p[np.arange(len(y)), y]).mean())
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    return loss, {"dense.kernel": (x.T @ p).astype("f4"), "dense.bias": p.sum(0).astype("f4")}


def length(arrays):
    return float(np.sqrt(sum((v.astype("f8") ** 2).sum() for v in arrays.values())))


def other_nans(arrays):
    """The same, with the sign of each NaN turned: as another order of summing leaves it."""
    made = {name: value.copy() for name, value in arrays.items()}
    for value in made.values():
        value.view(np.uint32)[np.isnan(value)] ^= np.uint32(0x80000000)
    return made


@pytest.mark.parametrize("at", [0, 20])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sparse", [True, False], ids=["norms", "arrays"])
def test_one_bad_pixel_is_one_alert(tmp_path, world, sparse, at):
    """Of ranks that post losses, norms and parameters, as the callback of Keras does."""
    with Watching(tmp_path / "spool") as watching, np.errstate(all="ignore"):
        monitors = [
            watching.start(rank=rank, world_size=world, parameters=parameters())
            for rank in range(world)
        ]
        held = [parameters() for _ in range(world)]
        for step in range(40):
            made = []
            for rank in range(world):
                random = np.random.default_rng(1000 + step * world + rank)
                x = random.normal(size=(8, FEATURES)).astype("f4")
                y = (x.sum(1) > 0).astype(int)
                if step == at and rank == 1:
                    x[2, 3] = np.nan
                made.append(gradients(held[rank], x, y))
            mean = {name: sum(g[name] for _, g in made) / world for name in held[0]}
            for rank, monitor in enumerate(monitors):
                loss, own = made[rank]
                applied = other_nans(mean) if rank == 0 else mean
                moved = {n: held[rank][n] - np.float32(0.1) * applied[n] for n in applied}
                held[rank] = other_nans(moved) if rank == 0 and step % 2 else moved
                if sparse:
                    norms = {"grad_norm": length(mean), "grad_norm_local": length(own)}
                    monitor.step(loss=loss, parameters=held[rank], lr=0.1, **norms)
                else:
                    monitor.step(
                        loss=loss,
                        parameters=held[rank],
                        gradients=applied,
                        local_gradients=own,
                        lr=0.1,
                    )
        found = judged(watching.batches(), tmp_path)
    assert found.kinds("info") == ["loss.nonfinite"]
    alert = found.one("loss.nonfinite")
    assert (alert.first_step, alert.ranks) == (at, (1,))
    assert found.below(alert) == ["gradient.nonfinite"]


def test_arrays_that_are_not_finite_at_the_start(tmp_path):
    spoilt = parameters()
    spoilt["dense.bias"][1] = np.inf
    with Watching(tmp_path / "spool") as watching, np.errstate(all="ignore"):
        monitor = watching.start(rank=0, world_size=1, parameters=spoilt)
        for _ in range(4):
            monitor.step(loss=math.nan, parameters=spoilt)
        found = judged(watching.batches(), tmp_path)
    assert "on rank 0: dense.bias" in found.one("loss.nonfinite").cause
