"""Lightweight samples: losses and rates are due, and nothing is due at the steps beside."""

import time
import warnings

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

from rankscope.agent.steps import cost_by_tier, forward_hook, hooks
from rankscope.agent.steps.mode import Mode
from tests.support.small_trainings import (
    CLASSES,
    FEATURES,
    Outer,
    backward,
    called,
    loss_of,
    sampled_only,
    trained,
)
from tests.support.watching import fix_plan

EVERY = 4
# So seldom is anything beyond losses and rates due that it is not, after the first step.
BEYOND = 2**10


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """Other tests of this process have compiled something; then hooks stay where they are."""
    monkeypatch.setattr(forward_hook, "frames_traced", lambda: 0)


@pytest.fixture
def attach(watching):
    def attached(model, optimizer, every=EVERY, **options):
        monitor = watching.attach(model, optimizer, **options)
        fix_plan(monitor, every, BEYOND)
        return monitor

    return attached


def sgd(model, rate=0.1):
    return torch.optim.SGD(model.parameters(), lr=rate)


def test_losses_rates_times_and_samples_are_reported(watching, attach, model):
    optimizer = sgd(model, 0.25)
    attach(model, optimizer)
    losses = trained(model, optimizer, range(30))
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY))
    # What was sampled at the first step is read once more at the second.
    steps = {0, 1, *sampled_only(losses, EVERY)}
    assert watching.points("lr") == dict.fromkeys(steps, 0.25)
    seconds, rates = watching.points("step_seconds"), watching.points("samples_per_second")
    assert seconds.keys() == rates.keys() == steps - {0}
    assert all(rates[step] * seconds[step] == pytest.approx(5.0) for step in rates)


@pytest.mark.parametrize("every", [1, EVERY])
def test_what_other_hooks_wait_for_is_no_time_for_data(watching, attach, model, every):
    # FSDP2 gathers the parameters in such a hook, and waits for the other ranks in it.
    delay = 0.1  # far more than a busy machine takes for nothing
    model.register_forward_pre_hook(lambda module, args: time.sleep(delay))
    optimizer = sgd(model)
    attach(model, optimizer, every)
    trained(model, optimizer, range(13))
    data, compute = watching.points("data_seconds"), watching.points("compute_seconds")
    assert compute.keys() == data.keys() != set()
    assert min(compute.values()) > delay
    assert min(data.values()) < delay / 2


@pytest.mark.parametrize("every", [1, 2])
def test_the_plan_of_short_intervals(watching, attach, model, every):
    optimizer = sgd(model)
    attach(model, optimizer, every=every)
    losses = trained(model, optimizer, range(20))
    assert watching.points("loss") == pytest.approx(sampled_only(losses, every))
    assert watching.points("samples_per_second").keys() >= sampled_only(losses, every).keys() - {0}


def test_starts_of_steps_are_not_reported(attach, model):
    optimizer = sgd(model)
    monitor = attach(model, optimizer)
    trained(model, optimizer, range(EVERY))
    assert monitor._machine.mode is Mode.LIGHTWEIGHT
    assert model._forward_pre_hooks
    assert monitor._watching.count is not None
    # One that an earlier test of the process has left is notified until it is collected.
    if hooks._living() == (monitor._watching,):
        assert not optimizers._global_optimizer_pre_hooks


class Closures(torch.optim.Optimizer):
    """Calls its closure several times, as sharpness-aware minimisation does."""

    def step(self, closure):
        first = closure()
        for rate in (0.5, -0.1):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p += rate * p.grad
            closure()
        return first


def trained_by_closures(model, optimizer, steps):
    losses = []
    for step in steps:

        def closure(step=step):
            model.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


# Where it takes over late, its first sampled step shows that it calls closures.
@pytest.mark.parametrize("after", [0, EVERY + 2, EVERY + 3])
def test_of_closures_the_first_pass_counts_at_every_sample(watching, attach, model, after):
    optimizer, first = Closures(model.parameters(), {}), sgd(model)
    attach(model, first if after else optimizer)
    losses = trained(model, first, range(after))
    losses += trained_by_closures(model, optimizer, range(after, 30))
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY))


