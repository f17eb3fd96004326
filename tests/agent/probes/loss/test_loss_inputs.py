"""What losses are given, seen in real training steps."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope.agent.probes.base import StepFacts
from rankscope.agent.probes.loss.inputs import LossInputs
from rankscope.agent.probes.loss.training import Loss
from tests.support.probe_harness import Harness

SAMPLES = 16


def trained(loss_of, *, outputs=3, steps=2):
    """Facts of each step; `loss_of` makes a loss of the model's outputs."""
    torch.manual_seed(0)
    model = nn.Linear(5, outputs)
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[Loss])
    try:
        for _ in range(steps):
            harness.optimizer.zero_grad()
            loss_of(model(torch.randn(SAMPLES, 5))).backward()
            harness.optimizer.step()
    finally:
        harness.close()
    return [step.scalars for step in harness.steps]


def classes():
    return torch.arange(SAMPLES) % 3


@pytest.mark.parametrize(
    ("made", "softmaxed"),
    [
        (lambda scores: scores, 0.0),
        (lambda scores: scores.log_softmax(1), 0.0),
        (lambda scores: scores.softmax(1), 1.0),
        (lambda scores: scores.softmax(0), 1.0),
        (lambda scores: scores.softmax(1).half().float(), 1.0),
        (lambda scores: scores.sigmoid(), 0.0),
    ],
)
def test_probabilities_that_are_given_to_cross_entropy(made, softmaxed):
    for scalars in trained(lambda scores: functional.cross_entropy(made(scores), classes())):
        assert scalars["scores_softmaxed"] == softmaxed


def test_probabilities_of_pixels():
    target = torch.zeros(SAMPLES, 4, dtype=torch.long)

    def loss(scores):
        pixels = scores.unsqueeze(2).expand(-1, -1, 4)
        return functional.cross_entropy(pixels.softmax(1), target)

    assert all(scalars["scores_softmaxed"] == 1.0 for scalars in trained(loss))


@pytest.mark.parametrize(
    ("made", "unnormalised"),
    [
        (lambda scores: scores.log_softmax(1), 0.0),
        (lambda scores: scores, 1.0),
        (lambda scores: scores.softmax(1), 1.0),
    ],
)
def test_what_is_given_to_nll_loss(made, unnormalised):
    for scalars in trained(lambda scores: functional.nll_loss(made(scores), classes())):
        assert scalars["scores_unnormalised"] == unnormalised


@pytest.mark.parametrize(
    ("made", "positive"),
    [
        (lambda scores: scores.log_softmax(1), 0.0),
        (lambda scores: scores, 0.0),
        (lambda scores: scores.softmax(1), 1.0),
    ],
)
def test_what_is_given_to_kl_div(made, positive):
    target = torch.rand(SAMPLES, 3, generator=torch.Generator().manual_seed(0)).softmax(1)

    def loss(scores):
        return functional.kl_div(made(scores), target, reduction="batchmean")

    for scalars in trained(loss):
        assert scalars["scores_positive"] == positive


@pytest.mark.parametrize(("made", "softmaxed"), [(lambda s: s, 0.0), (lambda s: s.sigmoid(), 1.0)])
def test_a_sigmoid_before_a_loss_that_takes_it_itself(made, softmaxed):
    target = (torch.arange(SAMPLES) % 2).float()[:, None].expand(-1, 3)

    def loss(scores):
        return functional.binary_cross_entropy_with_logits(made(scores), target)

    assert all(scalars["scores_softmaxed"] == softmaxed for scalars in trained(loss))


TARGETS = torch.linspace(-1, 1, SAMPLES)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o: -functional.mse_loss(o[:, 0], TARGETS),
        lambda o: -functional.l1_loss(o[:, 0], TARGETS),
        lambda o: -((o[:, 0] - TARGETS) ** 2).mean(),
        lambda o: -functional.smooth_l1_loss(o[:, 0], TARGETS, reduction="none").sum(),
    ],
)
def test_the_negative_of_an_error(loss):
    assert all(scalars["loss_negated"] == 1.0 for scalars in trained(loss))


@pytest.mark.parametrize(
    "loss",
    [
        lambda o: functional.mse_loss(o[:, 0], TARGETS),
        lambda o: -(o[:, 0] * TARGETS).mean(),
        lambda o: -o.log_softmax(1)[:, 0].mean(),
        lambda o: -o.square().mean(),
        lambda o: -torch.distributions.Normal(o[:, 0], 1.0).log_prob(TARGETS).mean(),
        lambda o: functional.cross_entropy(o, classes()) - 0.1 * o.square().mean(),
    ],
)
def test_what_is_to_be_maximised_is_no_error(loss):
    assert all("loss_negated" not in scalars for scalars in trained(loss))


def of_classes(scores):
    return functional.cross_entropy(scores, classes())


