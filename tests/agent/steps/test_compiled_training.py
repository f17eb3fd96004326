"""torch.compile of the model, the loss, the train step and the optimizer's step.

Nothing breaks, the agent is not compiled along with it, and what arrives is what was done.
"""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from tests.support.watching import Diary, Watching

# What torch itself warns of when it compiles, watched or not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
]


@pytest.fixture
def watching(tmp_path):
    torch._dynamo.reset()
    with Watching(tmp_path) as made:
        yield made
    torch._dynamo.reset()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, diary, *, criterion=functional.cross_entropy, step=None, steps=6):
    for index in range(steps):
        x, y = batch(index)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        (step or optimizer.step)()
        diary.step(loss)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_model(watching, backend, compiled_first):
    inner = net()
    model = torch.compile(inner, backend=backend, fullgraph=True)
    optimizer = sgd(inner)
    watching.attach(model if compiled_first else inner, optimizer)
    diary = Diary(inner)
    train(model, optimizer, diary)
    diary.check(watching)


@pytest.mark.parametrize("outermost", [True, False])
def test_a_model_is_compiled_once_with_the_agent_and_without(watching, outermost):
    counts = []
    for watched in (False, True):
        torch._dynamo.reset()
        counter = CompileCounter()
        inner = net()
        model = torch.compile(inner, backend=counter)
        optimizer = sgd(inner)
        if watched:
            monitor = watching.attach(model if outermost else inner, optimizer)
        diary = Diary(inner)
        train(model, optimizer, diary, steps=12)
        if watched:
            # As where steps are too short to sample each: the model's hook comes and goes.
            monitor._schedule.plan = lambda step: (step % 4 == 0,) * 5
            monitor._schedule.next_due = lambda step: step + 4 - step % 4
        train(model, optimizer, diary, steps=12)
        counts.append((counter.frame_count, counter.op_count))
    assert counts[0] == counts[1]
    sampled = {s: loss for s, loss in enumerate(diary.losses) if s <= 12 or s % 4 == 0}
    assert watching.points("loss") == pytest.approx(sampled)


def test_a_compiled_loss(watching):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def criterion(scores, target):
        return functional.cross_entropy(scores, target) + 0.1 * scores.square().mean()

    model = net()
    optimizer = sgd(model)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, criterion=criterion)
    diary.check(watching)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_compiled_optimizer_step(watching, kind, wrapped):
    model = net()
    optimizer = kind(model.parameters(), lr=0.01)
    watching.attach(model, optimizer)
    diary = Diary(model)
    called = (lambda: optimizer.step()) if wrapped else optimizer.step
    train(model, optimizer, diary, step=torch.compile(called, backend="eager"))
    diary.check(watching)


class Own(torch.optim.Optimizer):
    """An optimizer whose step can be compiled as one graph, as those of torch cannot."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


def test_a_step_in_one_graph_is_not_broken_and_said_to_be_unseen(watching):
    model = net()
    optimizer = Own(model.parameters())
    monitor = watching.attach(model, optimizer)
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    before = model[0].weight.detach().clone()
    train(model, optimizer, Diary(model), step=step)
    assert not torch.equal(model[0].weight, before)
    assert watching.points("loss") == {}
    [(_, text)] = watching.events("agent.note")
    assert "fullgraph" in text
    assert "not seen" in text
    assert monitor.closed


def test_torch_refuses_its_own_optimizers_in_one_graph_with_the_agent_and_without(watching):
    reported = []
    for watched in (False, True):
        torch._dynamo.reset()
        model = net()
        optimizer = sgd(model)
        if watched:
            watching.attach(model, optimizer)
        step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
            train(model, optimizer, Diary(model), step=step)
        reported.append(str(raised.value).splitlines()[0])
    assert reported[0] == reported[1]


class Frames:
    """Files of the Python frames that torch.compile has seen."""

    def __init__(self, monkeypatch):
        self.files = []
        tracer = torch._dynamo.symbolic_convert.InstructionTranslator
        made = tracer.__init__

        def noted(this, instructions, code, *args, **kwargs):
            self.files.append(code.co_filename)
            made(this, instructions, code, *args, **kwargs)

        monkeypatch.setattr(tracer, "__init__", noted)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_compiled_train_step(watching, monkeypatch, scaled):
    frames = Frames(monkeypatch)
    model = net()
    optimizer = sgd(model)
    monitor = watching.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)

    @torch.compile(backend="eager")
    def step(x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    diary = Diary(model)
    for index in range(6):
        diary.step(step(*batch(index)))
        monitor.log(index=index)
    diary.check(watching)
    assert watching.points("index") == {s: float(s) for s in range(6)}
    # Not a frame of the agent: to compile those would take the trainer seconds, again and again.
    assert any(file == __file__ for file in frames.files)
    agent = __import__("rankscope.agent", fromlist=["agent"]).__path__[0]
    assert [f for f in frames.files if f.startswith(agent)] == []


def test_a_log_in_a_compiled_train_step(watching):
    model = net()
    optimizer = sgd(model)
    monitor = watching.attach(model, optimizer)

    @torch.compile(backend="eager")
    def step(x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        monitor.log(mine=loss)
        return loss

    diary = Diary(model)
    for index in range(6):
        diary.step(step(*batch(index)))
    diary.check(watching)
    assert watching.points("mine") == pytest.approx(dict(enumerate(diary.losses)))