def test_accumulated_losses_are_averaged(watching, attach, model):
    optimizer = sgd(model)
    attach(model, optimizer)
    means = []
    for step in range(20):
        optimizer.zero_grad()
        parts = [loss_of(model, 100 * step + part) for part in range(4)]
        for part in parts:
            (part / 4).backward()
        optimizer.step()
        means.append(sum(part.item() for part in parts) / 4)
    assert watching.points("loss") == pytest.approx(sampled_only(means, EVERY))


def test_what_is_clipped_is_reported(watching, attach, model):
    optimizer = sgd(model)
    attach(model, optimizer)
    norms = []
    for step in range(20):
        backward(model, step)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01).item())
        optimizer.step()
    assert watching.points("grad_norm_preclip") == pytest.approx(sampled_only(norms, EVERY))


@pytest.mark.parametrize("at", [EVERY - 1, EVERY, EVERY + 1, EVERY + 2])
def test_an_evaluation_beside_a_sample(watching, attach, model, at):
    optimizer = sgd(model)
    attach(model, optimizer)
    losses = trained(model, optimizer, range(at))
    model.eval()
    with torch.no_grad():
        expected = loss_of(model, 1000).item()
    model.train()
    losses += trained(model, optimizer, range(at, 20))
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY))
    assert list(watching.points("eval/loss").values()) == pytest.approx([expected])
    # The sample that ends the evaluation, or the one that it is in, has no time of a step.
    after = EVERY if at <= EVERY else 2 * EVERY
    assert after not in watching.points("step_seconds")
    assert after + EVERY in watching.points("step_seconds")


@pytest.mark.parametrize("every", [1, EVERY])
@pytest.mark.parametrize("at", [EVERY - 1, EVERY, EVERY + 1])
def test_an_evaluation_inside_a_step_belongs_to_it_until_training_goes_on(
    watching, attach, model, at, every
):
    optimizer = sgd(model)
    attach(model, optimizer, every=every)
    trained(model, optimizer, range(at))
    backward(model, at)
    model.eval()
    with torch.no_grad():
        expected = loss_of(model, 1000).item()
    model.train()
    optimizer.step()
    trained(model, optimizer, range(at + 1, 20))
    # The last step that is over where the next sampled one runs forward.
    step = next(s for s in range(at + 1, 20) if s % every == 0) - 1
    assert watching.points("eval/loss") == {step: pytest.approx(expected)}


def test_a_training_in_evaluation_mode(watching, attach, model):
    model.eval()
    optimizer = sgd(model)
    attach(model, optimizer)
    losses = trained(model, optimizer, range(20))
    # At the second step it was not known yet that no evaluation is under way.
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY) | {1: losses[1]})
    assert not watching.points("eval/loss")


def test_another_optimizer_takes_over(watching, attach, model):
    first = sgd(model)
    attach(model, first)
    losses = trained(model, first, range(EVERY))
    losses += trained(model, sgd(model, 0.5), range(EVERY, 10))
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY))
    assert watching.points("lr") == {0: 0.1, 1: 0.1, 4: 0.5, 8: 0.5}


def test_a_step_inside_a_step_is_one(watching, attach, model):
    optimizer = Outer(sgd(model))
    attach(model, optimizer)
    losses = trained(model, optimizer, range(20))
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY))


def test_a_wrapper_that_comes_late_is_known_at_the_next_sample(attach, model):
    inner = sgd(model)
    monitor = attach(model, inner)
    trained(model, inner, range(EVERY + 2))
    trained(model, Outer(inner), range(EVERY + 2, 100))
    assert 100 <= monitor._count.step <= 100 + EVERY


def test_of_two_optimizers_that_take_turns_both_are_known(attach, model):
    optimizers = sgd(model), sgd(model, 0.2)
    monitor = attach(model, optimizers[0])
    monitor._schedule.ask_dense(3)
    for step in range(20):
        trained(model, optimizers[step % 2], [step])
    assert monitor._machine.mode is Mode.LIGHTWEIGHT
    assert monitor._count.step == 20


def test_a_step_that_raises_is_none(watching, attach, model):
    optimizer = sgd(model)
    attach(model, optimizer)
    fails = []

    def hook(*given):
        if fails:
            raise ValueError(fails.pop())

    optimizer.register_step_pre_hook(hook)
    losses = []
    for step in range(20):
        if step == EVERY:
            backward(model, 1000)
            fails.append("not now")
            with pytest.raises(ValueError, match="not now"):
                optimizer.step()
        losses += trained(model, optimizer, [step])
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY))


