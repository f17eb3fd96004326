"""Training as few people do it: the run is recorded, and nothing of the agent fails."""

import threading
import time

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.watching import CLASSES, FEATURES, Diary, net

BATCH = 5


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, FEATURES, generator=generator), torch.arange(BATCH) % CLASSES


def train(model, optimizer, diary, steps, *, called=None, before=lambda step: None):
    for step in steps:
        before(step)
        x, y = batch(step)
        optimizer.zero_grad()
        loss = functional.cross_entropy((called or model)(x), y)
        loss.backward()
        optimizer.step()
        diary.step(loss)


# ------------------------------------------------------------------------------- other optimizers


def test_an_optimizer_that_is_built_anew_is_the_one_that_is_reported(watching):
    model = net()
    first = sgd(model)
    watching.attach(model, first)
    diary = Diary(model)
    train(model, first, diary, range(4))
    second = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(second, 0.5)
    train(model, second, diary, range(4, 8), before=lambda step: step > 4 and schedule.step())
    diary.check(watching)
    rates = [0.1] * 4 + [0.01 * 0.5**n for n in range(4)]
    assert watching.points("lr") == pytest.approx(dict(enumerate(rates)))
    assert watching.points("scheduler_steps") == {5: 1.0, 6: 2.0, 7: 3.0}
    assert set(watching.model_digests("optimizer_state")) == {4, 5, 6, 7}
    [(step, text)] = watching.events("agent.note")
    assert step == 4
    assert "a Adam" in text


def test_the_one_inside_a_wrapper_takes_nobodys_place(watching):
    class Wrapper:
        """Has no hooks of its own, and settings of its own."""

        def __init__(self, optimizer):
            self.inside = optimizer
            self.param_groups = [dict(g, lr=g["lr"] * 2) for g in optimizer.param_groups]

        def zero_grad(self):
            self.inside.zero_grad()

        def step(self):
            self.inside.step()

    model = net()
    optimizer = Wrapper(sgd(model))
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(3))
    diary.check(watching)
    assert watching.points("lr") == dict.fromkeys(range(3), 0.2)
    assert watching.events("agent.note") == []


@pytest.mark.parametrize("step", [None, 3])
def test_an_optimizer_that_goes_on_and_does_not_know_where(watching, step):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, Diary(model), range(3))
    watching.attach(model, optimizer, step=step)
    diary = Diary(model)
    train(model, optimizer, diary, range(3))
    diary.check(watching, first=step or 0)
    notes = [text for _, text in watching.events("agent.note")]
    assert ["step=" in text for text in notes] == [True] * (step is None)


# ----------------------------------------------------------------------------- other ways backward


@pytest.mark.parametrize("asked", [list, tuple, iter])
def test_gradients_that_the_trainer_asks_for_and_writes_himself(watching, asked):
    model = net()
    optimizer = sgd(model)
    watching.attach(model, optimizer)
    diary, right = Diary(model), {}
    for step in range(5):
        x, y = batch(step)
        scores = model(x)
        loss = functional.cross_entropy(scores, y)
        right[step] = (scores.argmax(1) == y).double().mean().item()
        parameters = list(model.parameters())
        by = model.parameters() if asked is iter else asked(parameters)
        gradients = torch.autograd.grad(loss, by, create_graph=True)
        # Curvature, say: this is no loss.
        torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.detach()
        optimizer.step()
        diary.step(loss)
    diary.check(watching)
    assert watching.points("accuracy") == pytest.approx(right)


def test_an_inner_loop_is_not_what_is_trained_on(watching):
    """As in meta-learning: a step by hand inside each step of the optimizer."""
    model = net()
    optimizer = sgd(model)
    watching.attach(model, optimizer)
    diary = Diary(model)
    for step in range(5):
        optimizer.zero_grad()
        x, y = batch(step)
        inner = functional.cross_entropy(model(x), y)
        named = dict(model.named_parameters())
        gradients = torch.autograd.grad(inner, tuple(named.values()), create_graph=True)
        moved = {n: p - 0.1 * g for (n, p), g in zip(named.items(), gradients, strict=True)}
        x, y = batch(100 + step)
        loss = functional.cross_entropy(functional_call(model, moved, (x,)), y)
        loss.backward()
        optimizer.step()
        diary.step(loss)
    diary.check(watching)


def test_optimizers_that_step_in_the_middle_of_backward(watching):
    """One for each parameter, so that its gradient need not be kept."""
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    watching.attach(model, optimizers[model[0].weight])
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for index in range(5):
        x, y = batch(index)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
    assert watching.points("loss") == dict(enumerate(losses))
    assert watching.batches()[-1].through_step == 4


# ------------------------------------------------------------------------------ other ways forward


