"""All probes together: what they see arrives, and the training is the same to the last bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope import agent
from tests.support.servers.collector import Collector

# As many as are sampled whatever they cost.
STEPS = 8
MICRO_BATCHES = 2


@pytest.fixture
def collector():
    with Collector() as made:
        yield made


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.drop(self.norm(self.embedding(ids).mean(1))))


OPTIMIZERS = {
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def train(make, attach=lambda model, optimizer: None, bad=()):
    """Accumulation, loss scaling, clipping, a schedule and an evaluation."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Net()
    optimizer = make(model.parameters())
    monitor = attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            ids = torch.randint(0, 11, (4, 5))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(ids), torch.randint(0, 3, (4,)))
            if step in bad:
                loss = loss * float("inf")
            scaler.scale(loss / MICRO_BATCHES).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if step == 5:
            model.eval()
            with torch.no_grad():
                functional.cross_entropy(model(ids), torch.zeros(4, dtype=torch.long))
            model.train()
    left = {k: v.clone() for k, v in model.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    if monitor is not None:
        monitor.close()
    return left, states


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("bad", [(), (3, 4)], ids=["healthy", "skipping"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_arrives_and_nothing_changes(collector, tmp_path, name, bad):
    def attach(model, optimizer):
        return agent.attach(
            model, optimizer, server=collector.url, run="run", spool=tmp_path, overhead=1.0
        )

    make = OPTIMIZERS[name]
    plain, watched = train(make, bad=bad), train(make, attach, bad=bad)
    assert all(torch.equal(plain[0][k], watched[0][k]) for k in plain[0])
    assert torch.equal(plain[1][0], watched[1][0])
    assert plain[1][1:] == watched[1][1:]

    numbered = STEPS if name == "fused" else STEPS - len(bad)
    seen = {m: collector.points(m, 0) for b in collector.batches for m in b.columns}
    assert set(seen["grad_norm_preclip"]) == set(range(numbered))
    assert set(seen["micro_steps"].values()) == {MICRO_BATCHES}
    assert seen["steps_skipped"][numbered - 1] == len(bad)
    assert seen["optimizer_steps"][numbered - 1] == STEPS - len(bad)
    assert seen["amp_scale"][0] == 256.0
    assert seen["amp_scale"][numbered - 1] == 256.0 / 2 ** len(bad)
    assert 0 < seen["clip_coefficient"][0] <= 1
    assert seen["samples"][0] == 4 * MICRO_BATCHES
    assert seen["tokens"][0] == 20 * MICRO_BATCHES
    assert {"data_seconds", "compute_seconds"} <= set(seen)
    digests = {w for b in collector.batches for w in b.words}
    assert {"batch", "hyperparameters", "optimizer_state", "buffers", "rng/torch"} <= digests
    tables = {t: v for b in collector.batches if b.hello for t, v in b.hello.tables.items()}
    fingerprints = {p.table for b in collector.batches for p in b.prints}
    assert fingerprints <= set(tables)
    expected = {"momentum_buffer"} if name == "momentum" else {"exp_avg", "exp_avg_sq", "step"}
    assert {f"optimizer/{k}" for k in expected} | {"buffers", "parameters"} <= fingerprints
    reported = next(b.hello.config for b in collector.batches if b.hello)
    assert reported["optimizer_tensors"]["share_of_trainable"] == 1.0
    assert not [e for b in collector.batches for e in b.events if e.kind == "agent.fault"]


def test_what_is_not_finite_at_a_step_is_reported_in_one_event(collector, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with agent.attach(model, optimizer, server=collector.url, run="run", spool=tmp_path):
        for step in range(4):
            optimizer.zero_grad()
            factor = float("inf") if step == 2 else 1.0
            (factor * model(torch.ones(3, 4)).square().mean()).backward()
            optimizer.step()
    events = [e for b in collector.batches for e in b.events if e.kind == "nonfinite"]
    assert (events[0].step, sorted(events[0].data["scalars"])) == (
        2,
        ["grad_norm", "grad_norm_local", "loss"],
    )
