"""`rankscope verify` on what several ranks have saved: replicas, shards, parts."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from rankscope.agent.checkpoints.command import main
from tests.support.jobs.ranks import run_ranks

JOB = Path(__file__).parents[2] / "support" / "jobs" / "checkpoint_job.py"
RANKS = 3


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of what the job has saved."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(
        JOB, str(folder), ranks=RANKS, folder=tmp_path_factory.mktemp("logs"), timeout_s=240
    ).check()
    return folder


@pytest.fixture
def copied(job, tmp_path):
    """A copy of a folder of the job, to break."""

    def copy(name):
        return Path(shutil.copytree(job / name, tmp_path / name.replace("/", "-")))

    return copy


@pytest.fixture
def verify(capsys):
    def call(*arguments):
        code = main([*map(str, arguments)])
        text, complaint = capsys.readouterr()
        main([*map(str, arguments), "--json"])
        printed = capsys.readouterr().out
        return code, text, json.loads(printed) if printed else None, complaint

    return call


def differences(found):
    return {d["name"]: d for group in found["groups"] for d in group["differences"]}


def edit(path, change):
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def test_folders_of_ranks_are_compared_by_name(job, copied, verify):
    other = copied("ddp/3")
    # The same ranks, under names that are written another way.
    for rank in range(RANKS):
        (other / f"rank_{rank}.pt").rename(other / f"Rank0{rank}.pth")
    code, text, found, _ = verify(job / "ddp/3", other)
    assert code == 0, text
    assert f"in {RANKS} files each" in text
    edit(other / "Rank01.pth", lambda state: state["model"]["module.2.bias"].add_(1))
    code, text, found, _ = verify(job / "ddp/3", other)
    assert code == 1
    assert list(differences(found)) == ["model.module.2.bias"]
    assert "All differences are in rank_1.pt." in text
    (other / "Rank02.pth").unlink()
    code, text, found, _ = verify(job / "ddp/3", other)
    assert [one["member"] for one in found["missing"]] == ["rank_2.pt"]


def test_replicas_of_one_step_agree(job, verify):
    for how in ([job / "ddp/4"], [job / "ddp/4" / f"rank_{r}.pt" for r in range(RANKS)]):
        code, text, found, _ = verify("--replicas", *how)
        assert code == 0, text
        assert found["groups"][0]["suspects"] == []


def test_one_flipped_bit_of_one_replica(copied, verify):
    folder = copied("ddp/4")

    def flip(state):
        state["model"]["module.0.weight"].view(torch.int32)[2, 1] ^= 1 << 12

    edit(folder / "rank_0.pt", flip)
    code, text, found, _ = verify("--replicas", folder)
    assert code == 1
    assert found["groups"][0]["suspects"] == ["rank_0.pt"]
    ((name, difference),) = differences(found).items()
    assert (name, difference["elements"]["first"]) == ("model.module.0.weight", [2, 1])
    assert difference["elements"]["flipped_bit"] == {"bit": 12, "part": "fraction"}
    assert "Suspect: rank_0.pt; the other 2 of 3 replicas agree." in text
    # Of two, nothing tells which one it is.
    (folder / "rank_2.pt").unlink()
    code, text, found, _ = verify("--replicas", folder)
    assert (code, found["groups"][0]["suspects"]) == (1, [])
    assert "nothing tells which one is wrong" in text


def test_one_rank_that_has_loaded_another_step(job, verify):
    code, text, found, _ = verify("--replicas", job / "ddp/resumed")
    assert code == 1
    assert found["groups"][0]["suspects"] == ["rank_2.pt"]
    assert "step: 4 in rank_0.pt, rank_1.pt; 3 in rank_2.pt - they are of different steps" in text
    assert "optimizer.state.*.step: 4 in rank_0.pt, rank_1.pt; 3 in rank_2.pt" in text
    # Ranks that are no replicas of each other, or one alone, are no answer.
    assert verify("--replicas", job / "ddp/3" / "rank_0.pt")[0] == 2


def test_a_replica_and_its_plain_model(job, verify, tmp_path):
    """DDP's `module.` makes no other tensors of them."""
    state = torch.load(job / "ddp/3" / "rank_0.pt", weights_only=True)
    plain = {k.removeprefix("module."): v for k, v in state["model"].items()}
    torch.save({**state, "model": plain}, tmp_path / "plain.pt")
    code, text, found, _ = verify(job / "ddp/3" / "rank_0.pt", tmp_path / "plain.pt")
    assert code == 0, text
    assert found["groups"][0]["renamed"] == 4


