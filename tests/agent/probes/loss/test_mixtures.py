"""One set of scores under several targets, each with a share of the loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope.agent.probes.loss.training import Loss
from tests.support.probe_harness import Harness

CLASSES = 4
ONE, OTHER = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]), torch.tensor([3, 3, 3, 3, 1, 1, 1, 1])


def scalars(loss_of, *, backward=lambda loss: loss.backward()):
    """Of a model whose answers are those of `ONE`, by what `loss_of` makes of its scores."""
    model = nn.Linear(CLASSES, CLASSES, bias=False)
    with torch.no_grad():
        model.weight.copy_(3.0 * torch.eye(CLASSES))
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.0), probes=[Loss])
    try:
        backward(loss_of(model(functional.one_hot(ONE, CLASSES).float())))
        harness.optimizer.step()
    finally:
        harness.close()
    return harness.steps[0].scalars


def mixed(share):
    return lambda scores: (
        share * functional.cross_entropy(scores, ONE)
        + (1 - share) * functional.cross_entropy(scores, OTHER)
    )


@pytest.mark.parametrize(("share", "accuracy"), [(0.9, 1.0), (0.1, 0.25)])
def test_the_target_with_the_largest_share_counts(share, accuracy):
    assert scalars(mixed(share))["accuracy"] == accuracy
    assert scalars(mixed(torch.tensor(share)))["accuracy"] == accuracy


def test_what_is_explained_is_so_of_all_of_them():
    one, other, both = (scalars(mixed(s))["explained_deviance"] for s in (1.0, 0.0001, 0.75))
    assert one > 0.5 > 0 > other
    loss = scalars(mixed(0.75))["loss"]
    assert both == pytest.approx(1 - loss / 1.35, abs=0.1)


def test_a_scale_and_another_term_change_nothing():
    def more(scores):
        return 8 * (mixed(0.1)(scores) + 0.01 * scores.square().mean()) / 2

    assert scalars(more)["accuracy"] == 0.25


def test_shares_of_three():
    def three(scores):
        last = functional.cross_entropy(scores, (ONE + 1) % CLASSES)
        return 0.5 * mixed(0.5)(scores) + 0.5 * last

    assert scalars(three)["accuracy"] == 0.0


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_scores_of_their_own_are_terms_as_before(share):
    def two_heads(scores):
        first = functional.cross_entropy(scores, ONE)
        return share * first + (1 - share) * functional.cross_entropy(scores + 0, OTHER)

    assert scalars(two_heads)["accuracy"] == 1.0


def test_shares_that_are_learned_are_not_known():
    weight = torch.tensor(0.1, requires_grad=True)
    assert scalars(mixed(weight))["accuracy"] == 1.0
