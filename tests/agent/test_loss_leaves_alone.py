"""What listening for losses leaves as it was: graphs, memory, torch itself and the results."""

import copy
import gc
import io
import pickle

import pytest
import torch
from support.losses import batch, net
from support.probe_harness import Harness
from torch import nn
from torch.nn import functional

from rankscope.agent.probes import loss_sources
from rankscope.agent.probes.loss import Loss


def test_no_graph_is_kept(watch):
    model = net()
    watch(model)
    x, y = batch()

    class Probe(torch.autograd.Function):
        alive = 0

        @staticmethod
        def forward(ctx, x):
            Probe.alive += 1
            ctx.token = Token()
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Token:
        def __del__(self):
            Probe.alive -= 1

    for _ in range(8):
        loss = functional.cross_entropy(Probe.apply(model(x)), y)
        (loss * 2).backward()
        functional.cross_entropy(Probe.apply(model(x)), y)
    del loss
    gc.collect()
    assert Probe.alive == 0


def test_nothing_piles_up(watch):
    model, other = net(), net(seed=1)
    harness = watch(model, overhead=1e-6)
    x, y = batch()
    loss = functional.cross_entropy(other(x), y)
    for _ in range(5000):
        loss.backward(retain_graph=True)
    assert len(harness.loss.passes) <= 1024
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(100):
        scaler.scale(loss)
        functional.cross_entropy(model(x), y)
    assert len(loss_sources._scaled) <= 16
    assert len(harness.loss._computed) <= 16


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripting_tracing_and_pickling_work_while_listening(watch):
    before = functional.cross_entropy
    model = net()
    watch(model)
    x, y = batch()
    scores = model(x).detach()
    expected = functional.cross_entropy(scores, y)

    @torch.jit.script
    def scripted(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(scores, y, label_smoothing=0.0)

    assert scripted(scores, y) == expected
    assert torch.jit.script(nn.CrossEntropyLoss())(scores, y) == expected
    assert torch.jit.trace(nn.CrossEntropyLoss(), (scores, y))(scores, y) == expected
    assert pickle.loads(pickle.dumps(before)) is functional.cross_entropy is before
    file = io.BytesIO()
    torch.save({"criterion": before, "model": model}, file)
    copy.deepcopy(model)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_not_broken_and_its_loss_is_seen(watch):
    model = net()
    x, y = batch()
    harness = watch(model)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, y):
        return functional.cross_entropy(model(x), y)

    for _ in range(3):
        loss = step(x, y)
        loss.backward()
        harness.optimizer.step()
        harness.optimizer.zero_grad()
        assert harness.value("loss") == loss.item()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_a_divided_loss_runs_nothing_again(watch, reentrant):
    from torch.utils.checkpoint import checkpoint

    model = net()
    harness = watch(model)
    calls = []
    x, y = batch()
    x.requires_grad_()

    def run(x):
        calls.append(1)
        return functional.cross_entropy(model(x), y) / torch.tensor(2.0)

    loss = checkpoint(run, x, use_reentrant=reentrant)
    loss.backward()
    harness.optimizer.step()
    assert len(calls) == 2
    assert harness.value("loss") == loss.item()


def test_losses_under_function_transforms_are_left_alone(watch):
    model = net()
    harness = watch(model)
    x, y = batch()

    def per_sample(x, y):
        return functional.cross_entropy(model(x), y)

    torch.vmap(per_sample)(x, y)
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    harness.optimizer.step()
    assert harness.value("loss") == loss.item()


def run_training(watched):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    harness = Harness(model, optimizer, probes=(Loss,)) if watched else None
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(40):
        model.train(step % 7 != 6)
        x, y = batch(step)
        loss = nn.CrossEntropyLoss(ignore_index=1)(model(x), y)
        if step % 5:
            scaler.scale(loss / 2).backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 3))
    if harness:
        harness.close()
    return model.state_dict(), torch.get_rng_state()


def test_training_is_bit_identical():
    plain, watched = run_training(False), run_training(True)
    assert all(torch.equal(plain[0][k], watched[0][k]) for k in plain[0])
    assert torch.equal(plain[1], watched[1])


def test_torch_is_given_back():
    functions = [getattr(functional, name) for name in loss_sources._FUNCTIONS]
    functions += [torch.autograd.backward, torch.amp.GradScaler.scale]
    codes, names = [f.__code__ for f in functions], set(vars(functional))
    harness = Harness(net(), torch.optim.SGD(net().parameters(), lr=0.1), probes=(Loss,))
    assert sum(f.__code__ is not c for f, c in zip(functions, codes, strict=True)) == len(codes)
    harness.close()
    assert [f.__code__ for f in functions] == codes
    assert set(vars(functional)) == names


def test_a_forgotten_listener_gives_torch_back():
    code = functional.cross_entropy.__code__
    harness = Harness(net(), torch.optim.SGD(net().parameters(), lr=0.1), probes=(Loss,))
    harness.handle.remove()
    del harness
    gc.collect()
    assert functional.cross_entropy.__code__ is code