def of_numbers(scores):
    return functional.mse_loss(scores[:, 0], TARGETS)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o: of_numbers(o) - of_classes(o),
        lambda o: 0.7 * of_numbers(o) + 0.3 * (-of_classes(o)),
        lambda o: -(of_classes(o) - 2.0 * o.square().mean()) / 4,
        lambda o: o.square().mean() + of_classes(o) * -0.5,
        lambda o: -of_classes(o) + of_numbers(o) + o.square().mean(),
    ],
)
def test_a_term_that_is_taken_away(loss):
    assert all(scalars["loss_subtracted"] == 1.0 for scalars in trained(loss))


@pytest.mark.parametrize(
    "loss",
    [
        of_classes,
        lambda o: -of_classes(o),  # `loss.diverging` says where it leads
        lambda o: of_numbers(o) + of_classes(o),
        lambda o: of_classes(o) - 0.1 * o.square().mean(),
        lambda o: -(-of_classes(o) - of_numbers(o)),
        lambda o: of_classes(o) - functional.mse_loss(o[:, 0], o[:, 1]),
        lambda o: (of_classes(o) - 0.1).abs() + 0.1,
        lambda o: of_classes(o) - 3.0,
    ],
)
def test_terms_that_are_minimised(loss):
    assert all("loss_subtracted" not in scalars for scalars in trained(loss))


def test_a_term_that_is_taken_away_at_some_steps():
    signs = iter([1.0, -1.0, 1.0])
    steps = trained(lambda o: of_numbers(o) + next(signs) * of_classes(o), steps=3)
    assert [scalars.get("loss_subtracted") for scalars in steps] == [None, 1.0, 0.0]


def likelihood(mean, logarithm, targets):
    """Negative one of a normal distribution whose variance is given by its logarithm."""
    logarithm = logarithm.clamp(-7, 7)
    return 0.5 * (logarithm + (targets - mean) ** 2 / logarithm.exp()).mean()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss", "times"),
    [
        (lambda o: functional.mse_loss(o, TARGETS), SAMPLES),
        (lambda o: functional.smooth_l1_loss(o, TARGETS), SAMPLES),
        (lambda o: functional.mse_loss(o, TARGETS[:, None]), 1),
        (lambda o: functional.mse_loss(o, torch.tensor(1.0)), 1),
        (lambda o: functional.mse_loss(o[:, None], TARGETS[None, :, None]), 1),
        (lambda o: ((o - TARGETS) ** 2).mean(), SAMPLES),
        (lambda o: (TARGETS - o).abs().sum() / SAMPLES, SAMPLES),
        (lambda o: ((o.squeeze(1) - TARGETS[:, None]) ** 2).mean(), SAMPLES),
        (lambda o: ((o - TARGETS[:, None]) ** 2).mean(), 1),
        (lambda o: ((o.squeeze(1) - TARGETS) ** 2).mean(), 1),
        (lambda o: likelihood(o.squeeze(1), o.squeeze(1), TARGETS[:, None]), SAMPLES),
        (lambda o: likelihood(o.squeeze(1), o.squeeze(1), TARGETS), 1),
        (lambda o: o.square().mean() + ((o - TARGETS) ** 2).mean(), SAMPLES),
    ],
)
def test_shapes_that_are_broadcast_against_each_other(loss, times):
    for scalars in trained(loss, outputs=1):
        assert scalars["loss_broadcast"] == times


@pytest.mark.parametrize(
    "loss",
    [
        lambda o: ((o - o.T) ** 2).mean(),  # pairs of outputs
        lambda o: ((o.squeeze(1).unsqueeze(1) - TARGETS) ** 2).mean(),
        lambda o: o.square().mean(),
    ],
)
def test_losses_over_pairs_and_others_are_not_judged(loss):
    assert not any("loss_broadcast" in scalars for scalars in trained(loss, outputs=1))


def test_the_size_of_outputs_over_that_of_targets():
    first, _ = trained(
        lambda o: functional.mse_loss(0 * o + 3.0, 6.0 + 0 * TARGETS[:, None]), outputs=1
    )
    assert first["output_scale"] == pytest.approx(0.5)


def test_how_alike_the_targets_of_a_step_are():
    steps = iter([classes()] * 20 + [torch.ones(SAMPLES, dtype=torch.long)] * 2)
    scalars = trained(lambda scores: functional.cross_entropy(scores, next(steps)), steps=22)
    assert scalars[19]["target_share"] == pytest.approx(1.0, abs=0.1)
    assert scalars[19]["target_deviance"] == pytest.approx(1.1, abs=0.1)
    assert scalars[21]["target_share"] == pytest.approx(0.0, abs=0.05)