def test_distributed_checkpoints_need_no_process_group(job, copied, verify):
    assert not torch.distributed.is_initialized()
    code, text, found, _ = verify(job / "fsdp/4", copied("fsdp/4"))
    assert code == 0, text
    assert "step: 4\n" in text
    assert "optimizer.state.*.step: 4\n" in text
    assert found["groups"][0]["checkpoints"][0]["format"] == "torch.distributed.checkpoint"
    assert {"model.0.weight", "optimizer.state.2.bias.exp_avg"} <= set(
        found["groups"][0]["digests"]
    )


def test_the_tensors_of_a_distributed_checkpoint_are_whole(job, verify, tmp_path):
    """The shards together are what the ranks hold: the same as one file, whatever the sharding."""
    parts = [
        torch.load(job / "parts/4" / f"rank_{r}.pt", weights_only=True)["model"]
        for r in range(RANKS)
    ]
    whole = {n: torch.cat([part[n]._local_tensor for part in parts]) for n in parts[0]}
    torch.save({"model": whole}, tmp_path / "whole.pt")
    ignored = ("--ignore", "optimizer.*", "--ignore", "step")
    code, text, found, _ = verify(job / "fsdp/4", tmp_path / "whole.pt", *ignored)
    assert code == 0, text
    assert found["groups"][0]["tensors"] == 4


def test_one_stale_shard(job, copied, verify):
    other = copied("fsdp/4")
    shutil.copy(job / "fsdp/3" / "__1_0.distcp", other)
    code, text, found, _ = verify(job / "fsdp/4", other)
    assert code == 1
    assert {
        f for d in differences(found).values() for f in d.get("elements", {"files": ()})["files"]
    } == {"__1_0.distcp"}
    # Values that are no tensors are in files of ranks, too.
    values = [d for d in differences(found).values() if d["kind"] == "value"]
    assert all(d["note"] == "in __1_0.distcp" for d in values)
    assert "All tensors that differ do so in __1_0.distcp alone." in text
    weight = differences(found)["model.0.weight"]["elements"]
    # Rows 4 to 7 of 12 are those of the second rank.
    assert (weight["first"][0], weight["differing"], weight["total"]) == (4, 4 * 8, 12 * 8)


def test_shards_that_are_missing_cut_off_or_not_all_written(copied, verify):
    other = copied("fsdp/4")
    os.truncate(other / "__2_0.distcp", 2000)
    code, _, _, complaint = verify(other, other)
    assert code == 2
    assert "__2_0.distcp: the file is cut off" in complaint
    (other / "__2_0.distcp").unlink()
    code, _, _, complaint = verify(other, other)
    assert (code, "__2_0.distcp" in complaint, "not there" in complaint) == (2, True, True)
    (other / ".metadata").unlink()
    code, _, _, complaint = verify(other, other)
    assert (code, "it has not ended" in complaint) == (2, True)


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_damaged_shard_does_not_hide_what_differs_elsewhere(job, copied, verify):
    other = copied("fsdp/4")
    shutil.copy(job / "fsdp/3" / "__1_0.distcp", other)
    metadata = pickle.loads((other / ".metadata").read_bytes())
    index = MetadataIndex("model.0.bias", (0,))
    with (other / "__0_0.distcp").open("r+b") as file:
        file.seek(metadata.storage_data[index].offset)
        file.write(bytes(200))
    code, text, found, _ = verify(job / "fsdp/4", other)
    assert code == 1
    assert "model.0.weight" in differences(found)
    (unread,) = found["groups"][0]["not_compared"]
    assert unread["name"] == "model.0.bias"
    assert "__0_0.distcp" in unread["why"]


def test_metadata_that_would_run_code_are_not_loaded(copied, verify, tmp_path):
    other = copied("fsdp/4")
    (other / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "run")))
    code, _, _, complaint = verify(other, other)
    assert code == 2
    assert "mkdir" in complaint
    assert not (tmp_path / "run").exists()


def test_metadata_do_not_lead_out_of_the_folder(copied, verify, tmp_path):
    other = copied("fsdp/4")
    metadata = pickle.loads((other / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = f"../{stored.relative_path}"
    (other / ".metadata").write_bytes(pickle.dumps(metadata))
    code, _, _, complaint = verify(other, other)
    assert (code, "not in the folder" in complaint) == (2, True)


def test_parts_that_ranks_have_saved_by_themselves(job, verify):
    """Files with distributed tensors: each has its rank's part, and no process group is needed."""
    code, text, _, _ = verify(job / "parts/3", job / "parts/3")
    assert code == 0, text
    code, text, found, _ = verify(job / "parts/3", job / "parts/4")
    assert code == 1
    assert text.count("step: 3 in A; 4 in B - they are of different steps") == RANKS
    weights = [
        d for g in found["groups"] for d in g["differences"] if d["name"].endswith("0.weight")
    ]
    assert [d["elements"]["total"] for d in weights] == [4 * 8] * RANKS
