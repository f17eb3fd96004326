"""What a step did to each tensor, against copies of the model."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.agent.probes.gradients.applied import Gradients
from rankscope.agent.probes.modules.layers import LayerNorms
from rankscope.agent.probes.norms import length_of, norms_of
from rankscope.agent.probes.parameters.trained import Parameters
from tests.support.probe_harness import Harness

PROBES = (Gradients, Parameters, LayerNorms)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 256), nn.Tanh(), nn.Linear(256, 8))


def train(model, harness, seed=0):
    harness.optimizer.zero_grad()
    x = torch.randn(16, 300, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    harness.optimizer.step()
    return before


def layers(facts):
    return {made.metric: made for made in facts.layers}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_norms_and_ratios_are_those_of_the_step(kind):
    model = model_of()
    harness = Harness(model, kind(model.parameters(), lr=1e-3), probes=PROBES)
    for seed in range(3):
        before = train(model, harness, seed)
        facts, now = harness.steps[-1], list(model.parameters())
        made = layers(facts)
        assert {m.table for m in made.values()} == {"parameters"}
        gradients = [float(p.grad.norm()) for p in now]
        weights = [float(p.detach().norm()) for p in now]
        moved = [float((p.detach() - b).norm()) for p, b in zip(now, before, strict=True)]
        assert made["grad_norm"].values == pytest.approx(gradients, rel=1e-5)
        assert made["weight_norm"].values == pytest.approx(weights, rel=1e-5)
        ratios = [m / w for m, w in zip(moved, weights, strict=True)]
        # The first tensor is large: its update is estimated.
        assert made["update_ratio"].values[1:] == pytest.approx(ratios[1:], rel=1e-5)
        assert made["update_ratio"].values[0] == pytest.approx(ratios[0], rel=0.36)
        assert facts.scalars["weight_norm"] == pytest.approx(math.hypot(*weights), rel=1e-5)
        assert facts.scalars["update_norm"] == pytest.approx(math.hypot(*moved), rel=0.36)
        assert facts.scalars["update_ratio"] == pytest.approx(
            facts.scalars["update_norm"] / math.hypot(*weights), rel=1e-5
        )
        assert facts.scalars["tensors_unchanged"] == 0
    harness.close()


def test_tensors_that_a_step_leaves_alone_are_counted():
    model = model_of()
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.0},
            {"params": [model[2].weight], "lr": 1e-3},
            {"params": [model[2].bias], "lr": 1e-3},
        ]
    )
    harness = Harness(model, optimizer, probes=PROBES)
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    # The last bias gets a gradient of zeros: nothing it should do.
    (model[2].weight @ model[0](x).t()).sum().backward()
    model[2].bias.grad = torch.zeros(8)
    optimizer.step()
    assert harness.steps[0].scalars["tensors_unchanged"] == 2
    ratios = layers(harness.steps[0])["update_ratio"].values
    assert ratios[0] == 0
    assert ratios[1] == 0
    assert ratios[2] > 0
    harness.close()


def test_zeros_that_stay_have_no_ratio_and_missing_gradients_no_norm():
    model = model_of()
    nn.init.zeros_(model[2].bias)
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=PROBES)
    model[0](torch.ones(1, 300)).sum().backward()
    harness.optimizer.step()
    made = layers(harness.steps[0])
    assert math.isnan(made["update_ratio"].values[3])
    assert [math.isnan(v) for v in made["grad_norm"].values] == [False, False, True, True]
    harness.close()


def test_beyond_sixteen_mebibytes_updates_are_estimated():
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(60_000) for _ in range(75))
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=PROBES)
    sum((p * p).sum() for p in model).backward()
    before = [p.detach().clone() for p in model]
    harness.optimizer.step()
    ratios = layers(harness.steps[0])["update_ratio"].values
    exact = [
        float((p.detach() - b).norm() / p.detach().norm())
        for p, b in zip(model, before, strict=True)
    ]
    copied = (1 << 22) // 60_000
    assert copied < 75
    assert ratios[:copied] == pytest.approx(exact[:copied], rel=1e-5)
    assert ratios[copied:] == pytest.approx(exact[copied:], rel=0.36)
    assert ratios[copied:] != pytest.approx(exact[copied:], rel=1e-5)
    harness.close()


def test_one_unit_in_the_last_place_of_a_large_tensor_is_an_update():
    model = model_of()

    class Nudging(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            weight = model[0].weight
            weight.view(-1)[1234] = torch.nextafter(weight.view(-1)[1234], torch.tensor(9.0))

    harness = Harness(model, Nudging(model.parameters(), lr=0.0), probes=PROBES)
    before = train(model, harness)
    moved = float((model[0].weight.detach().double() - before[0].double()).norm())
    assert moved > 0
    assert harness.steps[0].scalars["update_norm"] == pytest.approx(moved, rel=1e-6)
    assert harness.steps[0].scalars["tensors_unchanged"] == 3
    harness.close()


def test_tensors_without_a_gradient_are_counted_at_every_step_with_norms():
    model = model_of()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=PROBES)
    train(model, harness)
    assert harness.value("tensors_without_gradient") == 0
    # A gradient of zeros, one that is missing, one that is not finite.
    model.zero_grad()
    (model[0](torch.ones(1, 300)).sum() + 0 * model[2].weight.sum()).backward()
    model[0].bias.grad[0] = math.nan
    harness.optimizer.step()
    assert harness.value("tensors_without_gradient") == 2
    harness.close()


def test_counting_goes_on_between_the_samples_of_single_tensors():
    model = model_of()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=PROBES)
    # Signals at every step, everything at the first.
    harness.context.schedule.plan = lambda step: (True, True, False, False, False)
    for _ in range(3):
        train(model, harness)
    assert [len(facts.layers) for facts in harness.steps][1:] == [0, 0]
    assert [float(f.scalars["tensors_without_gradient"]) for f in harness.steps] == [0, 0, 0]
    harness.close()


def test_what_is_written_between_two_steps_is_no_part_of_the_second():
    """Weights that are clamped after each step, as those of a critic are."""
    model = model_of()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=1e-3), probes=PROBES)
    for seed in range(3):
        before = train(model, harness, seed)
        now = list(model.parameters())
        moved = [float((p.detach() - b).norm()) for p, b in zip(now, before, strict=True)]
        assert harness.steps[-1].scalars["update_norm"] == pytest.approx(
            math.hypot(*moved), rel=0.36
        )
        with torch.no_grad():
            for parameter in now:
                parameter.mul_(0.5)
    assert [f.digests["outside_optimizer"] != 0 for f in harness.steps] == [False, True, True]
    harness.close()


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 5e16, 3e17, 1e20, math.inf, math.nan])
@pytest.mark.parametrize("tier", ["full", "signals"])
def test_the_norm_is_the_one_that_torch_clips_by(size, tier):
    """Also where its squares are too large for float32 (the clipped gradient is zeros then)."""
    model = model_of()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.0), probes=PROBES)
    full = tier == "full"
    harness.context.schedule.plan = lambda step: (True, True, full, full, full)
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        for parameter in list(model.parameters())[:3]:
            parameter.grad = size * torch.randn(parameter.shape, generator=generator)
        harness.optimizer.step()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in list(model.parameters())[:3]]))
    assert math.isfinite(expected) == (size < 1e17)
    if size == 1e-30:
        # Squares that are too small for float32, which torch takes for zero.
        assert expected == 0
        expected = size * math.sqrt(300 * 256 + 256 + 256 * 8)
    assert harness.value("grad_norm") == pytest.approx(expected, rel=1e-2, abs=0, nan_ok=True)
    assert harness.value("tensors_without_gradient") == 1
    if full:
        norms = layers(harness.steps[-1])["grad_norm"].values
        assert math.hypot(*norms[:3]) == pytest.approx(expected, rel=1e-2, abs=0, nan_ok=True)
        assert (norms[:3] != 0).all()
    harness.close()


def test_norms_overflow_in_sum_where_float32_does():
    assert length_of(np.array([2e38, 2e38])) == math.inf
    assert length_of(np.array([1.7e38, 1.7e38])) == pytest.approx(3.4e38**0.5)
    assert math.isnan(length_of(np.array([1.0, math.nan])))
    assert norms_of(np.array([3.5e38, 3.3e38, 0.0, 1e-60])).tolist() == pytest.approx(
        [math.inf, 3.3e38**0.5, 0.0, 1e-30], rel=1e-6, abs=0
    )


def test_a_gradient_that_is_kept_negated_is_read_as_what_it_stands_for():
    model = model_of()
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.0), probes=PROBES)
    digests = []
    for negated in (False, True):
        for parameter in model.parameters():
            gradient = torch.ones_like(parameter)
            parameter.grad = torch._neg_view(-gradient) if negated else gradient
        harness.optimizer.step()
        (fingerprints,) = (
            p for p in harness.steps[-1].fingerprints if p.stage == "reduced_gradient"
        )
        digests.append(fingerprints.digests.tolist())
    assert model[0].weight.grad.is_neg()
    assert digests[0] == digests[1]
    count = sum(p.numel() for p in model.parameters())
    assert harness.value("grad_norm") == pytest.approx(math.sqrt(count), rel=1e-6)
    harness.close()


def test_norms_of_large_tensors_are_right():
    """Added up in float32, the norm of four million numbers is wrong by 1e-4."""
    model = nn.Linear(2048, 2048, bias=False)
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.0), probes=PROBES)
    # Everything at the first step, norms of gradients alone from the third on.
    harness.context.schedule.plan = lambda step: (True, True, False, False, False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        model.weight.grad = torch.randn(2048, 2048, generator=generator)
        harness.optimizer.step()
        expected = float(model.weight.grad.double().norm())
        assert harness.value("grad_norm") == pytest.approx(expected, rel=1e-6)
    weight = float(model.weight.detach().double().norm())
    assert layers(harness.steps[0])["weight_norm"].values == pytest.approx([weight], rel=1e-6)
    harness.close()
