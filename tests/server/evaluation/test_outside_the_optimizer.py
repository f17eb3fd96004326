"""Real trainings of which the optimizer does not hold a part, or zero_grad is not called."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.judged import judged
from tests.support.watching import Watching

VOCABULARY, WIDTH = 20, 16


class LanguageModel(nn.Module):
    """Its head is no longer the embedding's weight, as when somebody unties them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(self.embedding(x))))


def without(model, *parts):
    return [p for name, p in model.named_parameters() if not name.startswith(parts)]


def loss_of(model, step):
    x = torch.randint(0, VOCABULARY, (16, 8), generator=torch.Generator().manual_seed(step))
    targets = (x * 7 + 3) % VOCABULARY
    return functional.cross_entropy(model(x).flatten(0, 1), targets.flatten())


def trained(tmp_path, held, *, zero=lambda m, o: o.zero_grad(), after=None, clip=None, steps=40):
    """Trains what `held` makes of the model, and says what the server makes of that."""
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(held(model), lr=1e-2)
    with Watching(tmp_path / "spool") as watching:
        watching.attach(model, optimizer)
        for step in range(steps):
            zero(model, optimizer)
            loss_of(model, step).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if after is not None:
                after(model, step)
        return judged(watching.batches(), tmp_path)


def headless(model):
    return without(model, "head")


def test_an_untied_head_that_no_optimizer_holds_is_the_cause(tmp_path):
    found = trained(tmp_path, headless, clip=1.0)
    assert found.kinds() == ["update.missing"]
    alert = found.one("update.missing")
    assert (alert.severity, alert.tensors, alert.parent) == ("warning", ("head.weight",), None)
    assert "no other optimizer has changed anything either" in alert.cause
    assert "never set to zero" in alert.cause
    assert not any(a.kind == "gradient.accumulating" for a in found.roots)


def test_a_head_whose_gradient_the_model_sets_to_zero_is_left_out_all_the_same(tmp_path):
    found = trained(tmp_path, headless, zero=lambda m, o: m.zero_grad())
    assert found.kinds() == ["update.missing"]
    assert "never set to zero" not in found.one("update.missing").cause


def test_a_head_that_is_trained_by_somebody_else_is_no_fault(tmp_path):
    other = []

    def zero(model, optimizer):
        model.zero_grad()

    def after(model, step):
        if not other:
            other.append(torch.optim.SGD(model.head.parameters(), lr=0.1))
        if step % 2 == 0:
            other[0].step()

    found = trained(tmp_path, headless, zero=zero, after=after)
    assert found.kinds() == []


def test_training_a_small_part_of_a_model_may_be_meant(tmp_path):
    found = trained(tmp_path, lambda model: model.head.parameters())
    assert found.kinds() == []
    alert = found.one("update.missing")
    assert alert.severity == "info"
    assert "It may be meant" in alert.cause


def test_a_copy_of_most_of_the_model_in_its_place_is_a_mistake(tmp_path):
    def copied(model):
        return [*model.head.parameters(), *without(copy.deepcopy(model), "head")]

    found = trained(tmp_path, copied)
    assert found.kinds() == ["update.missing"]
    alert = found.one("update.missing")
    assert (alert.severity, alert.parent) == ("warning", None)
    assert "it was built from a copy" in alert.cause


@pytest.mark.parametrize("held", [lambda m: m.parameters(), headless], ids=["whole", "headless"])
def test_zero_grad_that_is_not_called_is_reported_as_such(tmp_path, held):
    found = trained(tmp_path, held, zero=lambda m, o: None)
    alert = found.one("gradient.accumulating")
    assert alert.severity == "critical"
    assert alert.evidence["emptied"] is False
    assert "gradients are not set to zero between steps" in alert.cause
    assert "zero_grad" in alert.remedy