def test_how_alike_binary_labels_are_once_a_step_had_both():
    both, one = (classes() % 2).float()[:, None], torch.ones(SAMPLES, 1)
    steps = iter([one, 0 * one, one, both, both, one])
    scalars = trained(
        lambda scores: functional.binary_cross_entropy_with_logits(scores, next(steps)),
        steps=6,
        outputs=1,
    )
    shares = [s.get("target_share") for s in scalars]
    # A discriminator may be shown the real ones in one step and the made ones in the next.
    assert shares[0] is None
    assert shares[1:3] == [1.0, 1.0]
    assert shares[3:5] == pytest.approx([1.0, 1.0], abs=0.15)
    assert shares[5] == pytest.approx(0.0, abs=0.01)
    assert scalars[5]["target_deviance"] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize(
    ("labels", "more", "outside"),
    [
        (lambda y: y, {}, 0.0),
        (lambda y: 2 * y - 1, {}, 1.0),
        (lambda y: 255 * y, {"reduction": "sum"}, 1.0),
        (lambda y: 0.9 * y + 0.05, {}, 0.0),
        # What is not meant is taken out again.
        (lambda y: 2 * y - 1, {"weight": torch.ones(1)}, None),
    ],
)
def test_labels_of_a_binary_loss(labels, more, outside):
    target = labels((classes() % 2).float()[:, None])

    def loss(scores):
        return functional.binary_cross_entropy_with_logits(scores, target, **more)

    assert {s.get("labels_outside") for s in trained(loss, outputs=1)} == {outside}


@pytest.mark.parametrize(
    ("before", "twice"),
    [
        (lambda s: functional.log_softmax(functional.softmax(s, 1), 1), 1.0),
        (lambda s: functional.log_softmax(s, 1), 0.0),
        (lambda s: functional.softmax(s, 1).log(), 0.0),
        (lambda s: functional.log_softmax(s.softmax(1).view(-1, 4), 1), 1.0),
    ],
)
def test_a_softmax_before_the_one_of_the_negative_log_likelihood(before, twice):
    def loss(scores):
        return functional.nll_loss(before(scores), classes())

    assert {s.get("scores_softmaxed") for s in trained(loss, outputs=4)} == {twice}


@pytest.mark.parametrize(("smoothing", "posted"), [(0.0, None), (0.1, 0.1), (0.9, 0.9)])
def test_smoothed_labels(smoothing, posted):
    def loss(scores):
        return functional.cross_entropy(scores, classes(), label_smoothing=smoothing)

    assert {s.get("label_smoothing") for s in trained(loss)} == {posted}


def test_targets_of_all_losses_of_a_step_count_together():
    def loss(scores):
        real, made = scores[: SAMPLES // 2], scores[SAMPLES // 2 :]
        ones = torch.ones(SAMPLES // 2, dtype=torch.long)
        return functional.cross_entropy(real, ones) + functional.cross_entropy(made, 0 * ones)

    assert trained(loss, steps=20)[-1]["target_share"] == pytest.approx(1.0, abs=0.1)


def test_few_targets_are_alike_by_chance():
    def loss(scores):
        return functional.cross_entropy(scores[:4], torch.ones(4, dtype=torch.long))

    assert not any("target_share" in scalars for scalars in trained(loss))


def test_targets_that_are_all_of_one_class_have_no_share_of_anything():
    ones = torch.ones(SAMPLES, dtype=torch.long)
    scalars = trained(lambda scores: functional.cross_entropy(scores, ones), steps=20)
    assert {one["target_share"] for one in scalars} == {0.0}


def test_the_number_of_classes_is_reported_once_it_changes():
    inputs, found = LossInputs(), []
    for classes in (4, 4, 8, 8, 4):
        scores = torch.zeros(3, classes)
        inputs.add("cross_entropy", {"input": scores, "target": torch.zeros(3).long()})
        facts = StepFacts(0)
        inputs.end(facts)
        found.append(facts.scalars.get("loss_classes"))
    assert found == [None, None, 8, 8, 4]


def aligned(targets, *, lengths=(2, 3, 1, 4), blank=0):
    """CTC over places; targets [4, 4], or their joined beginnings."""

    def loss(outputs):
        scores = outputs.view(4, 4, -1).transpose(0, 1).repeat(3, 1, 1).log_softmax(2)
        places = torch.full((4,), 12)
        return functional.ctc_loss(scores, targets, places, torch.tensor(lengths), blank=blank)

    return loss


SYMBOLS = torch.tensor([[1, 2, 0, 0], [2, 1, 2, 0], [1, 0, 0, 0], [1, 2, 1, 2]])


@pytest.mark.parametrize(
    ("loss", "blanks"),
    [
        (aligned(SYMBOLS), 0.0),  # 0 behind the end is padding
        (aligned(SYMBOLS - 1, blank=2), 0.0),
        (aligned(SYMBOLS, blank=2), 1.0),
        (aligned(SYMBOLS, lengths=(3, 3, 1, 4)), 1.0),
        (aligned(torch.tensor([1, 2, 2, 1, 2, 1, 1, 2, 1, 2])), 0.0),
        (aligned(torch.tensor([1, 2, 2, 0, 2, 1, 1, 2, 1, 2])), 1.0),
    ],
)
def test_targets_of_ctc_that_hold_the_blank(loss, blanks):
    assert all(scalars["targets_blank"] == blanks for scalars in trained(loss))
