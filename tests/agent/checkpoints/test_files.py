"""`rankscope verify` on files: what a training of one process has saved, whole and broken."""

import copy
import json
import os
import shutil
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from rankscope.agent.checkpoints import opening
from rankscope.agent.checkpoints.command import main
from rankscope.agent.fingerprint import FingerprintPlan
from rankscope.agent.model import state_names


def differences(found):
    return {d["name"]: d for group in found["groups"] for d in group["differences"]}


def test_the_same_checkpoint_saved_twice_in_two_formats(saved, verify):
    code, text, found, _ = verify(
        saved("a.pt"), saved("b.pt", _use_new_zipfile_serialization=False)
    )
    assert code == 0
    assert text.startswith("The same: ")
    assert "step: 3\n" in text
    assert "optimizer.state.*.step: 3\n" in text
    (group,) = found["groups"]
    assert found["same"] is True
    assert {"model.0.weight", "optimizer.state.0.exp_avg", "rng", "numpy.1"} <= set(
        group["digests"]
    )
    assert group["values"] > 10


def test_the_digests_are_those_that_the_agent_sends(saved, verify, trained):
    _, _, found, _ = verify(saved("a.pt"), saved("b.pt"))
    weight = trained[0]["model"]["0.weight"]
    plan = FingerprintPlan(("0.weight",), (weight,))
    expected = f"{int(plan.compute((weight,), sketches=False).digests[0]):016x}"
    assert found["groups"][0]["digests"]["model.0.weight"] == [expected, expected]


@pytest.mark.parametrize(("bit", "part"), [(30, "exponent"), (31, "sign"), (0, "fraction")])
def test_one_flipped_bit(saved, verify, trained, bit, part):
    other = copy.deepcopy(trained[0])
    flipped = other["model"]["0.weight"].view(torch.int32)
    flipped[3, 5] ^= 1 << bit if bit < 31 else -(2**31)
    code, text, found, _ = verify(saved("a.pt"), saved("b.pt", other))
    assert code == 1
    ((name, difference),) = differences(found).items()
    assert name == "model.0.weight"
    elements = difference["elements"]
    assert (elements["differing"], elements["total"], elements["first"]) == (1, 128, [3, 5])
    assert elements["flipped_bit"] == {"bit": bit, "part": part}
    a, b = (s["model"]["0.weight"].double() for s in (trained[0], other))
    assert elements["at_first"] == [a[3, 5].item(), b[3, 5].item()]
    assert elements["largest"] == (a - b).abs().max().item()
    assert elements["relative"] == pytest.approx(((a - b).norm() / a.norm()).item(), rel=1e-9)
    assert f"one flipped bit: bit {bit} ({part})" in text


def test_another_step(saved, verify, trained):
    code, text, found, _ = verify(saved("a.pt"), saved("b.pt", trained[1]))
    assert code == 1
    assert "step: 3 in A; 4 in B - they are of different steps" in text
    assert "optimizer.state.*.step: 3 in A; 4 in B - they are of different steps" in text
    steps = [c["steps"] for c in found["groups"][0]["checkpoints"]]
    assert [(s["step"], s["optimizer.state.*.step"]) for s in steps] == [
        ([3, 3], [3, 3]),
        ([4, 4], [4, 4]),
    ]
    assert differences(found)["step"]["kind"] == "value"
    # A counter of one element differs; that is no flipped bit.
    assert differences(found)["optimizer.state.0.step"]["elements"]["flipped_bit"] is None
    assert "more: --json has all of them" in text


def test_bits_of_nan_and_zero(saved, verify):
    def numbers(*values):
        return {"x": torch.tensor(values)}

    other_nan = numbers(0.0, 0.0)
    other_nan["x"].view(torch.int32)[1] = 0x7FC00001
    first = saved("a.pt", numbers(0.0, float("nan")))
    code, _, found, _ = verify(first, saved("b.pt", other_nan))
    elements = differences(found)["x"]["elements"]
    assert (code, elements["differing"], elements["nonfinite"]) == (1, 1, 1)
    assert elements["at_first"] == ["NaN", "NaN"]
    assert verify(saved("a.pt", {"x": float("nan")}), saved("b.pt", {"x": float("nan")}))[0] == 0
    code, text, found, _ = verify(
        saved("a.pt", numbers(0.0, float("nan"))), saved("b.pt", numbers(-0.0, float("nan")))
    )
    assert code == 1
    elements = differences(found)["x"]["elements"]
    assert (elements["differing"], elements["largest"], elements["nonfinite"]) == (1, 0.0, 0)
    assert "in bits alone" in text
    code, _, found, _ = verify(
        saved("a.pt", numbers(1.0, 2.0)), saved("b.pt", numbers(1.5, float("inf")))
    )
    elements = differences(found)["x"]["elements"]
    assert (elements["differing"], elements["largest"], elements["nonfinite"]) == (2, 0.5, 1)
    assert code == 1