def test_a_step_is_complete_when_nothing_can_be_logged_for_it_any_more(watching, attach, model):
    optimizer = sgd(model)
    monitor = attach(model, optimizer)
    for step in range(3 * EVERY):
        backward(model, step)
        monitor.log(inside=float(step))
        assert monitor._records._completed < step
        optimizer.step()
        assert monitor._records._completed < step
        monitor.log(after=float(step))
    # The last sample without the step after it, which is in progress no more.
    assert monitor._records._completed == 2 * EVERY
    for name in ("inside", "after"):
        assert watching.points(name) == {step: float(step) for step in range(3 * EVERY)}


def test_a_dense_sampling_request_is_granted_from_the_step_after_next(watching, attach, model):
    optimizer = sgd(model)
    monitor = attach(model, optimizer)
    trained(model, optimizer, range(EVERY))
    monitor._connection.sender._delivery.dense_until = 200
    trained(model, optimizer, range(EVERY, 300))
    expected = {*range(EVERY + 2, EVERY + 65), *range(137, 201), *range(0, 300, EVERY)}
    reported = set(watching.points("loss"))
    # What was sampled last is read once more.
    assert reported - {EVERY + 65, 201} == expected - {EVERY + 65, 201}


@pytest.mark.parametrize("wanted", [True, False])
def test_its_cost_is_noted_as_that_of_its_tier(attach, model, monkeypatch, wanted):
    optimizer = sgd(model)
    monitor = attach(model, optimizer)
    trained(model, optimizer, range(EVERY))
    noted = {}
    monkeypatch.setattr(monitor._schedule, "wants", lambda *step: wanted)
    monkeypatch.setattr(monitor._schedule, "note", lambda step, **more: noted.update({step: more}))
    trained(model, optimizer, range(EVERY, 3 * EVERY + 1))
    assert monitor._spent.total({}, 0.0) == 0.0
    assert list(noted) == ([EVERY, 2 * EVERY] if wanted else [])
    for one in noted.values():
        assert one["tiers"].keys() == {"basic"}
        assert not one["again"]
        assert one["tiers"]["basic"] > cost_by_tier._UNSEEN_BASIC
    # The note before the first one was of the second step.
    since = [one["since"] / one["step_seconds"] for one in noted.values()]
    assert since == pytest.approx([EVERY - 1, EVERY] if wanted else [])


@pytest.mark.parametrize("steps", range(EVERY, EVERY + 3))
def test_a_run_may_end_at_any_step(watching, attach, model, steps):
    optimizer = sgd(model)
    attach(model, optimizer)
    losses = trained(model, optimizer, range(steps))
    assert watching.points("loss") == pytest.approx(sampled_only(losses, EVERY))
    assert watching.batches("run")[-1].through_step == steps - 1


def test_what_needs_the_step_beside_is_not_asked_nor_are_losses_reported(attach, model):
    optimizer = sgd(model)
    attach(model, optimizer)
    trained(model, optimizer, range(EVERY))
    seen = called(lambda: trained(model, optimizer, [EVERY]))
    assert ("training", "after_step") in seen
    assert ("timing", "after_step") in seen
    assert ("sources", "after") not in seen
    for name in ("run_queue_delay", "outside_writes"):
        assert (name, "before_step") not in seen
        assert (name, "after_step") not in seen


def test_accuracies_are_reported_where_gradient_norms_are_due(watching, attach, model):
    optimizer = sgd(model)
    monitor = attach(model, optimizer, every=1)
    monitor._schedule._exponents["signals"] = 2
    monitor._schedule._masks = monitor._schedule._as_masks()
    trained(model, optimizer, range(20))
    assert watching.points("accuracy").keys() == set(range(0, 20, EVERY))
    assert watching.points("loss").keys() == set(range(20))


def test_a_pass_that_starts_from_a_tensor_of_tensors_disables_nothing(watching, attach, model):
    optimizer = sgd(model)
    monitor = attach(model, optimizer)
    trained(model, optimizer, range(EVERY))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nested tensors are a prototype
        parts = [torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)]
        nested = torch.nested.as_nested_tensor(parts)
        nested.backward(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]))
    losses = trained(model, optimizer, range(EVERY, 20))
    assert watching.points("loss").keys() >= {EVERY, 2 * EVERY}
    assert losses
    assert not monitor._guard.faults
