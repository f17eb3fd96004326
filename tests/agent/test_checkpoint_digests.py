"""`monitor.checkpoint`: what is compared after a load, with what, and what is not."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

from rankscope import agent
from rankscope.agent.checkpoint_digests import Place, checkpoint
from rankscope.agent.checkpoints.command import main as verify
from tests.support.jobs.ranks import forked_ranks
from tests.support.jobs.sharded_reload import worker


def made(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return {"model": model.state_dict(), "epochs": [1, 2]}


def at(rank=0, step=5, world_size=1):
    return Place("run", step, rank, world_size)


def test_what_is_loaded_is_what_was_saved(tmp_path):
    path = str(tmp_path / "step5.pt")
    saved = checkpoint(path, made(), at(), loaded=False)
    assert (saved.tensors, saved.same) == (7, False)
    found = checkpoint(path, made(), at(step=0), loaded=True)
    assert found.same
    assert (found.tensors, found.saved) == (7, at())


def test_a_tensor_of_other_bits_is_named(tmp_path):
    path = str(tmp_path / "step5.pt")
    checkpoint(path, made(), at(), loaded=False)
    state = made()
    state["model"]["0.bias"][1] += 1
    state["model"]["1.num_batches_tracked"] += 1
    found = checkpoint(path, state, at(step=0), loaded=True)
    assert found.differing == ("model.0.bias", "model.1.num_batches_tracked")
    assert not found.same
    assert "2 of 7 tensors are not as saved" in str(found)


def test_names_that_wrappers_changed_are_the_same_names(tmp_path):
    path = str(tmp_path / "step5.pt")
    state = made()
    wrapped = {f"module.{name}": tensor for name, tensor in state["model"].items()}
    checkpoint(path, {"model": wrapped}, at(), loaded=False)
    assert checkpoint(path, state, at(step=0), loaded=True).same


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: model.update({"0.bias": model["0.bias"].bfloat16()}), "type is bfloat16"),
        (lambda model: model.update({"0.bias": torch.zeros(5)}), "shape is [5], and was [3]"),
        (lambda model: model.pop("0.bias"), "is not in what was loaded"),
        (lambda model: model.update({"head": torch.zeros(2)}), "it was not saved"),
        (lambda model: model.update({"0.bias": torch.zeros(3).to_sparse()}), "a sparse tensor"),
    ],
)
def test_what_can_be_meant_is_no_difference_and_not_called_the_same(tmp_path, change, why):
    path = str(tmp_path / "step5.pt")
    checkpoint(path, made(), at(), loaded=False)
    state = made()
    change(state["model"])
    found = checkpoint(path, state, at(step=0), loaded=True)
    assert (found.differing, found.same) == ((), False)
    assert [why in text for text in found.unchecked.values()] == [True]


def test_ranks_that_saved_nothing_compare_with_the_one_that_did(tmp_path):
    path = str(tmp_path / "step5.pt")
    checkpoint(path, made(), at(world_size=4), loaded=False)
    for rank in range(4):
        assert checkpoint(path, made(), at(rank, 0, 4), loaded=True).same


def test_digests_of_an_earlier_save_of_more_ranks_do_not_count(tmp_path):
    path = str(tmp_path / "last.pt")
    for rank in range(2):
        checkpoint(path, made(seed=1), at(rank, 5, 2), loaded=False)
    # The job went on with one rank, and wrote over it.
    checkpoint(path, made(seed=2), at(0, 9, 1), loaded=False)
    found = checkpoint(path, made(seed=2), at(1, 0, 2), loaded=True)
    assert found.same
    assert found.saved.step == 9


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "no digests were recorded"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"format": "rankscope digests 9"}', "another version"),
        ('{"format": "rankscope digests 1"}', "damaged"),
    ],
)
def test_without_a_record_nothing_is_called_the_same(tmp_path, content, why):
    path = tmp_path / "step5.pt"
    if content is not None:
        folder = tmp_path / "step5.pt.digests"
        folder.mkdir()
        (folder / "rank_0.json").write_text(content)
    found = checkpoint(str(path), made(), at(), loaded=True)
    assert (found.same, found.tensors, found.saved) == (False, 0, None)
    assert why in found.unchecked[""]


@pytest.mark.parametrize("path", ["s3://bucket/step5.pt", "{}/file/step5.pt"])
def test_where_no_record_can_be_written_is_said(tmp_path, path):
    (tmp_path / "file").write_text("no folder")
    found = checkpoint(path.format(tmp_path), made(), at(), loaded=False)
    assert (found.tensors, found.saved) == (0, None)
    assert found.unchecked[""]


def test_a_file_is_verified_by_its_record(tmp_path, capsys):
    path = tmp_path / "step5.pt"
    state = made()
    torch.save(state, path)
    checkpoint(str(path), state, at(), loaded=False)
    record = f"{path}.digests"
    assert verify([str(path), record]) == 0
    assert verify([record, str(path)]) == 0
    state["model"]["0.weight"][2, 1] = -state["model"]["0.weight"][2, 1]
    del state["model"]["0.bias"]
    torch.save(state, path)
    capsys.readouterr()
    assert verify([str(path), record, "--json"]) == 1
    [group] = json.loads(capsys.readouterr().out)["groups"]
    assert [(d["name"], d["kind"]) for d in group["differences"]] == [
        ("model.0.weight", "elements"),
        ("model.0.bias", "extra"),
    ]
    # Of the folder that both are in, the record is none of the checkpoints.
    other = tmp_path / "copied"
    other.mkdir()
    torch.save(state, other / "step5.pt")
    assert verify([str(tmp_path / "step5.pt"), str(other)]) == 0


def test_arrays_of_numpy(tmp_path):
    path = str(tmp_path / "step5.npz")
    state = {"w": np.arange(6.0).reshape(2, 3).T, "key": np.array([1, 2], ">i4"), "name": "x"}
    saved = checkpoint(path, state, at(), loaded=False)
    assert saved.tensors == 1
    assert "key" in saved.unchecked
    other = copy.deepcopy(state)
    other["w"][0, 0] = 9
    assert checkpoint(path, other, at(), loaded=True).differing == ("w",)


def test_shards_are_compared_where_they_are_the_same_shards(tmp_path):
    forked_ranks(worker, str(tmp_path), ranks=2)
    found = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert [one["same"] for one in found] == [[True, 4]] * 2
    # Rank 1 alone has gone on with a shard of before.
    assert [one["stale"] for one in found] == [[], ["model.0.weight"]]
    assert [one["whole"] for one in found] == [
        ["it is sharded in another way than when it was saved"] * 4
    ] * 2


def test_a_disabled_monitor_writes_nothing(tmp_path):
    with agent.start(mode="disabled") as monitor:
        assert monitor.checkpoint(tmp_path / "step5.pt", made()) is None
    assert list(tmp_path.iterdir()) == []
