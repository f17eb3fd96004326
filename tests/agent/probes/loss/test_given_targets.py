"""Targets that are among what the model is given: of sequences, and as a column of a table."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope.agent.probes.loss.training import Loss
from tests.support.probe_harness import Harness

WORDS, LENGTH, ROWS = 12, 9, 32


class Decoder(nn.Module):
    """Scores of each place from the newest of the sequences that it is given, at that place."""

    def __init__(self, *, shifts=False):
        super().__init__()
        self.table = nn.Embedding(WORDS, WORDS)
        self.shifts = shifts

    def forward(self, *sequences):
        tokens = sequences[-1]
        if self.shifts:
            tokens = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], dim=1)
        return self.table(tokens)


def trained(inputs, *, shifts=False, layout="flat", padded=0.0, asked=1.0):
    """The newest scalars after 40 steps; `inputs` makes what the model is given of the targets.

    Args:
        padded: share of the sequences that end in padding, which does not count.
        asked: share of the places that count, as those of a masked language model.
    """
    torch.manual_seed(0)
    model = Decoder(shifts=shifts)
    harness = Harness(model, torch.optim.Adam(model.parameters(), lr=0.3), probes=[Loss])
    try:
        for _ in range(40):
            targets = torch.randint(WORDS, (ROWS, LENGTH))
            harness.optimizer.zero_grad()
            scores = model(*inputs(targets))
            targets[: int(padded * ROWS), LENGTH // 2 :] = -100
            targets[torch.rand(targets.shape) >= asked] = -100
            if layout == "flat":
                loss = functional.cross_entropy(scores.view(-1, WORDS), targets.reshape(-1))
            else:
                loss = functional.cross_entropy(scores.transpose(1, 2), targets)
            loss.backward()
            harness.optimizer.step()
    finally:
        harness.close()
    return harness.steps[-1].scalars


def one_place_on(targets):
    return torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], dim=1)


@pytest.mark.parametrize("layout", ["flat", "by place"])
@pytest.mark.parametrize(
    "inputs",
    [lambda t: (t.clone(),), lambda t: (t.flip(1), t.clone())],
    ids=["alone", "beside another"],
)
def test_a_model_that_is_given_its_targets_copies_all_of_them(inputs, layout):
    scalars = trained(inputs, layout=layout)
    assert 0 <= scalars["given_target_error"] < 0.5
    assert 0 <= scalars["given_target_first"] < 0.5


def test_padding_does_not_count():
    assert 0 <= trained(lambda t: (t.clone(),), padded=0.5)["given_target_error"] < 0.5
    assert trained(lambda t: (t.clone(),), asked=0.02)["given_target_error"] == -1  # 6 of 288


def test_tokens_that_were_to_be_masked_and_were_not():
    scalars = trained(lambda t: (t.clone(),), asked=0.15)
    assert 0 <= scalars["given_target_error"] < 0.5


def test_tokens_that_are_masked_with_some_kept():
    def nine_of_ten(targets):
        return (torch.where(torch.rand(targets.shape) < 0.1, targets, WORDS - 1),)

    assert trained(nine_of_ten, asked=0.15)["given_target_error"] == -1


def test_a_model_that_shifts_by_itself_does_not_know_the_first_place():
    scalars = trained(lambda t: (t.clone(),), shifts=True)
    assert scalars["given_target_first"] > 2


@pytest.mark.parametrize(
    "inputs",
    [
        lambda t: (one_place_on(t),),
        lambda t: (t.clone(), one_place_on(t)),
        lambda t: (t.where(torch.rand(t.shape) > 0.15, 0),),
    ],
    ids=["next token", "autoencoder with a decoder of its own", "masked"],
)
def test_other_inputs_say_nothing(inputs):
    scalars = trained(inputs)
    assert scalars["given_target_error"] == scalars["given_target_first"] == -1


def of_table(make, loss, *, rows=32, columns=5, outputs=1):
    """`target_column` of a table; `make` returns the table and its targets."""
    torch.manual_seed(0)
    model = nn.LazyLinear(3 if loss is functional.cross_entropy else outputs)
    model(torch.randn(rows, columns))
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.01), probes=[Loss])
    try:
        table, target = make(torch.randn(rows, columns))
        out = model(table)
        out = out if loss is functional.cross_entropy else out.view(target.shape)
        harness.optimizer.zero_grad()
        loss(out, target).backward()
        harness.optimizer.step()
    finally:
        harness.close()
    return harness.steps[-1].scalars.get("target_column")


def with_label(table):
    label = torch.arange(len(table)) % 3
    table[:, 3] = (label - 1.0) / 0.8
    return table, label


def with_number(table):
    return table, 40 * table[:, 2] - 7


def with_label_of_one_hot(table):
    label = torch.arange(len(table)) % 3
    table[:, 2:5] = functional.one_hot(label, 3) * 2.0 - 0.7
    return table, label


def test_columns_one_of_which_says_the_class_are_found():
    assert of_table(with_label_of_one_hot, functional.cross_entropy, columns=8) == 2


def test_a_column_that_is_the_target_is_found_whatever_its_scale():
    assert of_table(with_label, functional.cross_entropy) == 3
    assert of_table(with_number, functional.mse_loss) == 2


@pytest.mark.parametrize(
    ("make", "loss", "sizes"),
    [
        (lambda t: (t, 40 * t[:, 2] - 7 + 0.1 * t[:, 1]), functional.mse_loss, {}),
        (lambda t: (t, torch.arange(len(t)) % 3), functional.cross_entropy, {}),
        (lambda t: (t, torch.zeros(len(t))), functional.mse_loss, {}),
    ],
    ids=["two columns", "no column", "constant"],
)
def test_other_tables_have_no_such_column(make, loss, sizes):
    assert of_table(make, loss, **sizes) == -1


@pytest.mark.parametrize("sizes", [{"columns": 2}, {"rows": 7}])
def test_of_small_tables_nothing_is_said(sizes):
    assert of_table(lambda t: (t, 2 * t[:, 0]), functional.mse_loss, **sizes) is None


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda t: (t, t[:, 6:]), 6),
        (lambda t: (t, torch.cat([t[:, 7:], torch.randn(len(t), 1)], 1)), -1),
        (lambda t: (t, torch.cat([t[:, 7:], torch.zeros(len(t), 1)], 1)), -1),
        (lambda t: (t, t[:, 3:]), None),
    ],
    ids=[
        "a window that is too long",
        "each value's next one",
        "the same, padded",
        "an autoencoder",
    ],
)
def test_several_targets_are_given_where_all_of_them_are(make, found):
    outputs = 5 if found is None else 2
    assert of_table(make, functional.mse_loss, columns=8, outputs=outputs) == found
