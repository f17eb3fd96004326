"""Real ranks that say what they save and load: what is not as it was saved is named."""

from pathlib import Path

import pytest
import torch

from rankscope.agent.checkpoints.command import main as verify
from tests.support.jobs import reloaded_job
from tests.support.jobs.judged_job import judged_job
from tests.support.jobs.ranks import run_ranks

pytestmark = pytest.mark.e2e

SCRIPT = Path(reloaded_job.__file__)
RANKS = 3


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    run_ranks(
        SCRIPT,
        *("save", str(folder)),
        ranks=RANKS,
        folder=tmp_path / "save",
        environment={"RANKSCOPE_MODE": "offline", "PYTHONPATH": str(SCRIPT.parents[3])},
        timeout_s=120,
    ).check()
    return folder


def loaded(folder, tmp_path):
    job = judged_job(SCRIPT, "load", str(folder), ranks=RANKS, folder=tmp_path / "load")
    return {k: a for k, a in job.alerts.items() if a.severity != "info"}, job


def test_what_is_loaded_as_it_was_saved_is_no_alert(saved, tmp_path):
    alerts, job = loaded(saved, tmp_path)
    assert not alerts
    assert job.checks["checkpoint.mismatch"].status == "ok"


def test_one_flipped_bit_of_one_rank_is_named_with_its_tensor(saved, tmp_path, capsys):
    path = saved / "rank_1.pt"
    state = torch.load(path, weights_only=True)
    state["optimizer"]["state"][2]["exp_avg"].view(torch.int32)[1, 3] ^= 1 << 7
    torch.save(state, path)
    alerts, _ = loaded(saved, tmp_path)
    alert = alerts["checkpoint.mismatch"]
    assert (alert.severity, alert.ranks) == ("critical", [1])
    assert alert.tensors == ["optimizer.state.2.exp_avg"]
    assert alert.evidence["saved"]["step"] == reloaded_job.BEFORE
    # The same of the file, which no training has loaded.
    record = Path(f"{path}.digests") / "rank_1.json"
    assert verify([str(path), str(record)]) == 1
    assert "optimizer.state.2.exp_avg: float32 [3, 16]" in capsys.readouterr().out
    other = saved / "rank_0.pt"
    assert verify([str(other), f"{other}.digests"]) == 0


def test_one_rank_that_loads_another_step_is_named(saved, tmp_path):
    (saved / "rank_2.early").replace(saved / "rank_2.pt")
    alerts, _ = loaded(saved, tmp_path)
    alert = alerts["checkpoint.mismatch"]
    assert alert.ranks == [2]
    assert alert.evidence["differing"] == {"2": 16}
    # It is what the others differ by: one cause, one alert.
    assert [a.kind for a in alerts.values() if a.parent is None] == ["checkpoint.mismatch"]
