"""Models whose parameters are frozen, unfrozen, replaced, added, tied and loaded after attach."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.watching import Diary, net


def train(model, optimizer, diary, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(5, 6, generator=generator)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), torch.arange(5) % 3)
        loss.backward()
        optimizer.step()
        diary.step(loss)


def notes(watching):
    return watching.events("agent.note")


def test_unfrozen_in_the_middle(watching):
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(3))
    model[0].requires_grad_(True)
    train(model, optimizer, diary, range(3, 6))
    diary.check(watching)
    assert [set(d) for d in diary.parameters[2:4]] == [
        {"2.weight", "2.bias"},
        {"0.weight", "0.bias", "2.weight", "2.bias"},
    ]
    [(step, text)] = notes(watching)
    assert step == 3
    assert "trained from now on: 0.weight, 0.bias" in text


def test_frozen_in_the_middle(watching):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(3))
    optimizer.zero_grad()
    model[0].requires_grad_(False)
    train(model, optimizer, diary, range(3, 6))
    diary.check(watching)
    [(step, text)] = notes(watching)
    assert step == 3
    assert "no longer trained: 0.weight, 0.bias" in text


def test_a_layer_is_replaced(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(3))
    model[2] = nn.Linear(8, 5)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, diary, range(3, 6))
    diary.check(watching)
    [(step, text)] = notes(watching)
    assert step == 3
    assert "replaced by another tensor: 2.weight, 2.bias" in text
    tables = watching.tables()
    assert tables["parameters"].shapes == ((8, 6), (8,), (3, 8), (3,))
    assert tables["parameters@1"].shapes == ((8, 6), (8,), (5, 8), (5,))


def test_a_layer_and_a_group_are_added(watching):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(3))
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.01})
    train(model, optimizer, diary, range(3, 6))
    diary.check(watching)
    [(step, text)] = notes(watching)
    assert step == 3
    assert "trained from now on: 3.weight, 3.bias" in text
    assert watching.points("lr") == dict.fromkeys(range(6), 0.1)
    assert watching.points("lr/1") == dict.fromkeys(range(3, 6), 0.01)


def test_tied_weights_are_one(watching):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(4))
    diary.check(watching)
    assert watching.tables()["parameters"].names == ("0.weight", "2.bias")
    assert notes(watching) == []


def test_a_checkpoint_is_loaded_into_the_model(watching):
    """In place: the same parameters, written by something else than the optimizer."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(2))
    kept = copy.deepcopy(model.state_dict())
    train(model, optimizer, diary, range(2, 4))
    model.load_state_dict(kept)
    train(model, optimizer, diary, range(4, 6))
    diary.check(watching)
    changed = {s for s, digest in watching.model_digests("outside_optimizer").items() if digest}
    assert changed == {4}
    assert notes(watching) == []


def test_a_checkpoint_takes_the_place_of_the_parameters(watching):
    """`assign=True`, and the optimizer gets the new ones."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(3))
    model.load_state_dict(net(seed=1).state_dict(), assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, diary, range(3, 6))
    diary.check(watching)
    [(step, text)] = notes(watching)
    assert step == 3
    assert "replaced by another tensor: 0.weight, 0.bias, 2.weight, 2.bias" in text


def test_an_optimizer_that_did_not_get_the_new_parameters(watching):
    """`assign=True` alone: the optimizer goes on with tensors that the model no longer has."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(3))
    model.load_state_dict(net(seed=1).state_dict(), assign=True)
    # The new ones are never zeroed, so that their gradients add up.
    train(model, optimizer, diary, range(3, 6))
    assert watching.points("loss") == pytest.approx(dict(enumerate(diary.losses)))
    digests = watching.digests("parameters")
    for step in range(3, 6):
        of_the_model = {n: d for n, d in digests[step].items() if not n.startswith("optimizer.")}
        assert of_the_model == diary.parameters[3]
    [(step, text)] = notes(watching)
    assert step == 3
    assert "optimizer.0.0" in text


def test_a_state_is_loaded_into_the_optimizer(watching):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(2))
    kept = copy.deepcopy(optimizer.state_dict())
    kept["param_groups"][0]["lr"] = 0.01
    train(model, optimizer, diary, range(2, 4))
    optimizer.load_state_dict(kept)
    train(model, optimizer, diary, range(4, 6))
    diary.check(watching)
    assert watching.points("lr") == {s: 0.1 if s < 4 else 0.01 for s in range(6)}
    assert {
        s for s, digest in watching.model_digests("outside_optimizer").items() if digest
    } == set()
    assert notes(watching) == []


def test_fine_tuning_goes_on_at_the_step_of_the_run(watching):
    """Parameters that were unfrozen late have taken fewer steps than the run."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer, Diary(model), range(3))
    model[0].requires_grad_(True)
    train(model, optimizer, Diary(model), range(3, 5))
    watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(5, 7))
    diary.check(watching, first=5)


def test_a_second_phase_with_a_run_of_its_own_is_none_of_the_first(watching):
    """Pretraining, then a new head and a new optimizer for the same encoder, attached again."""
    encoder = nn.Linear(6, 8)
    first = nn.Sequential(encoder, nn.Linear(8, 3))
    optimizer = torch.optim.Adam(first.parameters(), lr=0.1)
    watching.attach(first, optimizer)
    diary = Diary(first)
    train(first, optimizer, diary, range(3))
    second = nn.Sequential(encoder, nn.ReLU(), nn.Linear(8, 3))
    others = torch.optim.SGD(second.parameters(), lr=0.1)
    watching.attach(second, others, run="second")
    train(second, others, Diary(second), range(3, 8))
    diary.check(watching)
    assert notes(watching) == []
    assert len(watching.points("loss", run="second")) == 5
