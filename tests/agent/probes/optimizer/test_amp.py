"""Loss scales and skipped steps, with torch's own GradScaler."""

import functools
import gc

import pytest
import torch
from torch import nn

from rankscope.agent.probes.loss.training import Loss
from rankscope.agent.probes.optimizer.amp import Amp
from tests.support.probe_harness import Harness

SCALE = 1024.0
KINDS = {"plain": {}, "fused": {"fused": True}}


class Job:
    """Training with a GradScaler; a bad step has gradients that are not finite."""

    def __init__(self, probes=(Amp,), sampled=None, **options):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
        self.harness = Harness(self.model, self.optimizer, probes=probes, sampled=sampled)

    def step(self, bad=False, enabled=True):
        self.optimizer.zero_grad()
        x = torch.full((2, 3), float("inf") if bad else 1.0)
        self.scaler.scale(self.model(x).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def last(self):
        return {n: float(v) for n, v in self.harness.steps[-1].scalars.items()}


@pytest.fixture(params=KINDS)
def job(request):
    made = Job(**KINDS[request.param])
    made.kind = request.param
    yield made
    made.harness.close()


def test_the_scale_is_that_of_the_step(job):
    job.step()
    assert job.last == {"amp_scale": SCALE, "steps_skipped": 0, "optimizer_steps": 1}
    job.scaler.update(new_scale=8.0)
    job.step()
    assert job.last == {"amp_scale": 8.0, "steps_skipped": 0, "optimizer_steps": 2}


def test_skipped_steps_are_counted_and_halve_the_scale(job):
    for bad in (False, True, True, False):
        job.step(bad)
    assert job.last == {"amp_scale": SCALE / 4, "steps_skipped": 2, "optimizer_steps": 2}
    # Only the fused optimizer calls its hooks for a step that it skips.
    assert len(job.harness.steps) == (4 if job.kind == "fused" else 2)


def test_a_fused_optimizer_reports_at_the_skipped_step_itself():
    job = Job(fused=True)
    try:
        job.step()
        job.step(bad=True)
        assert job.last == {"amp_scale": SCALE, "steps_skipped": 1, "optimizer_steps": 1}
    finally:
        job.harness.close()


def test_without_a_scaler_only_the_steps_are_counted():
    job = Job()
    try:
        job.model(torch.ones(2, 3)).sum().backward()
        job.optimizer.step()
        assert job.last == {"optimizer_steps": 1}
    finally:
        job.harness.close()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_backward_passes_of_a_step_are_counted_without_those_of_a_skipped_one(micro_batches):
    job = Job(probes=(Loss, Amp))
    try:
        for bad in (False, True, False):
            job.optimizer.zero_grad()
            for _ in range(micro_batches):
                x = torch.full((2, 3), float("inf") if bad else 1.0)
                job.scaler.scale(job.model(x).sum() / micro_batches).backward()
            job.scaler.step(job.optimizer)
            job.scaler.update()
            assert job.last["micro_steps"] == micro_batches
        assert len(job.harness.steps) == 2
    finally:
        job.harness.close()


def test_a_disabled_scaler_is_none():
    job = Job()
    job.scaler = torch.amp.GradScaler("cpu", enabled=False)
    try:
        job.step()
        assert job.last == {"optimizer_steps": 1}
    finally:
        job.harness.close()


def test_of_two_optimizers_under_one_scaler_each_has_its_own():
    first, second = Job(), Job()
    second.scaler = first.scaler
    try:
        for bad in (False, True, False):
            for job in (first, second):
                x = torch.full((2, 3), float("inf") if bad and job is second else 1.0)
                job.optimizer.zero_grad()
                job.scaler.scale(job.model(x).sum()).backward()
            for job in (first, second):
                job.scaler.step(job.optimizer)
            first.scaler.update()
        assert first.last["steps_skipped"] == 0
        assert second.last["steps_skipped"] == 1
        assert (first.last["optimizer_steps"], second.last["optimizer_steps"]) == (3, 2)
    finally:
        first.harness.close()
        second.harness.close()


def test_steps_skipped_between_two_sampled_ones_are_counted():
    job = Job(sampled=lambda step: step % 4 == 0)
    try:
        for bad in (False, True, False, True, False, False, False):
            job.step(bad)
        posted = {s.step: s.scalars for s in job.harness.steps if s.scalars}
        assert list(posted) == [0, 4]
        assert posted[4]["steps_skipped"] == 2
    finally:
        job.harness.close()


@pytest.mark.usefixtures("nobody_else_listens")
def test_the_scaler_is_given_back():
    before = torch.amp.GradScaler.step
    first, second = Job(), Job()
    assert torch.amp.GradScaler.step is not before
    first.harness.close()
    assert torch.amp.GradScaler.step is not before
    second.harness.close()
    assert torch.amp.GradScaler.step is before


@pytest.mark.usefixtures("nobody_else_listens")
def test_another_librarys_wrapper_stays():
    before = torch.amp.GradScaler.step
    calls = []
    job = Job()
    ours = torch.amp.GradScaler.step

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        calls.append(1)
        return ours(self, *args, **kwargs)

    torch.amp.GradScaler.step = theirs
    try:
        job.harness.close()
        assert torch.amp.GradScaler.step is theirs
        again = Job()
        again.step(bad=True)
        again.step()
        assert again.last["steps_skipped"] == 1
        again.harness.close()
        assert len(calls) == 2
    finally:
        # As if they took theirs back.
        torch.amp.GradScaler.step = ours
    last = Job()
    last.harness.close()
    assert torch.amp.GradScaler.step is before


@pytest.mark.usefixtures("nobody_else_listens")
def test_a_monitor_that_is_gone_keeps_nothing():
    before = torch.amp.GradScaler.step
    job = Job()
    job.harness.handle.remove()
    del job
    gc.collect()
    assert torch.amp.GradScaler.step is before


def test_steps_that_are_all_skipped_are_reported_at_once():
    job = Job()
    for bad in (False, *[True] * 40, False, *[True] * 15):
        job.step(bad)
    # They have no number, and nothing is posted of them: two steps are all that the records show.
    assert len(job.harness.steps) == 2
    reported = [(step, kind, data) for step, kind, _, data in job.harness.events]
    assert reported == [(1, "amp.skipping", {"skipped": 16}), (1, "amp.skipping", {"skipped": 32})]
    job.harness.close()
