"""Local gradients against gradients computed by hand, in real loops and in two processes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope.agent.fingerprint import FingerprintPlan
from rankscope.agent.probes.gradients.applied import Gradients
from rankscope.agent.probes.gradients.local import LocalGradients
from tests.support.probe_harness import Harness

PROBES = (LocalGradients, Gradients)


class Net(nn.Module):
    """A tensor that is large, one of half precision, and one that is not always used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Linear(300, 256)
        self.small = nn.Linear(256, 3)
        self.seldom = nn.Linear(256, 3)

    def forward(self, x, seldom=False):
        x = torch.tanh(self.large(x))
        return self.small(x) + (self.seldom(x) if seldom else 0)


@pytest.fixture
def net():
    return Net()


def harness_of(net, lr=0.1, probes=PROBES, **options):
    return Harness(net, torch.optim.SGD(net.parameters(), lr=lr), probes=probes, **options)


def backward(net, seed=0, divide=1, **given):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 300, generator=generator)
    y = torch.randint(0, 3, (8,), generator=generator)
    (functional.cross_entropy(net(x, **given), y) / divide).backward()


def sketches(gradients):
    tensors = [torch.empty(0) if g is None else g for g in gradients]
    return FingerprintPlan([str(i) for i in range(len(tensors))], tensors).compute(
        tensors, sketches=True
    )


def fingerprint_of(facts, stage):
    (found,) = [p for p in facts.fingerprints if p.stage == stage]
    return found


def test_a_parameter_without_a_gradient_has_zeros_in_both_fingerprints(net):
    harness = harness_of(net)
    backward(net)
    expected = sketches([p.grad for p in net.parameters()])
    harness.optimizer.step()
    local = fingerprint_of(harness.steps[0], "local_gradient")
    reduced = fingerprint_of(harness.steps[0], "reduced_gradient")
    assert reduced.digests.tolist() == expected.digests.tolist()
    assert reduced.digests[4:].tolist() == [0, 0]
    assert (local.digests == 0).all()
    for given in (local, reduced):
        assert given.sketches == pytest.approx(expected.sketches, rel=1e-12)
        assert not given.sketches[4:].any()
        assert given.sketches[:4].any(axis=1).all()
    harness.close()


def test_clipping_changes_the_reduced_gradient_and_not_the_local_one(net):
    harness = harness_of(net)
    backward(net)
    norm = float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01))
    harness.optimizer.step()
    assert harness.value("grad_norm") == pytest.approx(0.01, rel=1e-3)
    assert harness.value("grad_norm_local") == pytest.approx(norm, rel=1e-5)
    facts = harness.steps[0]
    local, reduced = (fingerprint_of(facts, f"{s}_gradient").sketches for s in ("local", "reduced"))
    assert reduced * norm / 0.01 == pytest.approx(local, rel=1e-3, abs=1e-9)
    harness.close()


def test_micro_batches_are_summed_up(net):
    harness = harness_of(net)
    for step in range(2):
        harness.optimizer.zero_grad()
        for seed in range(3):
            backward(net, 10 * step + seed, divide=3)
        exact = float(
            torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
        )
        harness.optimizer.step()
        facts = harness.steps[-1]
        local = fingerprint_of(facts, "local_gradient").sketches
        reduced = fingerprint_of(facts, "reduced_gradient").sketches
        assert local == pytest.approx(reduced, rel=1e-4, abs=1e-7)
        # The large tensor's share is estimated.
        assert harness.value("grad_norm_local") == pytest.approx(exact, rel=0.3)
    harness.close()


def test_a_backward_pass_that_was_given_up_is_not_counted(net):
    harness = harness_of(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    for scale_should_do in (False, True):
        if scale_should_do:
            scaler.update(256.0)
        harness.optimizer.zero_grad()
        x = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)) * 1e6
        loss = functional.cross_entropy(net(x) * 1e6, torch.tensor([0, 1, 2, 0]))
        scaler.scale(loss).backward()
        scaler.step(harness.optimizer)
        scaler.update()
    assert len(harness.steps) == 1
    expected = float(
        torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
    )
    assert harness.value("grad_norm") == pytest.approx(expected, rel=1e-5)
    # Local gradients are those of the scaled loss.
    assert harness.value("grad_norm_local") == pytest.approx(256 * expected, rel=1e-4)
    harness.close()


def test_a_closure_leaves_its_last_evaluation(net):
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    harness = Harness(net, optimizer, probes=PROBES)

    def closure():
        optimizer.zero_grad()
        backward(net)
        return torch.tensor(1.0)

    optimizer.step(closure)
    facts = harness.steps[0]
    assert harness.value("grad_norm_local") == pytest.approx(harness.value("grad_norm"), rel=1e-6)
    assert fingerprint_of(facts, "local_gradient").sketches == pytest.approx(
        fingerprint_of(facts, "reduced_gradient").sketches, rel=1e-9
    )
    harness.close()


