"""Steps at which nothing is due: nearly nothing is done, and the steps are counted all the same."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import optimizer as optimizers

from rankscope.agent import monitor as monitors
from rankscope.agent.steps import forward_hook, hooks
from rankscope.agent.steps.torch_monitor import TorchMonitor
from tests.support.small_trainings import (
    CLASSES,
    FEATURES,
    Outer,
    backward,
    called,
    sampled_only,
    trained,
)
from tests.support.watching import fix_plan

EVERY = 16


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


@pytest.fixture
def attach(watching):
    """Attaches a monitor for which something is due at every 16th step only."""

    def attached(model, optimizer, every=EVERY, **options):
        monitor = watching.attach(model, optimizer, **options)
        fix_plan(monitor, every)
        return monitor

    return attached


def test_a_dense_sampling_request_is_granted_at_once_and_at_its_end(watching, attach, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    monitor._connection.sender._delivery.dense_until = 200
    trained(model, optimizer, range(300))
    expected = {*range(0, 300, EVERY), *range(65), *range(137, 201)}
    assert set(watching.points("loss")) == expected
    assert set(watching.digests("parameters")) >= set(range(137, 201))


def test_the_losses_stand_at_their_steps(watching, attach, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)
    losses = trained(model, optimizer, range(50))
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY))


def test_starts_of_steps_are_not_reported(attach, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    assert optimizers._global_optimizer_pre_hooks
    trained(model, optimizer, range(5))
    assert not optimizers._global_optimizer_pre_hooks
    trained(model, optimizer, range(5, EVERY))
    assert optimizers._global_optimizer_pre_hooks
    monitor.close()
    assert not optimizers._global_optimizer_pre_hooks


def test_steps_are_counted_without_a_call_of_the_monitor(attach, model, monkeypatch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    reported, ended = [], TorchMonitor.step_ended

    def step_ended(self, optimizer):
        reported.append(self._count.step)
        ended(self, optimizer)

    monkeypatch.setattr(TorchMonitor, "step_ended", step_ended)
    trained(model, optimizer, range(40))
    assert monitor._count.step == monitor._context.step == 40
    # What is sampled is read once more, and before a sample something is to be prepared.
    assert reported == [0, 1, 15, 16, 17, 31, 32, 33]
    assert hooks._sole_count is monitor._count
    monitor.close()
    assert hooks._sole_count is None


AFTER_LOSS = ("sources", "after")


def test_losses_of_a_training_are_not_reported_between_samples(attach, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)
    assert AFTER_LOSS in called(lambda: backward(model, 0))
    trained(model, optimizer, range(5))
    assert AFTER_LOSS not in called(lambda: backward(model, 5))
    model.eval()
    assert AFTER_LOSS in called(lambda: backward(model, 5))
    model.train()
    trained(model, optimizer, range(5, EVERY))
    assert AFTER_LOSS in called(lambda: backward(model, EVERY))


def test_of_two_models_losses_are_reported_always(attach, model):
    other = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, run="one")
    second = attach(other, torch.optim.SGD(other.parameters(), lr=0.1), run="two")
    trained(model, optimizer, range(5))
    assert AFTER_LOSS in called(lambda: backward(model, 5))
    second.close()
    assert AFTER_LOSS not in called(lambda: backward(model, 5))


@pytest.fixture
def nothing_compiled(monkeypatch):
    """Other tests of this process have compiled something; then hooks stay where they are."""
    monkeypatch.setattr(forward_hook, "frames_traced", lambda: 0)


def test_the_hook_of_the_model_is_the_same_at_every_sample(attach, model, nothing_compiled):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)
    first = list(model._forward_pre_hooks.items())
    assert len(first) == 1
    for sample in range(1, 4):
        trained(model, optimizer, range(EVERY * (sample - 1), EVERY * (sample - 1) + 5))
        assert not model._forward_pre_hooks
        assert not model._forward_pre_hooks_with_kwargs
        trained(model, optimizer, range(EVERY * (sample - 1) + 5, EVERY * sample))
        assert list(model._forward_pre_hooks.items()) == first


@pytest.mark.parametrize(
    "tables",
    [
        ("_forward_pre_hooks",),
        ("_forward_pre_hooks_with_kwargs",),
        ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    ],
)
def test_a_model_whose_hooks_were_thrown_away_is_hooked_again(
    watching, attach, model, nothing_compiled, tables
):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)
    trained(model, optimizer, range(5))
    for name in tables:
        setattr(model, name, OrderedDict())
    trained(model, optimizer, range(5, EVERY))
    assert len(model._forward_pre_hooks) == len(model._forward_pre_hooks_with_kwargs) == 1
    trained(model, optimizer, range(EVERY, EVERY + 5))
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs
    assert EVERY in watching.points("samples_per_second")


def test_the_hook_can_be_taken_off_by_another_one_before_it(attach, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    closing = []
    model.register_forward_pre_hook(lambda *given: closing.pop().close() if closing else None)
    closing.append(attach(model, optimizer))
    trained(model, optimizer, range(2))
    assert not closing
    assert len(model._forward_pre_hooks) == 1


class OwnHandles(nn.Linear):
    """Keeps account of its hooks in its own way."""

    def register_forward_pre_hook(self, hook, **options):
        super().register_forward_pre_hook(hook, **options)


def test_a_model_that_gives_no_handle_of_torchs_is_watched_all_the_same(watching, attach):
    model = OwnHandles(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)
    losses = trained(model, optimizer, range(50))
    assert len(model._forward_pre_hooks) == 1
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY))


def test_what_the_agent_costs_is_reported_at_intervals(watching, attach, model, monkeypatch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    now = [1000.0]
    monkeypatch.setattr(monitors, "time", SimpleNamespace(monotonic=lambda: now[0]))
    attach(model, optimizer)
    trained(model, optimizer, range(400))
    now[0] += 11.0
    trained(model, optimizer, range(400, 800))
    # As soon as the plan is another one; else after 256 steps and 10 s.
    assert sorted(watching.points("rankscope/overhead")) == [32, 400]


@pytest.mark.parametrize("steps", [20, 32, 33])
def test_what_the_agent_costs_is_reported_at_the_end_of_a_short_run(watching, model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watching.attach(model, optimizer)
    trained(model, optimizer, range(steps))
    share, exponents = monitor._schedule.share(), monitor._schedule.exponents
    monitor.close()
    assert share > 0
    reported = watching.points("rankscope/overhead")
    # At the end of step 32 it has just been reported.
    assert list(reported) == [steps - 1]
    assert reported[steps - 1] == share
    assert watching.points("rankscope/interval/word") == {steps - 1: 2 ** exponents["word"]}


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_a_run_without_a_plan_reports_no_cost(watching, model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watching.attach(model, optimizer)
    trained(model, optimizer, range(steps))
    monitor.close()
    assert watching.points("rankscope/overhead") == {}
    assert not any(batch.dropped for batch in watching.batches("run"))


@pytest.mark.parametrize("signals", [-1, EVERY - 1])
def test_the_processor_is_read_only_where_a_step_beside_is_sampled(attach, model, signals):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    # Losses and rates only, or gradient norms as well.
    monitor._schedule._masks = (EVERY - 1, signals, *(-1 for _ in range(3)))
    trained(model, optimizer, range(EVERY))
    asked = {}
    for step in range(EVERY, 3 * EVERY + 3):
        if step == 3 * EVERY - 4:  # from the next sample on every step is sampled
            monitor._schedule._exponents["basic"] = 0
            monitor._schedule._masks = (0, *(-1 for _ in range(4)))
        calls = called(lambda step=step: trained(model, optimizer, [step]))
        if ("training", "after_step") in calls:
            asked[step] = ("processor_time", "read") in calls
    assert asked == {16: False, 32: False, 48: True, 49: True, 50: True}


def test_of_two_monitors_none_is_counted_for_the_other(attach, model):
    other = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = attach(model, optimizer, run="one")
    second = attach(other, torch.optim.SGD(other.parameters(), lr=0.1), run="two")
    trained(model, optimizer, range(10))
    assert hooks._sole_count is None
    assert (first._count.step, second._count.step) == (10, 0)
    second.close()
    trained(model, optimizer, range(10, 15))
    assert hooks._sole_count is first._count
    assert (first._count.step, second._count.step) == (15, 0)


def test_what_is_logged_between_samples_belongs_to_its_step(watching, attach, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    trained(model, optimizer, range(5))
    backward(model, 5)
    monitor.log(inside=1.0)
    optimizer.step()
    monitor.log(after=2.0)
    trained(model, optimizer, range(6, 20))
    monitor.log(after=3.0)
    backward(model, 20)
    monitor.log(inside=4.0)
    optimizer.step()
    assert watching.points("inside") == {5: 1.0, 20: 4.0}
    assert watching.points("after") == {5: 2.0, 19: 3.0}


def test_a_step_inside_a_step_is_one(watching, attach, model):
    optimizer = Outer(torch.optim.SGD(model.parameters(), lr=0.1))
    attach(model, optimizer)
    losses = trained(model, optimizer, range(50))
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY))


def test_the_optimizer_inside_a_wrapper_that_has_no_hooks(watching, attach, model):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    class Wrapper:
        param_groups = inner.param_groups
        step = staticmethod(inner.step)

    optimizer = Wrapper()
    attach(model, optimizer)
    losses = trained(model, optimizer, range(50))
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY))


def test_another_optimizer_takes_over_in_between(watching, attach, model):
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, first)
    losses = trained(model, first, range(5))
    losses += trained(model, torch.optim.Adam(model.parameters()), range(5, 50))
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY))


def test_two_models_that_are_sampled_at_different_steps(watching, attach, model):
    other = nn.Linear(FEATURES, CLASSES)
    optimizers = {m: torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)}
    attach(model, optimizers[model], run="one")
    attach(other, optimizers[other], run="two", every=1)
    losses = {model: [], other: []}
    for step in range(50):
        for m, optimizer in optimizers.items():
            losses[m] += trained(m, optimizer, [step])
    # What is seen for the other one's sake may be reported as well.
    reported = watching.points("loss", run="one")
    assert reported.keys() >= sampled_only(losses[model], EVERY).keys()
    assert reported == pytest.approx({step: losses[model][step] for step in reported})
    assert watching.points("loss", run="two") == pytest.approx(dict(enumerate(losses[other])))


def test_an_evaluation_in_between(watching, attach, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)
    trained(model, optimizer, range(6))
    model.eval()
    x, y = torch.ones(5, FEATURES), torch.zeros(5, dtype=torch.long)
    with torch.no_grad():
        expected = functional.cross_entropy(model(x), y).item()
    model.train()
    trained(model, optimizer, range(6, 40))
    assert list(watching.points("eval/loss").values()) == pytest.approx([expected])


def test_the_step_after_a_sample_costs_what_the_sample_costs(attach, model, monkeypatch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    trained(model, optimizer, range(EVERY))
    noted = {}
    note = monitor._schedule.note

    def heard(step, *, tiers, again, **more):
        noted[step] = set(tiers), set(again)
        note(step, tiers=tiers, again=again, **more)

    monkeypatch.setattr(monitor._schedule, "note", heard)
    trained(model, optimizer, range(EVERY, 2 * EVERY))
    assert list(noted) == [EVERY, EVERY + 1]
    assert noted[EVERY] == ({"basic", "signals", "word", "full", "state"}, set())
    tiers, again = noted[EVERY + 1]
    assert again == tiers
    assert {"basic", "word"} <= tiers


def test_what_is_due_at_the_step_after_a_sample_costs_what_it_costs(attach, model, monkeypatch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = attach(model, optimizer)._schedule
    schedule._exponents["basic"] = 0
    schedule._masks = schedule._as_masks()
    trained(model, optimizer, range(EVERY))
    noted = {}
    monkeypatch.setattr(schedule, "wants", lambda *step: True)
    monkeypatch.setattr(schedule, "note", lambda step, **more: noted.update({step: more}))
    trained(model, optimizer, range(EVERY, EVERY + 3))
    assert list(noted) == [EVERY, EVERY + 1, EVERY + 2]
    assert noted[EVERY]["again"] == noted[EVERY + 2]["again"] == []
    assert "word" in noted[EVERY + 1]["again"]
    assert "basic" in noted[EVERY + 1]["tiers"]
    assert "basic" not in noted[EVERY + 1]["again"]


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("beyond", [EVERY, 2**10])
def test_a_step_that_calls_the_hooked_step_of_its_base_is_one(watching, model, levels, beyond):
    torch.optim.SGD(model.parameters(), lr=0.1)  # from now on the steps of its class are hooked

    class Derived(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    class Further(Derived):
        def step(self, closure=None):
            return super().step(closure)

    Derived(model.parameters(), lr=0.1)
    optimizer = (Derived, Further)[levels - 1](model.parameters(), lr=0.1)
    monitor = watching.attach(model, optimizer)
    monitor._schedule._requests, monitor._schedule._requested_until = [], -1
    losses = trained(model, optimizer, range(EVERY))
    fix_plan(monitor, EVERY, beyond)
    losses += trained(model, optimizer, range(EVERY, 100))
    assert monitor._count.step == 100
    points = watching.points("loss")
    assert points.keys() >= sampled_only(losses, EVERY).keys()
    assert points == pytest.approx({step: losses[step] for step in points})
