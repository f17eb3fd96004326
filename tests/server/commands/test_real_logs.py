"""Files that Keras, Lightning and the Trainer of Transformers wrote themselves are judged.

`real_logs.tar.xz` holds what `tests/stacks/write_logs.py` left with each of them, healthy and with
a learning rate that becomes 60 times as large at step 200; `tests/stacks/test_logs.py` has them
write it anew, with the versions of the day. SummaryWriter, wandb and MLflow are installed here, and
write theirs in `test_check.py` and `test_trackers.py`.
"""

import json
import tarfile
from pathlib import Path

import pytest

from rankscope.server.commands.check import check

LOGS = Path(__file__).parent / "real_logs.tar.xz"
# What shows it best, and what is said of which tag it is.
FOUND = {
    "keras": ("loss.diverging", "train/batch_loss is loss"),
    "lightning": ("loss.diverging", "train_loss is loss"),
    "lightning_csv": ("loss.diverging", "train_loss is loss"),
    # The Trainer leaves out losses that are no numbers: the gradient's norm shows it.
    "transformers": ("gradient.exploding", "train/loss is loss"),
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    with tarfile.open(LOGS) as archive:
        archive.extractall(folder, filter="data")
    return folder


def judged(path, capsys):
    code = check([str(path), "--format", "json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out), printed.err


@pytest.mark.parametrize("framework", FOUND)
def test_a_healthy_training_passes(framework, logs, capsys):
    code, report, said = judged(logs / framework, capsys)
    assert (code, report["alerts"]) == (0, [])
    assert FOUND[framework][1] in said


@pytest.mark.parametrize("framework", FOUND)
def test_a_rate_that_is_too_high_from_a_step_on_is_found_there(framework, logs, capsys):
    code, report, _ = judged(logs / f"{framework}-rate", capsys)
    assert code == 1
    [alert] = [a for a in report["alerts"] if a["kind"] == FOUND[framework][0]]
    # Trainer's steps count from 1, and the gradient grows once the weights have.
    assert 200 <= alert["first_step"] <= 204
