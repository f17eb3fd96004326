"""`rankscope verify` where a tensor or a file fails once it is read, or the answer as a whole."""

import io
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rankscope.agent.checkpoints import command, verification
from rankscope.agent.checkpoints.command import main


@pytest.mark.parametrize("differ", [False, True])
def test_a_tensor_larger_than_the_memory(saved, verify, differ):
    def state(last):
        huge = torch.zeros(1).expand(10**15)
        return {"x": huge, "step": torch.ones(1), "y": torch.full((2,), last)}

    first, second = saved("a.pt", state(1.0)), saved("b.pt", state(2.0 if differ else 1.0))
    code, text, found, complaint = verify(first, second)
    assert (code, complaint) == (1 if differ else 2, "")
    assert "memory" in text
    assert set(found["groups"][0]["digests"]) == {"y", "step"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_shard_that_is_gone_once_it_is_read(tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        dcp.save({"w": torch.ones(8), "step": 1}, checkpoint_id=tmp_path / name, no_dist=True)
    compare = verification.compare

    def late(*given):
        for shard in (tmp_path / "b").glob("*.distcp"):
            shard.unlink()
        return compare(*given)

    monkeypatch.setattr(verification, "compare", late)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    text, complaint = capsys.readouterr()
    assert "w was not compared" in text
    assert "FileNotFoundError" in text
    assert complaint == ""


def test_a_type_of_which_torch_knows_the_bits_alone(saved, verify):
    def state(bits, dtype):
        return {"x": torch.full((8,), bits, dtype=torch.uint8).view(dtype)}

    first = saved("a.pt", state(0, torch.bits8))
    assert verify(first, saved("b.pt", state(0, torch.bits8)))[0] == 0
    code, text, _, complaint = verify(first, saved("b.pt", state(1, torch.bits8)))
    assert (code, complaint) == (1, "")
    assert "their bits differ, their values cannot be compared" in text
    code, text, _, complaint = verify(first, saved("b.pt", state(0, torch.int8)))
    assert (code, complaint) == (1, "")
    assert "another dtype, bits8 [8] in A and int8 [8] in B" in text


def test_any_other_error_is_no_difference(saved, monkeypatch, capsys):
    def broken(found):
        raise KeyError("x")

    monkeypatch.setattr(command, "lines", broken)
    path = saved("a.pt")
    assert main([path, path]) == 2
    assert "KeyError" in capsys.readouterr().err


def test_names_that_the_terminal_cannot_show(saved, monkeypatch):
    first, second = saved("a.pt", {"a\udcffé": 1}), saved("b.pt", {"a\udcffé": 2})
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", printed)
    assert main([first, second]) == 1
    printed.flush()
    assert b"a\\udcff\\xe9: 1 in A, 2 in B" in printed.buffer.getvalue()