def test_missing_extra_shape_dtype_and_type(saved, verify, trained):
    other = copy.deepcopy(trained[0])
    del other["model"]["0.bias"]
    other["model"]["head"] = torch.zeros(2)
    other["model"]["2.weight"] = other["model"]["2.weight"].t()
    other["model"]["2.bias"] = other["model"]["2.bias"].bfloat16()
    other["optimizer"]["param_groups"][0]["lr"] = 1e-2
    other["step"] = torch.tensor(3)
    code, text, found, _ = verify(saved("a.pt"), saved("b.pt", other))
    assert code == 1
    assert {n: d["kind"] for n, d in differences(found).items()} == {
        "model.0.bias": "missing",
        "model.head": "extra",
        "model.2.weight": "shape",
        "model.2.bias": "dtype",
        "optimizer.param_groups.0.lr": "value",
        "step": "type",
    }
    assert "model.0.bias: missing in B; float32 [16] in A" in text
    assert "another shape, float32 [4, 16] in A and float32 [16, 4] in B" in text
    assert "the values are the same once converted to bfloat16" in text
    assert "optimizer.param_groups.0.lr: 0.001 in A, 0.01 in B" in text
    # What is to be left out is left out.
    ignored = ("--ignore", "model.*", "--ignore", "optimizer.param_groups*", "--ignore", "step")
    assert verify(saved("a.pt"), saved("b.pt", other), *ignored)[0] == 0


def test_names_inside_wrappers_are_the_same_names(saved, verify, trained):
    other = copy.deepcopy(trained[0])
    wrapped = {f"module._orig_mod.{k}": v for k, v in other["model"].items()}
    other["model"] = wrapped
    code, text, found, _ = verify(saved("a.pt"), saved("b.pt", other))
    assert code == 0
    assert found["groups"][0]["renamed"] == len(wrapped)
    assert f"{len(wrapped)} names differ in what wrappers put into them" in text
    # Where it leaves a choice, nothing is guessed.
    other["model"] = {**wrapped, "module.0.bias": wrapped["module._orig_mod.0.bias"]}
    code, _, found, _ = verify(saved("a.pt"), saved("b.pt", other))
    assert code == 1
    assert {d["kind"] for d in differences(found).values()} == {"missing", "extra"}


def test_nested_names_do_not_hide_each_other(saved, verify):
    one = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}
    other = {"a.b": torch.zeros(2), "a": {"b": torch.full((2,), 2.0)}}
    code, _, found, _ = verify(saved("a.pt", one), saved("b.pt", other))
    assert (code, list(differences(found))) == (1, ["a.b#2"])


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_that_is_cut_off(saved, verify, legacy):
    whole = saved("a.pt", _use_new_zipfile_serialization=not legacy)
    cut = saved("b.pt", _use_new_zipfile_serialization=not legacy)
    os.truncate(cut, os.path.getsize(cut) - 300)
    code, text, _, complaint = verify(whole, cut)
    assert (code, text) == (2, "")
    assert cut in complaint
    assert "cut off" in complaint


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_that_would_run_code_is_not_loaded(saved, verify, tmp_path, legacy):
    trap = tmp_path / "run"
    evil = saved("b.pt", {"x": Code(trap)}, _use_new_zipfile_serialization=not legacy)
    code, text, _, complaint = verify(saved("a.pt"), evil)
    assert (code, text) == (2, "")
    assert evil in complaint
    assert "mkdir" in complaint
    assert "would run code" in complaint
    assert not trap.exists()
    # Both the same makes it no better: it was not read.
    assert verify(evil, evil)[0] == 2


def test_what_is_no_checkpoint(saved, verify, tmp_path, capsys):
    text = tmp_path / "notes.txt"
    text.write_text("nothing")
    for path in (text, tmp_path / "nowhere.pt", tmp_path):
        code, _, _, complaint = verify(path, path)
        assert (code, str(path) in complaint) == (2, True)
    with pytest.raises(SystemExit) as ended:
        main([saved("a.pt")])
    assert ended.value.code == 2
    assert "--replicas" in capsys.readouterr().err


