"""How often a schedule advances, with torch's own schedulers."""

import copy
import pickle

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from rankscope.agent.probes.optimizer.scheduler import Scheduler
from tests.support.probe_harness import Harness


class Job:
    def __init__(self):
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.before = schedules.StepLR(self.optimizer, 100)
        self.harness = Harness(self.model, self.optimizer, probes=(Scheduler,))

    def steps(self, number, *made, times=1):
        for _ in range(number):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 3)).sum().backward()
            self.optimizer.step()
            for scheduler in made:
                for _ in range(times):
                    scheduler.step()
        return [facts.scalars.get("scheduler_steps") for facts in self.harness.steps]


@pytest.fixture
def job():
    made = Job()
    yield made
    made.harness.close()


def test_a_scheduler_made_before_is_counted_when_it_advances(job):
    assert job.steps(4, job.before) == [None, 1, 2, 3]


def test_more_than_once_a_step(job):
    assert job.steps(3, job.before, times=4) == [None, 4, 8]


def test_without_one_there_is_no_number(job):
    assert job.steps(3) == [None, None, None]


class Own(schedules.StepLR):
    def step(self, epoch=None):
        super().step()


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedules.CosineAnnealingWarmRestarts(o, 5),
        lambda o: schedules.OneCycleLR(o, 0.1, total_steps=50),
        lambda o: schedules.SequentialLR(
            o, [schedules.ConstantLR(o), schedules.StepLR(o, 5)], milestones=[2]
        ),
        lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.StepLR(o, 5)]),
        lambda o: Own(o, 5),
    ],
    ids=["restarts", "one cycle", "sequence", "chained", "own"],
)
# torch's own sequence of schedules steps before the optimizer does, and is warned by torch.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_one_step_counts_once(job, make):
    reported = job.steps(5, make(job.optimizer))
    assert [b - a for a, b in zip(reported[1:], reported[2:], strict=False)] == [1, 1, 1]


def test_another_optimizers_schedule_does_not_count(job):
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = schedules.StepLR(other, 5)
    other.step()
    assert job.steps(3, scheduler) == [None, None, None]


def test_a_schedule_steps_as_it_does_without_us(job):
    inside = schedules.ExponentialLR(job.optimizer, 0.5)
    job.steps(3, inside)
    assert inside.get_last_lr() == [0.1 * 0.5**3]
    assert copy.deepcopy(inside.state_dict()) == inside.state_dict()


def test_classes_are_given_back():
    before = {kind: vars(kind).get("step") for kind in (schedules.LRScheduler, Own)}
    made = Job()
    assert hasattr(vars(schedules.LRScheduler)["step"], "__wrapped__")
    made.harness.close()
    assert {kind: vars(kind).get("step") for kind in before} == before


def test_a_class_that_is_pickled_by_value_is_left_as_it_is(job):
    # As those of a script's `__main__` are.
    class Local(schedules.StepLR):
        def step(self, epoch=None):
            super().step()

    made = Local(job.before.optimizer, 100)
    job.harness.close()
    before = cloudpickle.dumps(made)
    with_local = Job()
    try:
        assert b"rankscope" not in cloudpickle.dumps(Local)
        assert cloudpickle.dumps(made) == before
        assert pickle.loads(before).last_epoch == 0
        own = Local(with_local.optimizer, 100)
        # It is counted all the same, where it calls what it overrides; it advances when it is made.
        assert with_local.steps(3, own) == [1, 2, 3]
    finally:
        with_local.harness.close()
