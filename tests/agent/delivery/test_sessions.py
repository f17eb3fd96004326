"""Notebooks, monitors that follow each other or live side by side, and what the user reports."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from rankscope import agent
from rankscope.agent.wire import RANK_LOCAL
from tests.support.watching import Diary, digests_of


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    return functional.cross_entropy(
        model(torch.randn(5, 6, generator=generator)), torch.arange(5) % 3
    )


def train(model, optimizer, diary, steps, each=lambda step: None):
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        diary.step(loss)
        each(step)


def test_without_torch_distributed(watching, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    model = net()
    optimizer = sgd(model)
    monitor = watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(3))
    diary.check(watching)
    assert (monitor.rank, watching.batches()[0].world_size) == (0, 1)


def test_a_notebook(watching):
    """Cells are interrupted at every point, and run again."""
    model = net()
    optimizer = sgd(model)
    diary = Diary(model)

    def cell(first, interrupted):
        monitor = watching.attach(model, optimizer)
        for step in range(first, first + 3):
            last = step == first + 2
            optimizer.zero_grad()
            if last and interrupted == "zero_grad":
                raise KeyboardInterrupt
            loss = loss_of(model, step)
            if last and interrupted == "forward":
                raise ValueError("shapes do not fit")
            loss.backward()
            if last and interrupted == "backward":
                raise KeyboardInterrupt
            optimizer.step()
            diary.step(loss)
            monitor.log(mine=step)
        return monitor

    monitors = {cell(0, None)}
    for first, interrupted in ((3, "zero_grad"), (5, "forward"), (7, "backward")):
        with pytest.raises((KeyboardInterrupt, ValueError)):
            cell(first, interrupted)
        # The step that was interrupted was not taken.
        assert len(diary.losses) == first + 2
    monitors.add(cell(9, None))
    assert len(monitors) == 1
    diary.check(watching)
    assert len(diary.losses) == 12
    assert watching.points("mine") == {s: float(s) for s in range(12)}


def test_attached_again_after_it_was_closed(watching):
    model = net()
    optimizer = sgd(model)
    first = watching.attach(model, optimizer)
    diary = Diary(model)
    train(model, optimizer, diary, range(3))
    first.close()
    train(model, optimizer, Diary(model), range(3, 5))  # nobody watches
    second = watching.attach(model, optimizer, step=5)
    assert second is not first
    assert second.run == first.run == "run"
    later = Diary(model)
    train(model, optimizer, later, range(5, 8))
    second.close()
    losses = dict(enumerate(diary.losses)) | dict(enumerate(later.losses, start=5))
    assert watching.points("loss") == pytest.approx(losses)
    parameters = dict(enumerate(diary.parameters)) | dict(enumerate(later.parameters, start=5))
    assert watching.digests("parameters") == parameters
    sessions = {}
    for batch in watching.batches():
        sessions.setdefault(batch.session, []).append(batch)
    assert [(b[-1].state, b[-1].through_step) for b in sessions.values()] == [
        ("finished", 2),
        ("finished", 7),
    ]
    assert set(watching.digests("start")) == {0, 5}


def test_the_number_of_a_closed_run_is_free_again(watching):
    pairs = [(model, sgd(model)) for model in (net(0), net(1), net(2))]
    first, second = (watching.attach(*pair) for pair in pairs[:2])
    assert (first.run, second.run) == ("run", "run.2")
    second.close()
    assert watching.attach(*pairs[2]).run == "run.2"


def test_the_first_run_says_where_a_further_model_is_watched(watching):
    pairs = [(model, sgd(model)) for model in (net(0), net(1))]
    monitors = [watching.attach(*pair) for pair in pairs]
    for monitor in monitors:
        monitor.close()
    notes = {
        (batch.run, event.text)
        for batch in watching.batches()
        for event in batch.events
        if event.kind == "agent.note" and "further model" in event.text
    }
    (note,) = notes
    assert note[0] == "run"
    assert "watched as run run.2" in note[1]
    sent = watching.collector.batches
    hellos = {b.run: b.hello.config for b in sent if b.hello is not None}
    assert "first_run" not in hellos["run"]
    assert hellos["run.2"]["first_run"] == "run"


def test_closed_by_a_block(watching):
    model = net()
    optimizer = sgd(model)

    def trained(monitor):
        with monitor:
            train(model, optimizer, Diary(model), range(2))
            raise ZeroDivisionError("of the trainer")

    monitor = watching.attach(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        trained(monitor)
    assert monitor.closed
    last = watching.batches()[-1]
    assert (last.state, last.error, last.through_step) == (
        "failed",
        "ZeroDivisionError: of the trainer",
        1,
    )


def test_marks_and_logs_belong_to_their_step(watching):
    model = net()
    optimizer = sgd(model)
    monitor = watching.attach(model, optimizer)
    monitor.mark("before all")
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        monitor.log(**{"in the middle": loss})
        if step == 2:
            monitor.mark("in the middle")
        loss.backward()
        optimizer.step()
        monitor.log(after=step, bare=torch.tensor([step]))
        if step == 2:
            monitor.mark("after")
    expected = {s: float(s) for s in range(4)}
    assert watching.points("after") == watching.points("bare") == expected
    assert watching.points("in the middle") == pytest.approx(watching.points("loss"))
    assert watching.events("mark") == [(0, "before all"), (2, "in the middle"), (2, "after")]


def test_a_watched_average(watching):
    model = net()
    optimizer = sgd(model)
    average = copy.deepcopy(model)
    monitor = watching.attach(model, optimizer)
    monitor.watch(average, "ema")
    diary, held = Diary(model), []

    def all_of_it():
        tensors = {**dict(average.named_parameters()), **dict(average.named_buffers())}
        return digests_of({f"ema.{name}": tensor for name, tensor in tensors.items()})

    def move(step):
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.1)

    for step in range(4):
        held.append(all_of_it())  # as the step leaves it: it is moved after
        train(model, optimizer, diary, [step], each=move)
    diary.check(watching)
    assert watching.digests("watched") == dict(enumerate(held))
    assert len({tuple(sorted(h.items())) for h in held}) == 4
    assert len(watching.model_digests("watched")) == 4
    tables = watching.tables()
    assert tables["watched/ema"].names == tuple(f"ema.{n}" for n, _ in average.named_parameters())
    assert tables["watched/ema/buffers"].names == tuple(
        f"ema.{n}" for n, _ in average.named_buffers()
    )


def test_declared_replicas(watching):
    model = net()
    optimizer = sgd(model)
    monitor = watching.attach(model, optimizer)
    monitor.replicas("stage 0")
    monitor.replicas("expert 3", "2.*")
    diary = Diary(model)
    train(model, optimizer, diary, range(2))
    diary.check(watching)
    table = watching.tables()["parameters"]
    assert dict(zip(table.names, table.shards, strict=True)) == {
        "0.weight": "stage 0",
        "0.bias": "stage 0",
        "1.weight": "stage 0",
        "1.bias": "stage 0",
        "2.weight": "expert 3",
        "2.bias": "expert 3",
    }


def test_declared_copies_of_its_own(watching):
    model = net()
    optimizer = sgd(model)
    monitor = watching.attach(model, optimizer)
    monitor.replicas(None, "2.*")
    diary = Diary(model)
    train(model, optimizer, diary, range(2))
    diary.check(watching)
    table = watching.tables()["parameters"]
    own = {name for name, shard in zip(table.names, table.shards, strict=True) if shard}
    assert own == {"2.weight", "2.bias"}
    assert set(table.shards) == {"", f"{RANK_LOCAL}{monitor.rank}"}


def test_two_runs_of_ids_made_up_here(watching, capfd):
    """Without a run id each monitor has one of its own, printed once with its address."""
    runs = []
    for seed in range(2):
        model = net(seed)
        monitor = agent.attach(
            model, sgd(model), server=watching.collector.url, spool=watching._options["spool"]
        )
        watching.monitors.append(monitor)
        runs.append(monitor.run)
    assert len(set(runs)) == 2
    watching.close()
    reported = capfd.readouterr().err
    assert [reported.count(f"rankscope: run {run} at ") for run in runs] == [1, 1]


def test_a_cell_that_is_run_again_ends_the_monitor_before(watching, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    first_model, other_model = net(), torch.nn.Linear(2, 2)
    first = watching.attach(first_model, sgd(first_model))
    other = watching.attach(other_model, sgd(other_model))
    again_model = net()
    again = watching.attach(again_model, sgd(again_model))
    assert (first.closed, other.closed, again.closed) == (True, False, False)
