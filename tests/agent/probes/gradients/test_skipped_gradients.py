"""Passes with which no optimizer steps: what this rank's own gradients were."""

import pytest
import torch
from torch import nn

from rankscope.agent.probes.gradients.canary import Canary
from rankscope.agent.probes.gradients.clipping import Clipping
from rankscope.agent.probes.gradients.local import SKIPPED, LocalGradients
from rankscope.agent.probes.optimizer.amp import Amp
from rankscope.agent.tripwires import SAMPLES
from tests.support.probe_harness import Harness

PROBES = (Amp, Clipping, Canary, LocalGradients)


class Training:
    """A model whose gradients of chosen tensors can be made NaN, at chosen passes."""

    def __init__(self, *, sampled=lambda step: True, reduced=False):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 300), nn.Linear(300, 2))
        self.bad = set()
        for name, parameter in self.model.named_parameters():
            parameter.register_hook(self.spoils(name))
        if reduced:
            # As another rank's would be after the reduction.
            for parameter in self.model.parameters():
                parameter.register_post_accumulate_grad_hook(self.reduces)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.job = Harness(self.model, self.optimizer, probes=PROBES, sampled=sampled)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def spoils(self, name):
        def hook(gradient):
            return torch.full_like(gradient, torch.nan) if name in self.bad else gradient

        return hook

    def reduces(self, parameter):
        if self.bad == {"elsewhere"}:
            parameter.grad.fill_(torch.nan)

    def backward(self, *bad):
        self.bad = {*bad}
        self.optimizer.zero_grad()
        return self.model(torch.ones(4, 3)).sum()

    def scaled(self, *bad):
        self.scaler.scale(self.backward(*bad)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def guarded(self, *bad, most=1.0):
        self.backward(*bad).backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(self.model.parameters(), most)):
            self.optimizer.step()

    def reported(self):
        return [
            (step, data.get("tensors"), data["count"])
            for step, kind, _, data in self.job.events
            if kind == SKIPPED
        ]


@pytest.fixture(params=["scaled", "guarded"])
def loop(request):
    return request.param


def close(training):
    training.job.close()
    return training.reported()


def test_the_tensors_are_named_in_the_order_of_the_pass(loop):
    training = Training()
    step = getattr(training, loop)
    for bad in ((), (), ("0.weight", "3.weight"), (), ()):
        step(*bad)
    assert close(training) == [(2, ["3.weight", "0.weight"], 2)]
    assert len(training.job.steps) == 4


def test_large_ones_are_known_by_their_sketch(loop):
    training = Training()
    training.job.probes[-1]._small.clear()
    step = getattr(training, loop)
    for bad in ((), ("2.weight",), ()):
        step(*bad)
    assert [names for _, names, _ in close(training)] == [["2.weight"]]


def test_where_only_the_reduction_is_not_finite_the_rank_says_so(loop):
    training = Training(reduced=True)
    step = getattr(training, loop)
    for bad in ((), ("elsewhere",), ()):
        step(*bad)
    assert close(training) == [(1, [], 0)]


def test_what_is_given_up_has_no_part_in_the_steps_own_gradient(loop):
    training = Training()
    step = getattr(training, loop)
    for bad in ((), ("3.weight",), ()):
        step(*bad)
    close(training)
    assert torch.isfinite(torch.tensor(training.job.value("grad_norm_local", 1)))


def test_a_skip_at_a_step_that_is_not_sampled_has_the_next_ones_sampled(loop):
    training = Training(sampled=lambda step: step < 2)
    step = getattr(training, loop)
    for bad in ((), (), (), (), ("3.weight",), ("3.bias",), ()):
        step(*bad)
    reported = close(training)
    # What the first pass gave was not looked at; hooks were on for the one after it.
    assert reported == [(4, ["3.bias"], 1)]
    assert training.job.context.schedule._requests[-1] == (0, 4 + SAMPLES)


def test_passes_that_are_given_up_and_finite_are_no_event():
    training = Training()
    for _ in range(4):
        training.backward().backward()
        training.backward().backward()
        training.optimizer.step()
    assert close(training) == []


def test_of_endless_skips_only_some_are_reported():
    training = Training()
    for _ in range(200):
        training.scaled("3.weight")
    assert 64 <= len(close(training)) < 70


def test_a_loss_scaler_is_told_from_the_first_skipped_step_on(loop):
    """No scale is posted before a step that is not skipped."""
    training = Training()
    for _ in range(3):
        getattr(training, loop)("3.weight")
    close(training)
    told = [
        data.get("scaler", False) for _, kind, _, data in training.job.events if kind == SKIPPED
    ]
    assert told
    assert set(told) == {loop == "scaled"}
