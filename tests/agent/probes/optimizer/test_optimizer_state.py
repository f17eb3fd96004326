"""Fingerprints of the state of real optimizers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope.agent.probes.optimizer.state import OptimizerState
from tests.support.probe_harness import Harness

OPTIMIZERS = {
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01), {"exp_avg", "exp_avg_sq", "step"}),
    "fused": (
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        {"exp_avg", "exp_avg_sq", "step"},
    ),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), {"momentum_buffer"}),
    "adafactor": (
        lambda p: torch.optim.Adafactor(p, lr=0.01),
        {"step", "row_var", "col_var", "variance"},
    ),
    "lbfgs": (lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2), {"d", "prev_flat_grad"}),
    "nadam": (
        lambda p: torch.optim.NAdam(p, lr=0.01),
        {"step", "mu_product", "exp_avg", "exp_avg_sq"},
    ),
}


def made(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 6, generator=generator)

    def closure():
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), torch.zeros(5, 3))
        loss.backward()
        return loss

    optimizer.step(closure)


def run(make, steps=3, spoil=None):
    model = made()
    optimizer = make(model.parameters())
    harness = Harness(model, optimizer, probes=[OptimizerState])
    try:
        for number in range(steps):
            step(model, optimizer, number)
            if spoil is not None and number == steps - 2:
                spoil(model, optimizer)
    finally:
        harness.close()
    return harness


def digest(harness, number=-1):
    return harness.steps[number].digests["optimizer_state"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_key_has_a_table_and_equal_runs_have_equal_digests(name):
    make, keys = OPTIMIZERS[name]
    first, second = run(make), run(make)
    fingerprints = {p.table.partition("@")[0] for p in first.steps[-1].fingerprints}
    assert {f"optimizer/{k}" for k in keys} <= fingerprints
    assert all(p.stage == "optimizer_state" for p in first.steps[-1].fingerprints)
    assert all(p.table in first.announced for s in first.steps for p in s.fingerprints)
    assert [digest(first, i) for i in range(3)] == [digest(second, i) for i in range(3)]
    assert len({digest(first, i) for i in range(3)}) == 3


def test_fingerprints_carry_the_names_of_the_parameters():
    harness = run(OPTIMIZERS["adam"][0])
    assert harness.announced["optimizer/exp_avg"].names == (
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    )
    fingerprints = {p.table: p for p in harness.steps[-1].fingerprints}
    assert fingerprints["optimizer/exp_avg"].sketches.shape[0] == 4
    assert fingerprints["optimizer/step"].sketches is None
    assert len(set(fingerprints["optimizer/step"].digests.tolist())) == 1


def flip(tensor):
    with torch.no_grad():
        tensor.view(torch.int32).view(-1)[-1] ^= 1


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_one_changed_bit_shows_in_the_digest_and_in_its_tensor_alone(key):
    make = OPTIMIZERS["adam"][0]

    def spoil(model, optimizer):
        flip(optimizer.state[model[2].weight][key])

    healthy, spoiled = run(make, steps=3), run(make, steps=3, spoil=spoil)
    assert digest(healthy, 1) == digest(spoiled, 1)
    assert digest(healthy) != digest(spoiled)
    for one, other in zip(
        healthy.steps[-1].fingerprints, spoiled.steps[-1].fingerprints, strict=True
    ):
        differ = (one.digests != other.digests).tolist()
        assert differ == ([False, False, one.table.endswith(f"/{key}"), False])


def test_swapped_moments_are_another_state():
    make = OPTIMIZERS["adam"][0]

    def spoil(model, optimizer):
        state = optimizer.state[model[0].bias]
        # Equal and opposite changes must not cancel in the digest either.
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]

    assert digest(run(make)) != digest(run(make, spoil=spoil))


def test_a_step_counter_of_its_own_shows():
    def spoil(model, optimizer):
        optimizer.state[model[0].bias]["step"] += 1

    make = OPTIMIZERS["adam"][0]
    healthy, spoiled = run(make), run(make, spoil=spoil)
    assert digest(healthy) != digest(spoiled)
    fingerprints = {p.table: p for p in spoiled.steps[-1].fingerprints}
    assert len(set(fingerprints["optimizer/step"].digests.tolist())) == 2


def test_whole_numbers_count_and_losses_do_not():
    make = OPTIMIZERS["lbfgs"][0]
    healthy = run(make)

    def counter(model, optimizer):
        optimizer.state[model[0].weight]["n_iter"] += 1

    def loss(model, optimizer):
        optimizer.state[model[0].weight]["prev_loss"] = 12.0

    assert digest(run(make, spoil=counter)) != digest(healthy)
    assert digest(run(make, spoil=loss)) == digest(healthy)


def test_nothing_is_said_before_there_is_state():
    harness = run(lambda p: torch.optim.SGD(p, lr=0.1))
    assert all("optimizer_state" not in s.digests and not s.fingerprints for s in harness.steps)
    assert harness.announced == {}


def test_loaded_state_is_followed_and_the_old_is_let_go():
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    harness = Harness(model, optimizer, probes=[OptimizerState])
    try:
        step(model, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        before = digest(harness)
        step(model, optimizer, 1)
        optimizer.load_state_dict(saved)
        tables = set(harness.announced)
        # The same state but for one more step with no gradient: not the one before the load.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad.zero_()
        optimizer.step()
        assert digest(harness) not in (before, digest(harness, 1))
        assert {p.table for p in harness.steps[-1].fingerprints} == tables
    finally:
        harness.close()


def test_a_state_of_another_shape_gets_a_new_table():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    harness = Harness(model, optimizer, probes=[OptimizerState])
    try:
        model[0].requires_grad_(False)
        step(model, optimizer, 0)
        assert harness.announced["optimizer/momentum_buffer"].names == ("2.weight", "2.bias")
        model[0].requires_grad_(True)
        step(model, optimizer, 1)
        assert {p.table for p in harness.steps[-1].fingerprints} == {"optimizer/momentum_buffer@1"}
        assert len(harness.announced["optimizer/momentum_buffer@1"].names) == 4
    finally:
        harness.close()


class Wrapper(torch.optim.Optimizer):
    """As ZeRO and others: state in an optimizer inside, over a part of the parameters."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 0.1})
        self.optim = torch.optim.Adam(parameters[:2], lr=0.1)

    def step(self, closure):
        closure()
        self.optim.step()


