"""Norm before clipping and clip coefficient, with torch's own clipping."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.nn.utils import clip_grad_norm_ as imported_before

from rankscope.agent.probes.gradients import clipping
from rankscope.agent.probes.gradients.clipping import Clipping
from tests.support.probe_harness import Harness


class Job:
    def __init__(self, probes=(Clipping,)):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.harness = Harness(self.model, self.optimizer, probes=probes)

    def backward(self, factor=1.0):
        self.optimizer.zero_grad()
        (self.model(torch.ones(2, 3)).sum() * factor).backward()
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]))

    def step(self):
        self.optimizer.step()
        return self.harness.steps[-1].scalars

    @property
    def parameters(self):
        return self.model.parameters()


@pytest.fixture
def job():
    made = Job()
    yield made
    made.harness.close()


@pytest.mark.parametrize(
    "clip",
    [
        imported_before,
        lambda p, most: torch.nn.utils.clip_grad_norm_(p, most),
        lambda p, most: clip_grad.clip_grad_norm_(list(p), max_norm=most),
    ],
    ids=["imported before", "looked up", "keyword"],
)
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_norm_and_coefficient_are_those_of_torch(job, clip, share):
    norm = job.backward()
    before = [p.grad.clone() for p in job.parameters]
    clip(job.parameters, norm * share)
    factor = float(next(job.parameters).grad.flatten()[0] / before[0].flatten()[0])
    reported = job.step()
    assert reported["grad_norm_preclip"] == pytest.approx(norm, rel=1e-6)
    assert reported["clip_coefficient"] == pytest.approx(min(share, 1.0), rel=1e-4)
    assert reported["clip_coefficient"] == pytest.approx(factor, rel=1e-5)


def test_the_two_halves_called_by_hand(job):
    norm = job.backward()
    total = torch.nn.utils.get_total_norm([p.grad for p in job.parameters])
    torch.nn.utils.clip_grads_with_norm_(job.parameters, norm / 4, total)
    reported = job.step()
    assert reported["grad_norm_preclip"] == pytest.approx(norm)
    assert reported["clip_coefficient"] == pytest.approx(0.25, rel=1e-4)
    after = torch.nn.utils.get_total_norm([p.grad for p in job.parameters])
    assert float(after) == pytest.approx(norm / 4, rel=1e-4)


def test_nothing_is_said_where_nothing_is_clipped(job):
    job.backward()
    assert job.step() == {}
    job.backward()
    imported_before(job.parameters, 1.0)
    assert job.step()
    job.backward()
    assert job.step() == {}


def test_another_norm_has_a_coefficient_alone(job):
    job.backward()
    largest = max(float(p.grad.abs().max()) for p in job.parameters)
    imported_before(job.parameters, largest / 2, norm_type=math.inf)
    reported = job.step()
    assert set(reported) == {"clip_coefficient"}
    assert reported["clip_coefficient"] == pytest.approx(0.5, rel=1e-4)


def test_gradients_that_are_not_finite(job):
    job.backward(factor=math.inf)
    imported_before(job.parameters, 1.0)
    reported = job.step()
    assert not math.isfinite(reported["grad_norm_preclip"])
    assert math.isnan(reported["clip_coefficient"]) or reported["clip_coefficient"] == 0


def test_parts_clipped_one_by_one_are_put_together(job):
    norm = job.backward()
    part = float(torch.nn.utils.get_total_norm([p.grad for p in job.model[1].parameters()]))
    imported_before(job.model[0].parameters(), 1e6)
    imported_before(job.model[1].parameters(), part / 3)
    reported = job.step()
    assert reported["grad_norm_preclip"] == pytest.approx(norm, rel=1e-5)
    assert reported["clip_coefficient"] == pytest.approx(1 / 3, rel=1e-4)


def test_of_two_calls_for_the_same_parameters_the_last_counts(job):
    norm = job.backward()
    imported_before(job.parameters, norm / 2)
    imported_before(job.parameters, norm)
    reported = job.step()
    assert reported["grad_norm_preclip"] == pytest.approx(norm / 2, rel=1e-4)


def test_each_monitor_hears_of_its_own_parameters(job):
    other = Job()
    try:
        norm = other.backward(factor=3.0)
        job.backward()
        imported_before(other.parameters, norm / 2)
        assert job.step() == {}
        assert other.step()["grad_norm_preclip"] == pytest.approx(norm)
    finally:
        other.harness.close()


def test_a_single_tensor_is_clipped_as_without(job):
    job.backward()
    bias = job.model[1].bias
    norm = float(bias.grad.norm())
    imported_before(bias, norm / 2)
    assert float(bias.grad.norm()) == pytest.approx(norm / 2, rel=1e-4)
    assert job.step()["clip_coefficient"] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.usefixtures("nobody_else_listens")
def test_torch_is_as_it_was_afterwards():
    names = ("_get_total_norm", "_clip_grads_with_norm_", "clip_grad_norm_")
    before = [getattr(clip_grad, n, None) for n in names]
    public = torch.nn.utils.clip_grads_with_norm_, torch.nn.utils.get_total_norm
    first, second = Job(), Job()
    assert clip_grad._clip_grads_with_norm_ is not before[1]
    first.harness.close()
    assert clip_grad._clip_grads_with_norm_ is not before[1]
    second.harness.close()
    assert [getattr(clip_grad, n, None) for n in names] == before
    assert (torch.nn.utils.clip_grads_with_norm_, torch.nn.utils.get_total_norm) == public


def test_another_librarys_wrapper_stays(monkeypatch):
    job = Job()
    ours = clip_grad._clip_grads_with_norm_

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    clip_grad._clip_grads_with_norm_ = theirs
    try:
        job.harness.close()
        assert clip_grad._clip_grads_with_norm_ is theirs
    finally:
        clip_grad._clip_grads_with_norm_ = ours
    again = Job()
    again.backward()
    imported_before(again.parameters, 1.0)
    assert "clip_coefficient" in again.step()
    again.harness.close()
    assert not clipping._listeners.have_replaced


def test_torch_without_the_two_halves(monkeypatch):
    """As in torch 2.4 and 2.5, where one function did it all."""
    monkeypatch.delattr(clip_grad, "_clip_grads_with_norm_")
    whole = clip_grad.clip_grad_norm_

    def old(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
        parameters = list(parameters)
        norm = clip_grad._get_total_norm([p.grad for p in parameters], norm_type)
        for parameter in parameters:
            parameter.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    monkeypatch.setattr(clip_grad, "clip_grad_norm_", old)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", old)
    job = Job()
    try:
        norm = job.backward()
        returned = torch.nn.utils.clip_grad_norm_(job.parameters, norm / 2)
        assert float(returned) == pytest.approx(norm)
        assert job.step()["grad_norm_preclip"] == pytest.approx(norm)
    finally:
        job.harness.close()
    assert torch.nn.utils.clip_grad_norm_ is old
    assert whole is not old


def test_a_compiled_function_that_clips_is_left_alone(job):
    def clip(parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, 1e-3)

    compiled = torch.compile(clip, backend="eager", fullgraph=True)
    job.backward()
    compiled(list(job.parameters))
    after = torch.nn.utils.get_total_norm([p.grad for p in job.parameters])
    assert float(after) == pytest.approx(1e-3, rel=1e-3)
    assert job.step() == {}


def test_a_sharded_norm_takes_no_collective(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        from torch.distributed.device_mesh import init_device_mesh

        from tests.support.fully_sharded import fully_shard

        model = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        harness = Harness(model, optimizer, probes=[Clipping])
        try:
            model(torch.ones(2, 3)).sum().backward()
            returned = imported_before(model.parameters(), 1e-3)
            optimizer.step()
            reported = harness.steps[-1].scalars
        finally:
            harness.close()
        if all(p.is_replicate() for p in returned.placements):
            assert reported["grad_norm_preclip"] == pytest.approx(float(returned.full_tensor()))
        else:
            assert reported == {}
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("clip_value_", ["looked up", "of its module"])
def test_of_clipped_values_the_norms_before_and_after(job, clip_value_):
    where = torch.nn.utils if clip_value_ == "looked up" else clip_grad
    norm = job.backward()
    where.clip_grad_value_(job.parameters, 0.2)
    after = float(torch.nn.utils.get_total_norm([p.grad for p in job.model.parameters()]))
    reported = job.step()
    assert 0.1 < after / norm < 0.9
    assert reported["grad_norm_preclip"] == pytest.approx(norm, rel=1e-6)
    assert reported["clip_coefficient"] == pytest.approx(after / norm, rel=1e-4)


def test_values_that_are_all_allowed_change_nothing(job):
    norm = job.backward()
    torch.nn.utils.clip_grad_value_(job.parameters, 1e6)
    reported = job.step()
    assert reported["grad_norm_preclip"] == pytest.approx(norm, rel=1e-6)
    assert reported["clip_coefficient"] == pytest.approx(1.0, rel=1e-5)


def test_clipped_values_of_another_model_are_not_its_own(job):
    job.backward()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_value_(other.parameters(), 1e-3)
    assert "clip_coefficient" not in job.step()


def test_a_gradient_of_zeros_is_not_cut(job):
    job.backward(factor=0.0)
    torch.nn.utils.clip_grad_value_(job.parameters, 0.2)
    assert job.step()["clip_coefficient"] == pytest.approx(1.0)
