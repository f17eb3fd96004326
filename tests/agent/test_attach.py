"""The front door: a real training loop with a real collector at the other end."""

import copy
import gc
import io
import logging
import math
import pickle
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import optimizer as optimizers

from rankscope import agent
from rankscope.agent.monitor import Monitor
from rankscope.agent.null_monitor import NullMonitor
from rankscope.agent.probes.gradients.applied import Gradients
from tests.support.servers.collector import Collector
from tests.support.watching import fix_plan


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=generator)
    return x, torch.randint(0, 3, (8,), generator=generator)


def train(model, optimizer, steps, first=0, each=lambda step, loss: None):
    criterion = nn.CrossEntropyLoss()
    losses = []
    for step in range(first, first + steps):
        x, y = batch(step)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        each(step, loss)
    return losses


@pytest.fixture
def collector():
    with Collector() as made:
        yield made


@pytest.fixture
def attach(collector, tmp_path):
    monitors = []

    def attached(model, optimizer, **options):
        given = {"server": collector.url, "run": "run", "spool": tmp_path} | options
        monitors.append(agent.attach(model, optimizer, **given))
        return monitors[-1]

    yield attached
    for monitor in monitors:
        monitor.close()


def test_what_was_computed_is_what_arrives(collector, attach):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    losses = train(model, optimizer, 30)
    monitor.close()
    assert collector.points("loss", 0) == pytest.approx(dict(enumerate(losses)))
    assert set(collector.points("lr", 0).values()) == {0.1}
    last = collector.batches[-1]
    assert (last.state, last.through_step) == ("finished", 29)


def test_what_the_user_says_of_the_run_arrives(collector, attach):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="must be one of descent, adversarial"):
        attach(model, optimizer, config={"profile": "gan"})
    config = {"profile": "adversarial", "depth": 2, "optimizer": "mine"}
    monitor = attach(model, optimizer, config=config)
    train(model, optimizer, 2)
    monitor.close()
    [hello] = [batch.hello for batch in collector.batches if batch.hello is not None]
    assert (hello.config["profile"], hello.config["depth"]) == ("adversarial", 2)
    # What ranks are compared by, the agent alone says.
    assert hello.config["optimizer"] == "SGD"


def test_nan_arrives_as_nan(collector, attach):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)

    def poison(step, loss):
        if step == 3:
            with torch.no_grad():
                model[0].weight[0, 0] = math.nan

    train(model, optimizer, 6, each=poison)
    monitor.close()
    points = collector.points("loss", 0)
    assert [math.isnan(points[s]) for s in range(6)] == [False] * 4 + [True] * 2


def test_results_are_the_same_with_and_without(attach):
    def run(watched):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        monitor = attach(model, optimizer, overhead=1.0) if watched else None
        losses = train(model, optimizer, 60)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        if monitor:
            monitor.close()
        return losses, state, torch.get_rng_state(), np.random.get_state()[1].tolist()

    plain, watched = run(False), run(True)
    assert plain[0] == watched[0]
    assert all(torch.equal(plain[1][k], watched[1][k]) for k in plain[1])
    assert torch.equal(plain[2], watched[2])
    assert plain[3] == watched[3]


def test_models_are_copied_saved_and_pickled_as_before(collector, attach):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    before = io.BytesIO()
    torch.save(model.state_dict(), before)
    monitor = attach(model, optimizer)
    after = io.BytesIO()
    torch.save(model.state_dict(), after)
    assert after.getvalue() == before.getvalue()

    train(model, optimizer, 2)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    copied = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    copy.deepcopy(optimizer.state_dict())
    for silent in (loaded, copied, pickled):
        silent(batch(0)[0])  # counts for nobody
    train(model, optimizer, 1, first=2)
    monitor.close()
    assert sorted(collector.points("loss", 0)) == [0, 1, 2]


def test_what_is_logged_belongs_to_its_step(collector, attach):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    for step in range(5):
        x, y = batch(step)
        loss = functional.cross_entropy(model(x), y)
        monitor.log(during=step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(after=torch.tensor(float(step)), loss=100.0 + step)
    monitor.close()
    for name, offset in (("during", 0), ("after", 0), ("loss", 100)):
        assert collector.points(name, 0) == {s: float(s + offset) for s in range(5)}, name


@pytest.mark.parametrize("sampled", [True, False])
def test_what_is_computed_from_the_loss_after_a_step_belongs_to_it(collector, attach, sampled):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    if not sampled:
        fix_plan(monitor, every=1 << 10)  # between samples the model has no hook
    for step in range(5):
        x, y = batch(step)
        optimizer.zero_grad()
        output = model(x)
        loss = functional.cross_entropy(output, y)
        monitor.log(during=loss * 0 + step)
        loss.backward()
        optimizer.step()
        monitor.log(after=loss * 0 + step)
        monitor.log(twice=(loss + 1) * 0 + step, penalty=(output * 0).sum() + step)
        monitor.log(plain=float(step))
    monitor.close()
    for name in ("during", "after", "twice", "penalty", "plain"):
        assert collector.points(name, 0) == {s: float(s) for s in range(5)}, name


def test_a_resumed_trainer_goes_on_counting(collector, attach):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 7)
    monitor = attach(model, optimizer)
    train(model, optimizer, 3, first=7)
    monitor.close()
    assert sorted(collector.points("loss", 0)) == [7, 8, 9]


