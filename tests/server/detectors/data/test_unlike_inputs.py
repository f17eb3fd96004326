"""Ranks whose inputs are of another kind, through the agent's own moments of real data."""

import argparse
import inspect

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, load_wine

from rankscope.agent.probes.data.moments import InputMoments
from rankscope.server.detectors.data.outlier import DataOutlier
from tests.support.judging import judge
from tests.support.runs.traces import Trace

DIGITS = torch.tensor(load_digits().data, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
# Characters of a real text, as numbers below 96.
TEXT = torch.tensor([ord(c) % 96 for c in inspect.getsource(argparse)][:80_000])


def run(*kinds, steps=96, batch=16, shards=None, loss=None, seed=0, every=1):
    """The moments of what each rank draws: `kinds` are what each makes of a batch and its step."""
    generator = torch.Generator().manual_seed(seed)
    taken = InputMoments()
    series = {}
    for rank, kind in enumerate(kinds):
        shard = DIGITS if shards is None else shards[rank]
        for step in range(steps):
            drawn = torch.randint(0, len(shard), (batch,), generator=generator)
            name, found = taken.of([kind(shard[drawn], step)])
            for n, value in enumerate(found.tolist()):
                series.setdefault(f"{name}/{n}", np.zeros((len(kinds), steps)))[rank, step] = value
    shape = (len(kinds), steps)
    random = np.random.default_rng(1)
    series["loss"] = np.ones(shape) if loss is None else np.tile(loss, (len(kinds), 1))
    series["loss"] = series["loss"] * np.exp(0.03 * random.standard_normal(shape))
    series["samples"] = np.full(shape, float(batch))
    present = np.tile(np.arange(steps) % every == 0, (len(kinds), 1))
    where = {name: np.ones_like(present) if name == "loss" else present for name in series}
    return Trace("inputs", 0, np.arange(steps), series, present=where)


def alerts(*kinds, cuts=(), **options):
    return judge(run(*kinds, **options), [DataOutlier()], cuts).alerts


def plain(batch, step):
    return batch


def since(step, change):
    return lambda batch, now: change(batch) if now >= step else batch


CHANGES = {
    "mirrored": lambda batch: batch.flip(-1),
    "shifted": lambda batch: batch.roll(1, -1),
    "transposed": lambda batch: batch.transpose(-1, -2),
    "columns": lambda batch: batch.flatten(1)[:, torch.randperm(64, generator=seeded())],
    "half": lambda batch: batch * (torch.arange(8) < 4),
}


# By as much as digits of different writers.
REMARKS = ("mirrored",)


def seeded():
    return torch.Generator().manual_seed(3)


def test_what_a_stage_of_a_pipeline_receives_is_no_data():
    trace = run(plain, plain, since(0, CHANGES["half"]))
    assert judge(trace, [DataOutlier()]).alerts
    trace.series["input_received"] = np.ones_like(trace.series["loss"])
    assert not judge(trace, [DataOutlier()]).alerts


@pytest.mark.parametrize("change", CHANGES)
def test_one_rank_of_three_makes_other_inputs_of_the_same_data(change):
    (alert,) = alerts(plain, plain, since(0, CHANGES[change]))
    severity = "info" if change in REMARKS else "warning"
    assert (alert.kind, alert.severity, alert.state) == ("data.outlier", severity, "open")
    assert (alert.ranks, alert.first_step, alert.stage) == ((2,), 0, "batch")
    assert alert.title == "The inputs of rank 2 are of another kind than the others'"
    assert "standard deviations of a single sample" in alert.cause
    assert alert.evidence["distance"] > 0.4


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("others", [1, 3])
def test_since_the_step_at_which_it_began(others, every):
    kinds = (since(60, CHANGES["transposed"]), *[plain] * others)
    (alert,) = alerts(*kinds, steps=200, every=every)
    assert alert.ranks == (0,)
    assert alert.severity == "warning"
    assert 58 <= alert.first_step <= 64
    assert f"since step {alert.first_step}" in alert.title


def test_of_two_ranks_from_the_start_both_are_named():
    (alert,) = alerts(plain, since(0, CHANGES["mirrored"]))
    assert (alert.severity, alert.ranks) == ("info", (0, 1))
    assert "rank 0 and 1" not in alert.title
    (alert,) = alerts(plain, since(0, CHANGES["transposed"]))
    assert (alert.severity, alert.ranks, alert.first_step) == ("warning", (0, 1), 0)
    assert "are not of one kind" in alert.title


def test_tokens_of_another_vocabulary():
    text = TEXT.reshape(-1, 40)
    other = torch.randperm(96, generator=seeded())
    kinds = (plain, lambda batch, step: other[batch], plain)
    (alert,) = alerts(*kinds, shards=[text] * 3)
    assert (alert.severity, alert.ranks, alert.first_step) == ("warning", (1,), 0)
    assert "tokenizer" in alert.cause
    assert alerts(plain, plain, plain, shards=[text[::3], text[1::3], text[2::3]]) == ()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_shards_of_the_same_data_are_alike(ranks, seed):
    order = torch.randperm(len(DIGITS), generator=torch.Generator().manual_seed(seed))
    shards = [DIGITS[order[rank::ranks]] for rank in range(ranks)]
    assert alerts(*[plain] * ranks, shards=shards, seed=seed) == ()


@pytest.mark.parametrize("seed", range(4))
def test_a_few_samples_of_each_rank_are_not_enough_to_tell(seed):
    """Shards of 30 differ by chance; that they come again is known from the samples' hashes."""
    order = torch.randperm(len(DIGITS), generator=torch.Generator().manual_seed(seed))
    shards = [DIGITS[order[30 * rank : 30 * rank + 30]] for rank in range(3)]
    made = run(plain, plain, plain, shards=shards, seed=seed)
    lengths = np.full(made.series["loss"].shape, 2.0)
    present = {**made.present, "loader_batches": np.ones(lengths.shape, dtype=bool)}
    made = Trace("few", 0, made.steps, {**made.series, "loader_batches": lengths}, present=present)
    assert judge(made, [DataOutlier()]).alerts == ()


def test_ranks_that_each_read_a_class_of_their_own_are_no_single_one():
    wine = load_wine()
    data = torch.tensor((wine.data - wine.data.mean(0)) / wine.data.std(0), dtype=torch.float32)
    shards = [data[wine.target == n] for n in range(3)]
    assert alerts(plain, plain, plain, shards=shards) == ()


@pytest.mark.parametrize("cuts", [(), range(0, 200, 7)], ids=["one", "many"])
def test_all_inputs_change_and_the_loss_rises_with_them(cuts):
    each = np.arange(200)
    kinds = [since(100, CHANGES["transposed"])] * 2
    loss = np.where(each >= 100, 1.4, 1.0)
    (alert,) = alerts(*kinds, steps=200, loss=loss, cuts=cuts)
    assert (alert.severity, alert.ranks, alert.first_step) == ("warning", (), 100)
    assert "The loss went from 1 to 1.4" in alert.cause or "1.4" in alert.cause
    assert alert.evidence["loss_after"] == pytest.approx(1.4, rel=0.05)
    # A curriculum that the model copes with need not be told.
    assert alerts(*kinds, steps=200, cuts=cuts) == ()


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_that_rises_by_itself_is_not_put_down_to_the_inputs(seed):
    loss = np.where(np.arange(200) >= 100, 3.0, 1.0)
    assert alerts(plain, plain, steps=200, loss=loss, seed=seed) == ()