def test_steps_taken_in_evaluation_mode(watching):
    """As in fine-tuning without dropout: batches, times and costs are reported as in any other."""
    model = net().eval()
    optimizer = sgd(model)
    monitor = watching.attach(model, optimizer)
    diary = Diary(model)

    def evaluate(step):
        assert monitor.phase != "evaluation"
        if step == 5:
            with torch.no_grad():
                functional.cross_entropy(model(batch(77)[0]), batch(77)[1])

    train(model, optimizer, diary, range(8), before=evaluate)
    diary.check(watching)
    # That it is training is known at the end of the first step.
    assert watching.points("samples") == dict.fromkeys(range(1, 8), float(BATCH))
    assert set(watching.points("step_seconds")) == set(range(1, 8)) - {5}
    assert set(watching.points("eval/loss")) == {4}
    assert monitor._schedule.share() > 0


def test_a_pass_in_evaluation_mode_within_every_step(watching):
    """Pseudo-labels: they are a part of each step, and its cost is known to the schedule."""
    model = net()
    optimizer = sgd(model)
    monitor = watching.attach(model, optimizer)
    diary = Diary(model)

    def label(step):
        model.eval()
        with torch.no_grad():
            model(batch(100 + step)[0])
        model.train()

    train(model, optimizer, diary, range(8), before=label)
    diary.check(watching)
    assert watching.points("samples") == dict.fromkeys(range(8), float(BATCH))
    assert set(watching.points("step_seconds")) >= set(range(2, 8))
    assert monitor._schedule.share() > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_sees_each_sample_once(watching, reentrant):
    model = net()
    optimizer = sgd(model)
    watching.attach(model, optimizer)
    diary = Diary(model)

    def called(x):
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)

    train(model, optimizer, diary, range(5), called=called)
    diary.check(watching)
    assert watching.points("samples") == dict.fromkeys(range(5), float(BATCH))


def test_gradients_of_single_samples(watching):
    """Under `vmap` and `grad` the model is called with what stands for a sample."""
    model = net()
    optimizer = sgd(model)
    watching.attach(model, optimizer)
    diary = Diary(model)

    def of_one(parameters, x, y):
        scores = functional_call(model, parameters, (x[None],))
        return functional.cross_entropy(scores, y[None])

    def observe(step):
        parameters = {n: p.detach() for n, p in model.named_parameters()}
        vmap(grad(of_one), in_dims=(None, 0, 0))(parameters, *batch(step))

    train(model, optimizer, diary, range(5), before=observe)
    diary.check(watching)
    assert watching.points("samples") == dict.fromkeys(range(5), float(BATCH))


def test_lazy_modules_get_their_shapes_after_attach(watching):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(CLASSES))
    optimizer = sgd(model)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(4))
    diary.check(watching)
    [(step, text)] = watching.events("agent.note")
    assert step == 0
    assert "trained from now on: 0.weight, 0.bias, 2.weight, 2.bias" in text


# Of which class the warning is depends on the version of torch.
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_scripted_model(watching):
    """It takes no hooks: what it is given is not seen, all else is."""
    model = torch.jit.script(net())
    optimizer = sgd(model)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(5))
    diary.check(watching)


def test_training_in_another_thread_than_attach(watching):
    model = net()
    optimizer = sgd(model)
    monitor = watching.attach(model, optimizer)
    diary, phases = Diary(model), []
    stopped, sampled = threading.Event(), threading.Event()

    def stop(step):
        if step == 4:
            stopped.set()
            sampled.wait()

    class Stops(nn.Module):
        def forward(self, x):
            stop(len(diary.losses))
            return model(x)

    def run():
        train(model, optimizer, diary, range(5), called=Stops())

    thread = threading.Thread(target=run)
    thread.start()
    stopped.wait()
    phases.append(monitor.phase)
    sampled.set()
    thread.join()
    diary.check(watching)
    assert phases == ["forward"]


# ------------------------------------------------------------------------------- what it is given


class Takes(nn.Module):
    """Is given something else before its samples."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, given, x):
        return self.inner(x)


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_tensors_of_tensors(watching, layout):
    model = Takes()
    optimizer = sgd(model)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(3), called=lambda x: model(nested(layout), x))
    diary.check(watching)
    rates, seconds = watching.points("samples_per_second"), watching.points("step_seconds")
    assert {s: rates[s] * seconds[s] for s in rates} == pytest.approx({1: 2.0, 2: 2.0})


def test_lists_by_the_million_cost_nothing(watching):
    numbers = [list(range(1000))] * 1000
    model = Takes()
    optimizer = sgd(model)
    monitor = watching.attach(model, optimizer)
    taken = []

    def called(x):
        began = time.thread_time()
        scores = model(numbers, x)
        taken.append(time.thread_time() - began)
        return scores

    diary = Diary(model)
    train(model, optimizer, diary, range(5), called=called)
    diary.check(watching)
    # To go through all of them takes a tenth of a second and more.
    assert min(taken) < 0.02
    assert monitor.closed
