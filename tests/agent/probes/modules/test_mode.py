"""In which mode steps are taken: dropout and batch norm that evaluate while the optimizer steps."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope.agent.probes.modules.mode import mode_dependent


class OwnDropout(nn.Module):
    """As in hand-written attention: asks for its mode, and has a rate."""

    def __init__(self, rate):
        super().__init__()
        self.dropout = rate

    def forward(self, x):
        return functional.dropout(x, self.dropout if self.training else 0.0)


class Noisy(nn.Module):
    def forward(self, x):
        return self.changed(x)

    def changed(self, x):
        return x + torch.randn_like(x) if self.training else x


class ByMode(nn.Module):
    """Has no rate of its own."""

    def forward(self, x):
        return functional.dropout(x, 0.3, training=self.training)


class Plain(nn.Module):
    def train(self, mode=True):
        self.training = mode
        return super().train(mode)

    def forward(self, x):
        return x


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.arange(8) % 3


def train(model, optimizer, steps):
    losses = {}
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return losses


def evaluate(model):
    model.eval()
    with torch.no_grad():
        x, y = batch(1000)
        return functional.cross_entropy(model(x), y).item()


def events(watching):
    reported = [e for b in watching.batches() for e in b.events if e.kind == "mode.changed"]
    return {e.step: e.data for e in reported}


@pytest.mark.parametrize(
    ("module", "sort"),
    [
        (nn.Dropout(0.1), "dropout"),
        (nn.Dropout2d(0.0), ""),
        (nn.RReLU(), "dropout"),
        (nn.BatchNorm2d(3), "normalization"),
        (nn.BatchNorm2d(3, track_running_stats=False), ""),
        (nn.InstanceNorm1d(3), ""),
        (nn.InstanceNorm1d(3, track_running_stats=True), "normalization"),
        (nn.LayerNorm(3), ""),
        (nn.LSTM(3, 4, 2, dropout=0.5), "dropout"),
        (nn.LSTM(3, 4), ""),
        (nn.MultiheadAttention(4, 2), ""),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "dropout"),
        (OwnDropout(0.0), ""),
        (OwnDropout(0.1), "dropout"),
        (Noisy(), "own"),
        (ByMode(), "dropout"),
        (Plain(), ""),
    ],
)
def test_modules_that_depend_on_their_mode(module, sort):
    assert [one.sort for one in mode_dependent(module)] == ([sort] if sort else [])


def test_train_that_is_forgotten_after_an_evaluation_is_reported_at_its_step(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    losses = train(model, optimizer, range(4))
    evaluated = evaluate(model)
    losses |= train(model, optimizer, range(4, 9))
    model.train()
    losses |= train(model, optimizer, range(9, 12))
    shares = watching.points("modules_in_eval")
    assert shares == {step: float(4 <= step < 9) for step in range(12)}
    reported = events(watching)
    assert sorted(reported) == [0, 4, 9]
    assert reported[4]["names"] == ["1", "2"]
    assert (reported[4]["whole"], reported[4]["normalization"], reported[4]["dropout"]) == (
        True,
        1,
        1,
    )
    assert (reported[9]["whole"], reported[9]["count"], reported[9]["of"]) == (False, 0, 2)
    # What is trained in evaluation mode is no evaluation.
    assert watching.points("loss") == losses
    assert watching.points("eval/loss") == {3: evaluated}


def test_a_frozen_norm_is_reported_at_the_first_step_alone(watching):
    model = net()
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    train(model, optimizer, range(3))
    assert set(watching.points("modules_in_eval").values()) == {0.5}
    reported = events(watching)
    assert list(reported) == [0]
    assert (reported[0]["whole"], reported[0]["names"], reported[0]["dropout"]) == (False, ["1"], 0)


@pytest.mark.parametrize("batches", [0, 1])
def test_a_norm_that_no_batch_went_into_is_new(watching, batches):
    model = net()
    for step in range(batches):
        model(batch(step)[0])
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    train(model, optimizer, range(2))
    assert events(watching)[0]["new"] == (not batches)


def test_a_norm_that_was_trained_before_it_is_frozen_is_not_new(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    train(model, optimizer, range(2))
    model[1].eval()
    train(model, optimizer, range(2, 4))
    assert events(watching)[2]["new"] == 0


@pytest.mark.parametrize("trained", [True, False])
def test_a_new_norm_whose_weight_is_trained(watching, trained):
    model = net()
    model[1].eval()
    model[1].requires_grad_(trained)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    train(model, optimizer, range(2))
    assert events(watching)[0]["new_trained"] == trained


def test_modules_that_come_later_are_counted(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    train(model, optimizer, range(2))
    model[2] = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.3))
    model[2].eval()
    train(model, optimizer, range(2, 4))
    assert events(watching)[2]["names"] == ["2.0", "2.1"]
    assert watching.points("modules_in_eval")[3] == pytest.approx(2 / 3)


def test_without_modules_that_depend_on_it_the_mode_is_no_series(watching):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    model.eval()
    train(model, optimizer, range(3))
    assert watching.points("modules_in_eval") == {}
    assert [data["of"] for data in events(watching).values()] == [0]


def test_mode_changes_at_every_step_are_reported_a_limited_number_of_times(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watching.attach(model, optimizer)
    for step in range(150):
        model.train(step % 2 == 0)
        train(model, optimizer, [step])
    assert len(events(watching)) == 64
    assert len(watching.points("modules_in_eval")) == 150


def test_modules_whose_settings_are_extreme(watching):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.0), nn.Dropout(0.95))
    model.append(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)))
    model.append(nn.BatchNorm1d(4, momentum=1e-4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    (said,) = events(watching).values()
    assert said["dropping"] == [["2", 0.95]]
    assert said["still"] == ["1"]
    assert said["slow"] == [["4", 1e-4]]