@pytest.fixture
def tensors(trained):
    return {k: v.clone() for k, v in trained[0]["model"].items() if v.dim()}


def test_safetensors_are_compared_with_each_other_and_with_files_of_torch(
    saved, verify, tmp_path, tensors
):
    tensors["half"] = tensors["0.weight"].bfloat16()
    one, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(tensors, one, metadata={"format": "pt", "step": "3"})
    code, text, found, _ = verify(one, saved("a.pt", {**tensors, "__metadata__": {"step": "3"}}))
    assert code == 0, text
    assert "step: 3\n" in text
    changed = {**tensors, "half": tensors["half"].clone()}
    changed["half"][0, 0] += 1
    save_file(changed, other, metadata={"step": "4"})
    code, text, found, _ = verify(one, other)
    assert (code, list(differences(found))) == (1, ["half", "__metadata__.step"])
    assert "3 in A; 4 in B - they are of different steps" in text
    os.truncate(other, os.path.getsize(other) - 10)
    code, _, _, complaint = verify(one, other)
    assert (code, str(other) in complaint) == (2, True)


def sharded(folder, tensors, write):
    """The tensors in two files and an index, as Transformers writes them."""
    folder.mkdir()
    names = sorted(tensors)
    suffix, stem = (".safetensors", "model") if write is save_file else (".bin", "pytorch_model")
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"{stem}-{number:05d}-of-00002{suffix}"
        write({n: tensors[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return weight_map


@pytest.mark.parametrize("write", [save_file, torch.save], ids=["safetensors", "torch"])
def test_sharded_files_with_an_index(verify, tmp_path, tensors, write):
    sharded(tmp_path / "a", tensors, write)
    changed = {**tensors, "2.bias": tensors["2.bias"] + 1}
    where = sharded(tmp_path / "b", changed, write)["2.bias"]
    # The same tensors in one file are the same.
    save_file(tensors, tmp_path / "whole.safetensors")
    assert verify(tmp_path / "a", tmp_path / "whole.safetensors")[0] == 0
    code, text, found, _ = verify(tmp_path / "a", tmp_path / "b")
    assert (code, list(differences(found))) == (1, ["2.bias"])
    assert f"All tensors that differ do so in {where} alone." in text
    (tmp_path / "b" / where).unlink()
    code, _, _, complaint = verify(tmp_path / "a", tmp_path / "b")
    assert (code, where in complaint) == (2, True)


def test_an_index_does_not_lead_out_of_its_folder(verify, tmp_path, tensors):
    sharded(tmp_path / "a", tensors, save_file)
    save_file(tensors, tmp_path / "elsewhere.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "../elsewhere.safetensors")}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    code, _, _, complaint = verify(tmp_path / "a", tmp_path / "a")
    assert (code, "not in the folder" in complaint) == (2, True)


def test_a_folder_of_several_files_one_of_which_cannot_be_read(verify, tmp_path, trained):
    """As Trainer of Transformers saves: model, optimizer, and arguments that are code."""
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        weights = {k: v.contiguous() for k, v in trained[0]["model"].items()}
        save_file(weights, folder / "model.safetensors")
        torch.save(trained[0]["optimizer"], folder / "optimizer.pt")
        torch.save(Code(tmp_path / "run"), folder / "training_args.bin")
        (folder / "trainer_state.json").write_text("{}")
    code, text, found, _ = verify(tmp_path / "a", tmp_path / "b")
    assert code == 2
    assert text.startswith("Not known: ")
    assert [n["member"] for n in found["not_compared"]] == ["training_args.bin"]
    assert "--ignore training_args.bin" in text
    assert "trainer_state.json" in text
    ignored = ("--ignore", "training_args.bin")
    assert verify(tmp_path / "a", tmp_path / "b", *ignored)[0] == 0
    # What differs is known all the same.
    torch.save(trained[1]["optimizer"], tmp_path / "b" / "optimizer.pt")
    code, text, _, _ = verify(tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "All differences are in optimizer.pt." in text
    (tmp_path / "b" / "optimizer.pt").unlink()
    code, text, _, _ = verify(tmp_path / "a", tmp_path / "b", *ignored)
    assert code == 1
    assert f"optimizer.pt is missing in {tmp_path / 'b'}" in text


def test_a_folder_with_one_checkpoint_and_that_checkpoint(saved, verify, tmp_path, trained):
    (tmp_path / "folder").mkdir()
    saved("folder/model.pt")
    assert verify(tmp_path / "folder", saved("b.ckpt"))[0] == 0
    assert verify(saved("b.ckpt", trained[1]), tmp_path / "folder")[0] == 1


def test_members_of_other_names_are_not_taken_for_each_other(saved, verify, tmp_path):
    for name in ("a/rank_0.pt", "a/rank_1.pt", "b/rank_0.pt", "b/rank_2.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        saved(name)
    code, text, found, _ = verify(tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert [one["member"] for one in found["missing"]] == ["rank_1.pt", "rank_2.pt"]
    assert "2 files missing in one" in text


def test_what_is_no_checkpoint_in_a_folder_is_passed_over_and_what_is_damaged_is_not(
    saved, verify, tmp_path
):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        saved(f"{name}/pytorch_model.bin")
        (tmp_path / name / "tokenizer.bin").write_bytes(b"tokens")
        (tmp_path / name / "archive.zip").write_bytes(b"PK\x03\x04 of something else")
    code, text, found, _ = verify(tmp_path / "a", tmp_path / "b")
    assert code == 0, text
    assert found["passed_over"] == ["archive.zip", "tokenizer.bin"]
    # A file of zeros, as a full disk leaves it.
    for name in ("a", "b"):
        (tmp_path / name / "rank_0.pt").write_bytes(bytes(4096))
    code, text, found, _ = verify(tmp_path / "a", tmp_path / "b")
    assert code == 2
    assert [one["member"] for one in found["not_compared"]] == ["rank_0.pt"]


def test_long_answers_end(saved, verify, tmp_path):
    for name, value in (("a", 0.0), ("b", 1.0)):
        (tmp_path / name).mkdir()
        for rank in range(40):
            saved(f"{name}/rank_{rank}.pt", {"x": torch.full((3,), value), "step": rank})
    code, text, found, _ = verify(tmp_path / "a", tmp_path / "b")
    assert (code, len(found["groups"])) == (1, 40)
    assert len(text.splitlines()) < 120
    assert "and 20 more files" in text


def test_the_folder_where_one_is(verify, tmp_path, tensors, monkeypatch):
    sharded(tmp_path / "a", tensors, save_file)
    monkeypatch.chdir(tmp_path / "a")
    code, text, _, complaint = verify(".", tmp_path / "a")
    assert code == 0, complaint
    assert "A and B are the same path" in text


def test_arrays_of_numpy_and_empty_containers(saved, verify):
    def arrays(last, empty):
        return {
            "big": np.arange(4, dtype=">f4"),
            "number": np.array(2.5),
            "names": np.array(["a", last]),
            "none": empty,
        }

    first = saved("a.pt", arrays("b", {}))
    code, text, found, _ = verify(first, saved("b.pt", arrays("b", OrderedDict())))
    assert code == 0, text
    assert set(found["groups"][0]["digests"]) == {"big", "number"}
    code, _, found, _ = verify(first, saved("b.pt", arrays("c", [])))
    assert (code, set(differences(found))) == (1, {"names", "none"})


def test_lists_that_double_the_values_at_each_level_end(saved, verify, monkeypatch):
    monkeypatch.setattr(state_names, "_MOST_SHARED", 2000)
    value = [1, 2]
    for _ in range(40):
        value = [value, value]
    path = saved("a.pt", {"model": value})
    code, _, _, complaint = verify(path, path)
    assert (code, path in complaint, "again and again" in complaint) == (2, True, True)
    # Many values, and a list that is there twice, are no such thing.
    few = list(range(900))
    path = saved("a.pt", {"many": list(range(5000)), "one": few, "two": few})
    code, _, found, _ = verify(path, path)
    assert (code, found["groups"][0]["values"]) == (0, 6800)


def sharded_with_more(folder, value):
    """One save of torch.distributed.checkpoint, and what a framework puts beside and below it."""
    dcp.save({"w": torch.ones(8)}, checkpoint_id=folder, no_dist=True)
    torch.save({"iteration": value}, folder / "common.pt")
    (folder / "rng").mkdir()
    torch.save(torch.full((3,), value), folder / "rng" / "rank0.pt")
    (folder / "notes.txt").write_text("nothing")
    # Left by a save of more ranks.
    (folder / "__7_0.distcp").write_bytes(b"PK\x03\x04 and so on")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_beside_the_shards_of_a_distributed_checkpoint(verify, tmp_path):
    for name, value in (("a", 1), ("same", 1), ("b", 2)):
        sharded_with_more(tmp_path / name / "inner", value)
    for below in ("", "inner"):
        a, same, b = (tmp_path / name / below for name in ("a", "same", "b"))
        inside = "" if below else "inner/"
        code, text, found, _ = verify(a, same)
        assert code == 0, text
        assert "3 files each" in text
        assert found["passed_over"] == [f"{inside}__7_0.distcp", f"{inside}notes.txt"]
        code, text, found, _ = verify(a, b)
        assert code == 1
        assert set(differences(found)) == {"iteration", ""}
        differing = {g["member"] for g in found["groups"] if g["differences"]}
        assert differing == {f"{inside}common.pt", f"{inside}rng/rank0.pt"}
    # The shards are the whole where the other has nothing else; a file less is a difference.
    shutil.rmtree(tmp_path / "b" / "inner")
    dcp.save({"w": torch.ones(8)}, checkpoint_id=tmp_path / "b" / "inner", no_dist=True)
    code, _, found, _ = verify(tmp_path / "a" / "inner", tmp_path / "b" / "inner")
    assert (code, [g["member"] for g in found["groups"]]) == (1, ["."])
    assert [one["member"] for one in found["missing"]] == ["common.pt", "rng/rank0.pt"]
    # What is beside metadata that cannot be read is compared all the same.
    for name in ("a", "same"):
        (tmp_path / name / "inner" / ".metadata").write_bytes(b"no pickle")
    code, text, found, _ = verify(tmp_path / "a" / "inner", tmp_path / "same" / "inner")
    assert (code, [one["member"] for one in found["not_compared"]]) == (2, ["."])
    assert [g["member"] for g in found["groups"]] == ["common.pt", "rng/rank0.pt"]


def test_linked_folders_are_entered(saved, verify, tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / f"{name}-stored").mkdir()
        saved(f"{name}/trainer.pt", {"step": 5})
        saved(f"{name}-stored/model.pt", {"w": torch.full((4,), value)})
        (tmp_path / name / "model").symlink_to(tmp_path / f"{name}-stored")
        # Back to where it began, directly and through another folder.
        (tmp_path / name / "inner" / "up").symlink_to("..")
        (tmp_path / f"{name}-stored" / "up").symlink_to(tmp_path / name)
    code, text, found, _ = verify(tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert list(differences(found)) == ["w"]
    assert [g["member"] for g in found["groups"]] == ["trainer.pt", "model/model.pt"]
    # A folder that is there twice is compared twice, as where it is no link.
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a-stored")
    code, text, found, _ = verify(tmp_path / "a", tmp_path / "a")
    assert len(found["groups"]) == 3


def test_links_that_double_the_folders_at_each_level_end(saved, verify, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "_MOST_FOLDERS", 2000)
    for level in range(40):
        (tmp_path / "levels" / str(level)).mkdir(parents=True)
        for link in "ab":
            (tmp_path / "levels" / str(level) / link).symlink_to(
                tmp_path / "levels" / str(level + 1)
            )
    (tmp_path / "levels" / "40").mkdir()
    saved("levels/40/model.pt")
    code, _, _, complaint = verify(tmp_path / "levels" / "0", tmp_path / "levels" / "0")
    assert (code, "folders" in complaint) == (2, True)


def test_what_a_folder_names_and_cannot_be_read_is_not_passed_over_in_silence(
    saved, verify, tmp_path, monkeypatch
):
    for name in ("a", "b"):
        (tmp_path / name / "inner").mkdir(parents=True)
        saved(f"{name}/model.pt")
        os.mkfifo(tmp_path / name / "pipe.pt")
        (tmp_path / name / "nothing").symlink_to("nowhere")
    code, text, found, _ = verify(tmp_path / "a", tmp_path / "b")
    assert (code, found["passed_over"]) == (0, ["nothing", "pipe.pt"])
    for name in ("a", "b"):
        (tmp_path / name / "optimizer.pt").symlink_to("nowhere.pt")
    code, text, found, _ = verify(tmp_path / "a", tmp_path / "b")
    assert (code, [one["member"] for one in found["not_compared"]]) == (2, ["optimizer.pt"])
    scandir = os.scandir

    def refused(path):
        if os.fspath(path).endswith("inner"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    code, _, _, complaint = verify(tmp_path / "a", tmp_path / "b")
    assert (code, "Permission denied" in complaint) == (2, True)
