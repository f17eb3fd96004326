"""What listening for losses leaves as it was: graphs, memory, torch itself and the results."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope.agent.probes.loss import patches
from rankscope.agent.probes.loss import sources as loss_sources
from rankscope.agent.probes.loss.training import Loss
from tests.support.losses import batch, net
from tests.support.probe_harness import Harness


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


def closing(harness):
    """A kind of tensor: who is given it ends the listener in the middle of its work."""

    class Closing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            harness.close()
            return super().__torch_function__(function, types, args, kwargs or {})

    return Closing


def test_a_loss_under_way_does_not_notice_that_the_listener_is_gone(watch):
    harness = watch(net())
    x, y = batch()
    scores = net()(x).detach()
    loss = functional.cross_entropy(scores.as_subclass(closing(harness)), y)
    assert not loss_sources._taps
    assert loss.item() == functional.cross_entropy(scores, y).item()


def test_a_backward_pass_under_way_does_not_notice_it_either(watch):
    model = net()
    harness = watch(model)
    x, y = batch()
    loss = functional.cross_entropy(model(x), y)
    model[0].weight.register_hook(lambda gradient: harness.close())
    loss.backward()
    assert not loss_sources._taps
    assert model[0].weight.grad.abs().sum() > 0


ROWS, SCORES = torch.randn(5, 3), torch.rand(5, 3)
SIGNS = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
CLASS = torch.tensor([0, 1, 2, 0, 1])
GIVEN = {
    "binary_cross_entropy": (SCORES, SCORES),
    "cosine_embedding_loss": (ROWS, SCORES, SIGNS),
    "cross_entropy": (ROWS, CLASS),
    "ctc_loss": (
        torch.randn(7, 2, 3).log_softmax(2),
        torch.ones(2, 3, dtype=torch.long),
        torch.tensor([7, 7]),
        torch.tensor([3, 3]),
    ),
    "gaussian_nll_loss": (ROWS, SCORES, SCORES),
    "margin_ranking_loss": (ROWS[:, 0], ROWS[:, 1], SIGNS),
    "multi_margin_loss": (ROWS, CLASS),
    "multilabel_margin_loss": (ROWS, torch.tensor([[0, 1, -1]] * 5)),
    "nll_loss": (ROWS, CLASS),
    "triplet_margin_loss": (ROWS, SCORES, -ROWS),
    "triplet_margin_with_distance_loss": (ROWS, SCORES, -ROWS),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("name", loss_sources._FUNCTIONS)
def test_every_loss_function_can_be_compiled(watch, name, sampled):
    # torch.compile goes into some of them, and into our code with them.
    function = getattr(functional, name)
    given = GIVEN.get(name, (ROWS, SCORES))
    expected = function(*given)
    harness = watch(net())
    harness.context.basic = sampled
    loss_sources.requests_changed()
    torch.compiler.reset()
    compiled = torch.compile(lambda *given: function(*given) * 2, backend="eager")
    assert torch.equal(compiled(*given), expected * 2)


class OwnScaler(torch.amp.GradScaler):
    def scale(self, outputs):
        return outputs * 8.0


class OtherScaler(torch.amp.GradScaler):
    def scale(self, outputs):
        return outputs * 2.0


def test_two_scalers_of_the_users_stay_separate(watch):
    watch(net())
    loss = torch.tensor(3.0, requires_grad=True)
    assert OwnScaler("cpu").scale(loss).item() == 24.0
    assert OtherScaler("cpu").scale(loss).item() == 6.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sampled", [True, False])
def test_a_scaler_of_the_users_can_be_compiled(watch, sampled):
    harness = watch(net())
    harness.context.basic = sampled
    loss_sources.requests_changed()
    torch.compiler.reset()
    scaler, loss = OwnScaler("cpu"), torch.tensor(3.0, requires_grad=True)
    compiled = torch.compile(lambda loss: scaler.scale(loss * 2), backend="eager")
    assert compiled(loss).item() == 48.0


class Computed(nn.Linear):
    @property
    def training(self):
        return self.bias.requires_grad

    @training.setter
    def training(self, mode):
        pass


class OfItsClass(nn.Linear):
    training = True


class Curious(nn.Linear):
    def __getattribute__(self, name):
        return super().__getattribute__(name)


@pytest.mark.parametrize("kind", [Computed, OfItsClass, Curious])
def test_a_mode_that_is_no_plain_attribute_is_not_asked_for(kind):
    assert loss_sources.mode_of(kind(3, 3)) is None
    plain = nn.Linear(3, 3)
    assert loss_sources.mode_of(plain) is plain


def test_a_model_that_was_disassembled_does_no_harm(watch):
    model = net()
    harness = watch(model)
    harness.context.basic = harness.context.signals = False
    loss_sources.requests_changed()
    assert patches.requests.unless_training is model
    scores, (_, y) = model(batch()[0]).detach(), batch()
    expected = functional.cross_entropy(scores, y)
    vars(model).clear()
    assert functional.cross_entropy(scores, y) == expected
