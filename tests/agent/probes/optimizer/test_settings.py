"""Settings of real optimizers."""

import math

import pytest
import torch
from torch import nn

from rankscope.agent.probes.optimizer.settings import Settings
from tests.support.probe_harness import Harness


def run(make, steps=3, between=lambda optimizer, step: None, model=None):
    model = model or nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = make(model)
    harness = Harness(model, optimizer, probes=[Settings])
    try:
        for step in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            between(optimizer, step)
    finally:
        harness.close()
    return harness


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), **({"lr": 0.1, "betas": (0.9, 0.99)} | options))


def digests(harness):
    return [s.digests["hyperparameters"] for s in harness.steps]


def test_everything_that_is_a_number_is_reported_once():
    harness = run(adam)
    reported = harness.steps[0].scalars
    assert reported["hyperparameters/0/betas.1"] == 0.99
    assert reported["hyperparameters/0/weight_decay"] == 0.01
    assert reported["hyperparameters/0/maximize"] == 0.0
    assert "hyperparameters/0/lr" not in reported
    assert not any("params" in name for name in reported)
    assert harness.steps[1].scalars == harness.steps[2].scalars == {}


def test_a_change_is_reported_with_the_step_that_first_applied_it():
    def between(optimizer, step):
        if step == 0:
            optimizer.param_groups[0]["weight_decay"] = 0.5

    harness = run(adam, between=between)
    assert harness.steps[1].scalars == {"hyperparameters/0/weight_decay": 0.5}
    assert harness.steps[2].scalars == {}
    first, second, third = digests(harness)
    assert first != second == third


def test_the_order_of_the_settings_does_not_matter():
    def turn(optimizer, step):
        group = optimizer.param_groups[0]
        for key in sorted(group):
            group[key] = group.pop(key)

    assert len({*digests(run(adam)), *digests(run(adam, between=turn))}) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", math.nextafter(0.1, 1)),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-7),
        ("amsgrad", True),
        ("foreach", False),
        ("weight_decay", math.inf),
    ],
)
def test_any_setting_counts_to_the_last_bit(key, value):
    assert digests(run(adam))[0] != digests(run(lambda m: adam(m, **{key: value})))[0]


def test_a_number_is_a_number_whatever_its_type():
    whole = digests(run(lambda m: adam(m, lr=1)))
    assert whole == digests(run(lambda m: adam(m, lr=1.0)))
    assert whole == digests(run(lambda m: adam(m, lr=torch.tensor(1.0))))


def two_groups(model):
    return torch.optim.SGD(
        [
            {"params": model[0].parameters(), "momentum": 0.9},
            {"params": model[1].parameters(), "weight_decay": 0.1},
        ],
        lr=0.1,
        momentum=0.5,
    )


def test_of_further_groups_what_differs_is_reported():
    reported = run(two_groups).steps[0].scalars
    assert reported["hyperparameters/0/momentum"] == 0.9
    assert reported["hyperparameters/1/momentum"] == 0.5
    assert reported["hyperparameters/1/weight_decay"] == 0.1
    assert "hyperparameters/1/dampening" not in reported


def test_a_group_added_later_is_another_setting():
    extra = nn.Linear(2, 2)

    def between(optimizer, step):
        if step == 0:
            optimizer.add_param_group({"params": extra.parameters(), "lr": 0.2, "momentum": 0.3})

    harness = run(two_groups, between=between)
    assert len(set(digests(harness))) == 2
    assert harness.steps[1].scalars == {"hyperparameters/2/momentum": 0.3}


def test_groups_in_another_order_are_other_settings():
    def turned(model):
        optimizer = two_groups(model)
        optimizer.param_groups.reverse()
        return optimizer

    assert digests(run(two_groups))[0] != digests(run(turned))[0]


def test_what_is_no_plain_setting_is_left_out():
    class Odd:
        pass

    def odd(model):
        optimizer = adam(model)
        optimizer.param_groups[0]["odd"] = Odd()
        return optimizer

    assert digests(run(odd)) == digests(run(adam))