def test_the_step_can_be_given(collector, attach):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer, step=1000)
    train(model, optimizer, 2)
    monitor.close()
    assert sorted(collector.points("loss", 0)) == [1000, 1001]


def test_evaluation_is_reported_at_the_last_training_step(collector, attach):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    train(model, optimizer, 4)
    model.eval()
    x, y = batch(99)
    with torch.no_grad():
        expected = nn.CrossEntropyLoss()(model(x), y).item()
    model.train()
    train(model, optimizer, 1, first=4)
    monitor.close()
    assert collector.points("eval/loss", 0) == {3: pytest.approx(expected)}
    assert sorted(collector.points("loss", 0)) == [0, 1, 2, 3, 4]


def test_attach_twice_is_attach_once(attach):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert attach(model, optimizer) is attach(model, optimizer)


def test_of_several_optimizers_the_one_that_holds_most_is_watched(attach):
    model = net()
    small = torch.optim.SGD([model[0].bias], lr=0.1)
    most = torch.optim.Adam([p for p in model.parameters() if p is not model[0].bias])
    assert attach(model, [small, most]) is attach(model, most)


def test_after_close_torch_is_as_it_was_and_nothing_more_is_recorded(collector, attach):
    backward = torch.Tensor.backward
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    train(model, optimizer, 2)
    monitor.close()
    assert torch.Tensor.backward is backward
    assert not model._forward_pre_hooks
    assert not optimizers._global_optimizer_pre_hooks
    assert not optimizers._global_optimizer_post_hooks
    train(model, optimizer, 2, first=2)
    monitor.log(late=1.0)
    assert sorted(collector.points("loss", 0)) == [0, 1]


@pytest.mark.contained
def test_a_fault_in_a_probe_disables_it_and_nothing_else(collector, attach, monkeypatch):
    def broken(self, facts):
        raise ZeroDivisionError("probe is broken")

    monkeypatch.setattr(Gradients, "after_step", broken)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    losses = train(model, optimizer, 10)
    monitor.close()
    assert collector.points("loss", 0) == pytest.approx(dict(enumerate(losses)))
    faults = [e for b in collector.batches for e in b.events if e.kind == "agent.fault"]
    assert len(faults) == 1
    assert "gradients" in faults[0].text
    assert "probe is broken" in faults[0].text


@pytest.mark.contained
def test_what_cannot_be_logged_harms_nothing(collector, attach):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)

    def log(step, loss):
        monitor.log(text="no number", many=torch.ones(3))
        monitor.log(fine=step)

    train(model, optimizer, 4, each=log)
    monitor.close()
    assert sorted(collector.points("fine", 0)) == [0, 1, 2, 3]


def test_without_a_server_one_warning_and_the_training_goes_on(collector, attach, caplog):
    collector.stop()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.INFO):
        monitor = attach(model, optimizer)
        losses = train(model, optimizer, 20, each=lambda step, loss: time.sleep(0.1))
        monitor.close()
    assert len(losses) == 20
    warned = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warned) == 1, [r.getMessage() for r in warned]
    assert collector.url in warned[0].getMessage()
    assert "rankscope sync" in warned[0].getMessage()


def test_disabled_does_nothing():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = agent.attach(model, optimizer, mode="disabled")
    assert isinstance(monitor, NullMonitor)
    train(model, optimizer, 2)
    monitor.log(x=1.0)
    monitor.close()
    assert not model._forward_pre_hooks


def test_the_public_names():
    assert sorted(agent.__all__) == ["Monitor", "__version__", "attach", "start"]
    assert agent.Monitor is Monitor


@pytest.mark.parametrize(
    ("model", "optimizer", "options", "error", "words"),
    [
        (object(), None, {}, TypeError, "torch.nn.Module"),
        (nn.Linear(1, 1), object(), {}, TypeError, "param_groups"),
        (nn.Linear(1, 1), [], {}, TypeError, "param_groups"),
        (nn.Linear(1, 1), [object()], {}, TypeError, "param_groups"),
        (nn.Linear(1, 1), "sgd", {"bogus": 1}, TypeError, "bogus"),
        (nn.Linear(1, 1), "sgd", {"mode": "sometimes"}, ValueError, "sometimes"),
        (nn.Linear(1, 1), "sgd", {"step": -1}, ValueError, "step"),
        (nn.Linear(1, 1).requires_grad_(False), "sgd", {}, ValueError, "requires a gradient"),
    ],
)
def test_what_cannot_work_is_refused_at_attach(model, optimizer, options, error, words):
    if optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=words):
        agent.attach(model, optimizer, **options)


def test_a_step_that_raises_is_not_the_last_one(collector, attach):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    for step in range(6):
        x, y = batch(step)

        def closure(x=x, y=y, step=step):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            if step == 2:
                raise RuntimeError("out of memory, say")
            return loss

        if step == 2:
            with pytest.raises(RuntimeError):
                optimizer.step(closure)
        else:
            optimizer.step(closure)
    monitor.close()
    assert sorted(collector.points("loss", 0)) == [0, 1, 2, 3, 4]


def test_a_closed_monitor_keeps_nothing_alive(collector, attach, tmp_path):
    def watched():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = agent.attach(model, optimizer, server=collector.url, run="r", spool=tmp_path)
        train(model, optimizer, 2)
        monitor.close()
        return weakref.ref(model), weakref.ref(optimizer)

    references = watched()
    gc.collect()
    assert [r() for r in references] == [None, None]
