"""The gradient's signals through the whole agent: attach, train, and what a server is sent."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rankscope import agent
from rankscope.agent.fingerprint import Pending
from rankscope.agent.probes.numbers_in_transit import Arrival
from tests.support.servers.collector import Collector


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def train(model, steps, broken_at=-1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=generator)
        y = torch.randint(0, 3, (8,), generator=generator)
        if step == broken_at:
            x[0, 0] = math.inf
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield optimizer


def attached(model, steps, folder, **options):
    with Collector() as collector:
        training = train(model, steps, **options)
        state = torch.get_rng_state()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = next(training)
        with agent.attach(
            model, optimizer, step=1, server=collector.url, run="run", spool=folder
        ) as monitor:
            for _ in training:
                pass
        assert monitor.closed
        assert torch.equal(torch.get_rng_state(), state)
        return collector.batches


def test_everything_arrives_and_nothing_is_left_behind(tmp_path):
    model = net()
    batches = attached(model, 6, tmp_path)
    events = [e for b in batches for e in b.events]
    assert [e.text for e in events if e.kind.startswith("agent.")] == []
    layers = [made for b in batches for made in b.layers]
    assert {(m.table, m.metric) for m in layers} >= {
        ("parameters", "grad_norm"),
        ("parameters", "weight_norm"),
        ("parameters", "update_ratio"),
        ("activations", "dead_units"),
    }
    columns = {name for b in batches for name in b.columns}
    assert columns >= {
        "grad_norm",
        "grad_norm_local",
        "weight_norm",
        "update_norm",
        "update_ratio",
        "tensors_unchanged",
        "grad_cosine",
        "grad_cosine_local",
    }
    fingerprints = {(p.step, p.stage): p for b in batches for p in b.prints}
    for step in range(1, 6):
        local, reduced = (
            fingerprints[step, f"{s}_gradient"].sketches for s in ("local", "reduced")
        )
        assert np.allclose(local, reduced, rtol=1e-9)
    assert {"parameters", "activations"} <= {t for b in batches if b.hello for t in b.hello.tables}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


def test_training_is_the_same_bits_with_and_without(tmp_path):
    watched, alone = net(), net()
    attached(watched, 12, tmp_path, broken_at=6)
    for _ in train(alone, 12, broken_at=6):
        pass
    for one, other in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_a_value_that_is_not_finite_is_followed_to_where_it_was_made(tmp_path):
    batches = attached(net(), 14, tmp_path, broken_at=10)
    events = [e for b in batches for e in b.events if e.kind == "nonfinite"]
    assert [e.step for e in events] == [10, 11]
    assert "0.weight" in events[0].data["gradients"]
    # By then the parameters have it.
    assert events[1].data["module"] == "0"
    assert events[1].data["parameters_finite"] is False
    counts = [m for b in batches for m in b.layers if m.metric == "grad_nonfinite"]
    assert counts
    assert all(m.values.sum() > 0 for m in counts)


def test_what_a_device_computes_late_arrives_as_well(tmp_path, monkeypatch):
    at_once = attached(net(), 12, tmp_path / "at once", broken_at=10)

    def later(self):
        self.asked = getattr(self, "asked", 0) + 1
        return self.asked > 3

    for kind in (Arrival, Pending):
        monkeypatch.setattr(kind, "ready", later)
    late = attached(net(), 12, tmp_path / "late", broken_at=10)

    def numbers(batches, names):
        return {
            (name, int(step)): float(value)
            for b in batches
            for name, column in b.columns.items()
            for step, value in zip(column.steps, column.values, strict=True)
            if name in names
        }

    names = {"weight_norm", "update_ratio", "tensors_unchanged", "grad_cosine"}
    first = numbers(at_once, names)
    assert {name for name, _ in first} == names
    # Which steps are sampled depends on the clock; the first eight always are.
    dense = {key: value for key, value in first.items() if key[1] < 9}
    assert len(dense) == 4 * 8 - 1
    second = numbers(late, names)
    assert {key: second[key] for key in dense} == dense
    layers = {(m.step, m.metric) for b in late for m in b.layers}
    assert {(1, "update_ratio"), (1, "dead_units"), (8, "grad_norm")} <= layers