def test_hooks_are_there_at_sampled_steps_only(net):
    harness = harness_of(net, dense_steps=1)
    harness.context.schedule._masks = (0, 0, 0, 3, 3)
    hooked = []
    for _ in range(6):
        hooked.append([bool(p._backward_hooks) for p in net.parameters()])
        harness.optimizer.zero_grad()
        backward(net)
        harness.optimizer.step()
    assert [all(h) for h in hooked] == [True, False, False, False, True, False]
    assert [any(h) for h in hooked] == [True, False, False, False, True, False]
    assert ["grad_norm_local" in s.scalars for s in harness.steps] == [all(h) for h in hooked]
    harness.close()


def test_a_replaced_parameter_is_hooked_at_the_next_sample(net):
    harness = harness_of(net)
    names = []
    for step in range(3):
        if step == 1:
            net.small.weight = nn.Parameter(net.small.weight.detach() * 2)
            harness.optimizer.param_groups[0]["params"][2] = net.small.weight
            net.large.bias.requires_grad_(False)
        harness.optimizer.zero_grad()
        backward(net)
        if harness.tracked.changed():
            harness.tracked.renew()
            harness.context.parameters = harness.tracked.group
        harness.optimizer.step()
        names.append({p.stage: p for p in harness.steps[-1].fingerprints})
    assert "local_gradient" not in names[1]
    last = names[2]["local_gradient"]
    assert last.table == harness.context.parameters.table
    assert last.sketches == pytest.approx(names[2]["reduced_gradient"].sketches, rel=1e-12)
    assert len(last.sketches) == 5
    harness.close()
    assert not any(p._backward_hooks for p in net.parameters())


def test_sparse_complex_double_and_half_gradients():
    torch.manual_seed(0)
    table = nn.Embedding(50, 4, sparse=True)
    turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
    half = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
    model = nn.Module()
    model.table, model.turn, model.wide, model.low = table, turn, wide, half
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness = Harness(model, optimizer, probes=PROBES)
    rows = table(torch.tensor([3, 7, 3, 3]))
    (((rows * turn).abs() * wide).sum() + (rows * half.float()).sum()).backward()
    optimizer.step()
    dense = [
        p.grad.to_dense() if p.grad.is_sparse else p.grad for p in (turn, wide, half, table.weight)
    ]
    expected = sum(float(g.abs().double().square().sum()) for g in dense) ** 0.5
    assert harness.value("grad_norm") == pytest.approx(expected, rel=1e-5)
    assert harness.value("grad_norm_local") == pytest.approx(expected, rel=1e-2)
    facts = harness.steps[0]
    found = fingerprint_of(facts, "reduced_gradient")
    assert harness.context.parameters.names == ("turn", "wide", "low", "table.weight")
    assert found.sketches == pytest.approx(sketches(dense).sketches, rel=1e-6)
    assert found.digests.tolist() == sketches(dense).digests.tolist()
    local = fingerprint_of(facts, "local_gradient").sketches
    assert local == pytest.approx(found.sketches, rel=1e-2, abs=1e-6)
    harness.close()


class FSDPModule:
    """Named as the mixin that `fully_shard` gives its modules."""


class Sharded(FSDPModule, Net):
    pass


def test_where_no_hook_sees_the_local_gradient_nothing_wrong_is_said():
    net = Sharded()
    harness = harness_of(net)
    for _ in range(2):
        backward(net)
        harness.optimizer.step()
    assert len(harness.notes) == 1
    assert "not available" in harness.notes[0]
    assert "grad_norm_local" not in harness.steps[-1].scalars
    assert {p.stage for p in harness.steps[-1].fingerprints} == {"reduced_gradient"}
    harness.close()


def test_a_model_sharded_in_earnest(tmp_path):
    from tests.support.fully_sharded import fully_shard

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(model, mesh=mesh)
        harness = harness_of(model)
        model(torch.ones(2, 6)).square().sum().backward()
        local = [p.grad._local_tensor for p in model.parameters()]
        expected = sketches(local)
        harness.optimizer.step()
        found = fingerprint_of(harness.steps[0], "reduced_gradient")
        assert found.digests.tolist() == expected.digests.tolist()
        norm = sum(float(g.square().sum()) for g in local) ** 0.5
        assert harness.value("grad_norm") == pytest.approx(norm, rel=1e-5)
        assert {p.stage for p in harness.steps[0].fingerprints} == {"reduced_gradient"}
        assert "not available" in harness.notes[0]
        harness.close()
    finally:
        torch.distributed.destroy_process_group()


def test_tensor_parallel_gradients_are_those_of_the_shard(tmp_path):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        harness = harness_of(model)
        model(torch.ones(2, 6)).square().sum().backward()
        expected = sketches([p.grad._local_tensor for p in model.parameters()])
        harness.optimizer.step()
        found = fingerprint_of(harness.steps[0], "local_gradient")
        assert found.sketches == pytest.approx(expected.sketches, rel=1e-9)
        assert harness.value("grad_norm_local") == pytest.approx(harness.value("grad_norm"))
        harness.close()
    finally:
        torch.distributed.destroy_process_group()
