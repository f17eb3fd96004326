"""The share of the deviance that answers explain, against closed forms and a real training."""

import math

import pytest
import torch
from torch.nn import functional

from rankscope.agent.probes.loss.deviance import Deviance
from tests.support.losses import batch, net


def over(function, batches, **options):
    """The share at the last of some batches of (scores, target)."""
    deviance, share = Deviance(), None
    for scores, target in batches:
        given = {"input": scores, "target": target, "reduction": "mean", **options}
        output = getattr(functional, function)(scores, target, **{"reduction": "mean", **options})
        share = deviance.explained(function, given, output)
    return share


def classes(count=200, frequencies=(0.6, 0.3, 0.1)):
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor(frequencies)
    for _ in range(count):
        yield torch.multinomial(shares, 512, replacement=True, generator=generator)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_frequencies_of_classes_explain_nothing(reduction):
    odds = torch.tensor((0.6, 0.3, 0.1)).log()
    answers = [(odds.expand(512, 3), target) for target in classes()]
    assert over("cross_entropy", answers, reduction=reduction) == pytest.approx(0, abs=0.08)


def test_what_is_ignored_does_not_count():
    odds = torch.tensor((0.6, 0.3, 0.1)).log()
    answers = []
    for target in classes():
        target[::2] = -100
        answers.append((odds.expand(512, 3), target))
    assert over("cross_entropy", answers, ignore_index=-100) == pytest.approx(0, abs=0.12)


def test_equal_odds_are_worse_than_the_frequencies():
    entropy = -sum(p * math.log(p) for p in (0.6, 0.3, 0.1))
    share = over("cross_entropy", [(torch.zeros(512, 3), target) for target in classes()])
    assert share == pytest.approx(1 - math.log(3) / entropy, abs=0.01)


def test_right_answers_explain_nearly_all():
    answers = [(20.0 * functional.one_hot(t, 3), t) for t in classes()]
    assert over("cross_entropy", answers) > 0.99


def test_probabilities_and_smoothed_labels_have_a_floor_of_their_own():
    shares = torch.tensor((0.6, 0.3, 0.1))
    soft = [(shares.log().expand(512, 3), shares.expand(512, 3))] * 5
    assert over("cross_entropy", soft) == pytest.approx(0, abs=0.01)
    smooth = [((0.9 * shares + 0.1 / 3).log().expand(512, 3), t) for t in classes()]
    assert over("cross_entropy", smooth, label_smoothing=0.1) == pytest.approx(0, abs=0.08)


def test_the_mean_explains_no_squares():
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.tensor([[100.0, -3.0]]).expand(512, 2), t * torch.tensor([3.0, 1.0]))
        for t in torch.randn(100, 512, 2, generator=generator)
    ]
    moved = [(scores, t + torch.tensor([100.0, -3.0])) for scores, t in pairs]
    assert over("mse_loss", moved) == pytest.approx(0, abs=0.15)


@pytest.mark.parametrize(
    ("function", "options"),
    [("l1_loss", {}), ("smooth_l1_loss", {"beta": 0.5}), ("huber_loss", {"delta": 2.0})],
)
def test_the_best_constant_explains_nothing_of_absolute_errors(function, options):
    generator = torch.Generator().manual_seed(0)
    skewed = torch.distributions.Exponential(1.0)
    torch.manual_seed(0)
    targets = [3.0 * skewed.sample((512, 2)) - 5.0 for _ in range(40)]
    together = torch.cat(targets)
    loss = getattr(functional, function)
    tried = torch.linspace(-5, 0, 501)
    best = min(tried, key=lambda c: loss(c.expand_as(together), together, **options).item())
    answers = [(best.expand(512, 2), target) for target in targets]
    assert over(function, answers, **options) == pytest.approx(0, abs=0.08)
    noisy = [(t + 0.1 * torch.randn(512, 2, generator=generator), t) for t in targets]
    assert over(function, noisy, **options) > 0.9
    summed = [(best.expand(512, 2), target) for target in targets]
    assert over(function, summed, reduction="sum", **options) == pytest.approx(0, abs=0.08)


def test_few_targets_of_absolute_errors_are_no_floor_that_is_too_low():
    generator = torch.Generator().manual_seed(0)
    targets = [torch.randn(4, generator=generator) for _ in range(300)]
    shares = [over("l1_loss", [(torch.zeros(4), t) for t in targets[:n]]) for n in range(20, 300)]
    assert sum(shares) / len(shares) == pytest.approx(0, abs=0.03)


def test_absolute_errors_of_large_targets_are_left_out():
    assert over("l1_loss", [(torch.zeros(2, 3, 64, 64), torch.ones(2, 3, 64, 64))]) is None


def test_binary_labels_have_an_entropy_each():
    generator = torch.Generator().manual_seed(0)
    rates = torch.tensor([0.1, 0.5, 0.9])
    pairs = [
        (torch.logit(rates).expand(512, 3), (torch.rand(512, 3, generator=generator) < rates) * 1.0)
        for _ in range(100)
    ]
    share = over("binary_cross_entropy_with_logits", pairs)
    assert share == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize(
    ("function", "scores", "target", "options"),
    [
        ("l1_loss", torch.zeros(4, 1), torch.ones(4, 1), {}),
        ("mse_loss", torch.zeros(4, 1), torch.ones(4, 1), {}),  # a constant is right
        ("mse_loss", torch.zeros(4, 1), torch.arange(4.0).view(4, 1), {"reduction": "none"}),
        ("cross_entropy", torch.zeros(4, 2), torch.zeros(4).long(), {}),
        ("cross_entropy", torch.zeros(4, 2), torch.arange(4) % 2, {"weight": torch.ones(2)}),
    ],
)
def test_others_have_none(function, scores, target, options):
    given = {"input": scores, "target": target, "reduction": "mean", **options}
    output = getattr(functional, function)(scores, target, **{"reduction": "mean", **options})
    assert Deviance().explained(function, given, output) is None


def test_it_is_posted_with_the_loss_beside_other_terms_and_over_micro_batches(watch):
    model = net()
    harness = watch(model)
    for micro in range(2):
        x, y = batch(micro)
        loss = functional.cross_entropy(model(x), y)
        (loss + 100 * sum(p.square().sum() for p in model.parameters())).backward()
    harness.optimizer.step()
    assert abs(harness.value("explained_deviance")) < 2
    assert harness.value("loss") > 5