def test_of_a_sharding_wrapper_it_is_what_this_rank_holds():
    harness = run(Wrapper)
    assert harness.announced["optimizer/exp_avg"].names == ("0.weight", "0.bias")
    assert digest(harness) != digest(harness, 1)


def test_the_state_is_only_sampled_where_it_is_due():
    model = made()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    harness = Harness(model, optimizer, probes=[OptimizerState], sampled=lambda step: step % 4 == 3)
    try:
        for number in range(8):
            step(model, optimizer, number)
    finally:
        harness.close()
    seen = [s.step for s in harness.steps if "optimizer_state" in s.digests]
    assert seen == [3, 7]


def test_state_that_cannot_be_read_is_reported_once():
    def spoil(model, optimizer):
        optimizer.state[model[0].bias]["odd"] = torch.ones(3).to_sparse()

    harness = run(OPTIMIZERS["momentum"][0], steps=5, spoil=spoil)
    assert len(harness.notes) == 1
    assert "odd" in harness.notes[0]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_state_in_half_precision(kind):
    dtype = getattr(torch, kind)
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    harness = Harness(model, optimizer, probes=[OptimizerState])
    try:
        functional.mse_loss(
            model(torch.ones(2, 6, dtype=dtype)), torch.ones(2, 3).to(dtype)
        ).backward()
        optimizer.step()
    finally:
        harness.close()
    assert harness.announced["optimizer/momentum_buffer"].dtypes == (kind, kind)


def test_state_of_sharded_parameters_is_the_part_of_this_rank(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        from torch.distributed.device_mesh import init_device_mesh

        from tests.support.fully_sharded import fully_shard

        model = fully_shard(made(), mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        harness = Harness(model, optimizer, probes=[OptimizerState])
        try:
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
        finally:
            harness.close()
        table = harness.announced["optimizer/exp_avg"]
        assert table.names == ("0.weight", "0.bias", "2.weight", "2.bias")
        assert table.shards[0] == "S(0)@0/1" or "Shard" in table.shards[0]
        assert "optimizer_state" in harness.steps[-1].digests
    finally:
        torch.distributed.destroy_process_group()
