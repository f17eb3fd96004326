"""Whether the answers at places whose target is in the input are better than at the last one."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope.agent.probes.base import StepFacts
from rankscope.agent.probes.loss.next_tokens import NextTokens
from rankscope.agent.probes.loss.training import Loss
from tests.support.probe_harness import Harness

WORDS, LENGTH, ROWS = 12, 9, 32


class Reader(nn.Module):
    """Predicts each token from it and from the one after it, if it may look ahead."""

    def __init__(self, *, ahead):
        super().__init__()
        self.table = nn.Embedding(WORDS, 2 * WORDS)
        self.ahead = ahead

    def forward(self, tokens):
        own, of_next = self.table(tokens).split(WORDS, dim=2)
        last = torch.zeros_like(of_next[:, :1])
        return own + torch.cat([of_next[:, 1:], last], dim=1) * self.ahead


def trained(*, ahead, shift=True, layout="flat", padded=0.0):
    """The newest scalars.

    Args:
        padded: share of the sequences that end in padding, which does not count.
    """
    torch.manual_seed(0)
    model = Reader(ahead=ahead)
    harness = Harness(model, torch.optim.Adam(model.parameters(), lr=0.3), probes=[Loss])
    try:
        for _ in range(60):
            text = torch.randint(WORDS, (ROWS, LENGTH + 1))
            tokens = text[:, :-1].contiguous()
            targets = (text[:, 1:] if shift else text.flip(1)[:, 1:]).clone()
            targets[: int(padded * ROWS), LENGTH // 2 :] = -100
            harness.optimizer.zero_grad()
            scores = model(tokens)
            if layout == "flat":
                loss = functional.cross_entropy(scores.view(-1, WORDS), targets.reshape(-1))
            else:
                loss = functional.cross_entropy(scores.transpose(1, 2), targets)
            loss.backward()
            harness.optimizer.step()
    finally:
        harness.close()
    return harness.steps[-1].scalars


@pytest.mark.parametrize("layout", ["flat", "by place"])
def test_a_model_that_looks_ahead_fails_at_the_last_place_alone(layout):
    scalars = trained(ahead=True, layout=layout)
    assert scalars["next_token_seen"] < 0.5
    assert scalars["next_token_unseen"] > 2


def test_a_model_that_does_not_errs_everywhere():
    scalars = trained(ahead=False)
    assert scalars["next_token_seen"] == pytest.approx(scalars["next_token_unseen"], rel=0.5)
    assert scalars["next_token_unseen"] > 1


def test_what_is_worse_than_guessing_is_not_known_better():
    scores = 30 * torch.randn(ROWS, WORDS, LENGTH)
    scores[:, :, -1] *= 2  # at the last place they have blown up further
    tokens = torch.randint(WORDS, (ROWS, LENGTH + 1))
    probe, facts = NextTokens(), StepFacts(0)
    probe.given((tokens[:, :-1],), {})
    probe.add("cross_entropy", {"input": scores, "target": tokens[:, 1:]})
    probe.end(facts)
    values = [float(facts.scalars[f"next_token_{name}"]) for name in ("seen", "unseen")]
    assert values == pytest.approx([math.log(WORDS)] * 2)


def test_padding_does_not_count():
    scalars = trained(ahead=True, padded=0.25)
    assert scalars["next_token_seen"] < 0.5
    assert scalars["next_token_unseen"] > 2
    scalars = trained(ahead=False, padded=0.25)
    assert scalars["next_token_seen"] == pytest.approx(scalars["next_token_unseen"], rel=0.5)


@pytest.mark.parametrize("arguments", [{"shift": False}, {"padded": 0.75}])
def test_other_targets_say_nothing(arguments):
    scalars = trained(ahead=True, **arguments)
    assert scalars["next_token_seen"] == scalars["next_token_unseen"] == -1


def distance(make, *, ignored=-100):
    """`next_token_distance`; `make` returns tokens and targets of a text of 12 places."""
    torch.manual_seed(0)
    text = torch.randint(WORDS, (ROWS, 12))
    tokens, targets = make(text)
    probe, facts = NextTokens(), StepFacts(0)
    probe.given((tokens,), {})
    scores = torch.randn(targets.numel(), WORDS)
    given = {"input": scores, "target": targets.reshape(-1), "ignore_index": ignored}
    probe.add("cross_entropy", given)
    probe.end(facts)
    return float(facts.scalars["next_token_distance"])


def shifted_twice_within(text):
    """As a model does that shifts by itself, and leaves the last place out."""
    tokens, labels = text[:, :-1], text[:, 1:]
    return tokens, labels[:, 1:]


def shifted_twice_and_padded(text):
    """The same where the last place is padded instead."""
    tokens, labels = text[:, :-1], text[:, 1:]
    return tokens, functional.pad(labels, (0, 1), value=-100)[:, 1:]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda t: (t[:, :-1], t[:, 1:]), 1),
        (lambda t: (t, t[:, 1:]), 1),
        (lambda t: (t[:, :-2], t[:, 2:]), 2),
        (shifted_twice_within, 2),
        (shifted_twice_and_padded, 2),
        (lambda t: (t[:, :-3], t[:, 3:]), 3),
        (lambda t: (t, t), -1),
        (lambda t: (t, t.flip(1)), -1),
        (lambda t: (torch.ones_like(t), torch.ones_like(t)), -1),
        (lambda t: (t[:, :2].repeat(1, 6), t[:, :2].repeat(1, 6)), -1),
        (lambda t: (t[:2, :-2], t[:2, 2:].masked_fill(torch.arange(10) < 9, -100)), -1),
    ],
    ids=[
        *("next", "next, cut", "second", "within", "padded", "third", "same", "other", "constant"),
        *("copied, of period 2", "few answers"),
    ],
)
def test_by_how_many_places_targets_are_ahead(make, found):
    assert distance(make) == found


def test_a_batch_of_nothing_says_nothing():
    probe, facts = NextTokens(), StepFacts(0)
    probe.given((torch.zeros(0, 5, dtype=torch.long),), {})
    empty = torch.zeros(0, dtype=torch.long)
    probe.add("cross_entropy", {"input": torch.zeros(0, WORDS), "target": empty})
    probe.end(facts)
    assert facts.scalars == {}
