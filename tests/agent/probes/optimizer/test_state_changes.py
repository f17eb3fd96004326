"""The optimizer's state is not what its last step left."""

import copy

import pytest
import torch
from torch import nn

from rankscope.agent.probes.optimizer.state_changes import EVENT, StateChanges
from tests.support.probe_harness import Harness

AT = 12


def made(kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return Harness(model, kind(model.parameters(), lr=0.01, **options), probes=[StateChanges])


def train(job, steps, before=lambda job: None):
    for _ in range(steps):
        if job.facts.step == AT:
            before(job)
        job.optimizer.zero_grad()
        job.context.model(torch.ones(4, 3)).sum().backward()
        job.optimizer.step()
    job.close()
    return [(step, data) for step, kind, _, data in job.events if kind == EVENT]


def clear(job):
    job.optimizer.state.clear()


def zero(job):
    for own in job.optimizer.state.values():
        own["exp_avg"].zero_()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {})],
)
def test_steps_alone_are_no_event(kind, options):
    assert train(made(kind, **options), 20) == []


def test_a_state_that_is_gone():
    [(step, data)] = train(made(), 20, clear)
    assert step == AT
    assert data == {"how": "reset", "seen": AT - 1, "before": AT, "after": 0}


def test_one_without_a_counter():
    [(step, data)] = train(made(torch.optim.SGD, momentum=0.9), 20, clear)
    assert (step, data) == (AT, {"how": "reset", "seen": AT - 1})


def test_an_older_one():
    job = made()
    saved = {}

    def load(job):
        job.optimizer.load_state_dict(saved["state"])

    for _ in range(5):
        job.optimizer.zero_grad()
        job.context.model(torch.ones(4, 3)).sum().backward()
        job.optimizer.step()
    saved["state"] = copy.deepcopy(job.optimizer.state_dict())
    [(step, data)] = train(job, 15, load)
    assert (step, data["how"], data["before"], data["after"]) == (AT, "set back", AT, 5)


def test_the_same_one_loaded_again_is_no_event():
    def again(job):
        job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))

    assert train(made(), 20, again) == []


def test_what_is_written_in_place():
    [(step, data)] = train(made(), 20, zero)
    assert (step, data["how"]) == (AT, "written in place")


@pytest.mark.parametrize(("every", "told"), [(1, 2), (2, 2), (20, 3)])
def test_what_is_cleared_again_and_again_is_told_twice(every, told):
    job = made()
    for step in range(70):
        if step >= AT and (step - AT) % every == 0:
            job.optimizer.state.clear()
        job.optimizer.zero_grad()
        job.context.model(torch.ones(4, 3)).sum().backward()
        job.optimizer.step()
    job.close()
    data = [data for _, kind, _, data in job.events if kind == EVENT]
    assert [one.get("again") for one in data] == ([None, 8] if every < 20 else [None] * told)


def test_moments_that_are_averaged_again_and_again_are_no_habit():
    job = made()
    for step in range(70):
        if step >= AT and step % 4 == 0:
            zero(job)
        job.optimizer.zero_grad()
        job.context.model(torch.ones(4, 3)).sum().backward()
        job.optimizer.step()
    job.close()
    data = [data for _, kind, _, data in job.events if kind == EVENT]
    assert [(one["how"], one.get("again")) for one in data] == [("written in place", None)]


def test_what_is_cleared_before_each_step_is_the_trainers_way():
    job = made()
    for _ in range(30):
        job.optimizer.state.clear()
        job.optimizer.zero_grad()
        job.context.model(torch.ones(4, 3)).sum().backward()
        job.optimizer.step()
    job.close()
    assert not [kind for _, kind, _, _ in job.events if kind == EVENT]


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        (torch.optim.AdamW, {}, True),
        (torch.optim.SGD, {"momentum": 0.9}, True),
        # It has nothing to lose.
        (torch.optim.SGD, {}, False),
    ],
)
def test_an_optimizer_that_is_built_anew_for_each_step(watching, kind, options, told):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    watching.attach(model, optimizer)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        optimizer = kind(model.parameters(), lr=0.01, **options)
    text = "another optimizer without a state has stepped at each step since step 1"
    assert watching.events(EVENT) == ([(8, text)] if told else [])


def test_two_optimizers_that_take_turns_are_not_new_each_time(watching):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    both = [torch.optim.AdamW(model.parameters(), lr=rate) for rate in (0.01, 0.02)]
    watching.attach(model, both[0])
    for step in range(40):
        both[step % 2].zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        both[step % 2].step()
    assert not watching.events(EVENT)
