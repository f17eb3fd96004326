"""Runs of wandb and MLflow, written by these, are read whole and judged."""

import json
import math
import subprocess
import sys
import textwrap

import httpx
import pytest

from rankscope.server.commands.check import check
from rankscope.server.commands.importing import import_
from rankscope.server.exchange import wandb_logs
from tests.support.servers.service import Service

# MLflow uses what SQLAlchemy is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")

# A loss that falls with the noise of its batches, and is none from step 250 on.
LOSS = """
    import math, random

    draw = random.Random(0).gauss
    loss = [(0.3 + 2 * math.exp(-k / 120)) * math.exp(draw(0, 0.05)) for k in range(400)]
    broken = loss[:250] + [math.nan] * 150
"""
WANDB = """
    import sys, wandb

    for name, values in (("broken", broken), ("healthy", loss)):
        run = wandb.init(project="lake", name=name, mode="offline", dir=f"{sys.argv[1]}/{name}")
        for step, value in enumerate(values):
            told = {"train/loss": value, "gains": {"a/b": 0.5}, "note": "text", "on": True}
            # More than a block of the file, so that records are cut.
            run.log({**told, "text": "x" * 40_000} if step == 100 else told)
        run.log({"val/loss": math.inf if name == "broken" else 0.5}, step=500)
        run.finish()
"""
MLFLOW = """
    import sys, mlflow

    mlflow.set_tracking_uri(sys.argv[2])
    mlflow.set_experiment("lake")
    for name, values in (("broken", broken), ("healthy", loss)):
        with mlflow.start_run(run_name=name):
            for step, value in enumerate(values):
                mlflow.log_metrics({"train/loss": value, "gain": math.inf}, step=step)
"""


def written(source, *arguments):
    """Runs a script of a user's in a process of its own."""
    script = textwrap.dedent(LOSS) + textwrap.dedent(source)
    subprocess.run([sys.executable, "-c", script, *map(str, arguments)], check=True, timeout=240)


@pytest.fixture(scope="module")
def wandb_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wandb")
    for name in ("broken", "healthy"):
        (folder / name).mkdir()
    written(WANDB, folder)
    return folder


@pytest.fixture(scope="module")
def mlflow_store(tmp_path_factory):
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    written(MLFLOW, path, f"sqlite:///{path}")
    return path


def judged(capsys, *arguments):
    """Exit code and report of `check`, and what it said of its reading."""
    capsys.readouterr()
    code = check([*map(str, arguments), "--format", "json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else None, printed.err


def test_wandb(wandb_folder, capsys):
    code, report, said = judged(capsys, wandb_folder / "broken")
    assert code == 1
    assert report["run"] == "broken"
    (alert,) = (a for a in report["alerts"] if a["kind"] == "loss.nonfinite")
    assert alert["first_step"] == 250
    assert "train/loss is loss, val/loss is eval/loss" in said
    code, report, _ = judged(capsys, wandb_folder / "healthy" / "wandb" / "latest-run")
    assert (code, report["alerts"]) == (0, [])


def test_every_number_of_wandb_is_read(wandb_folder):
    (columns,) = wandb_logs.read(wandb_folder / "broken").ranks.values()
    assert set(columns) == {"train/loss", "gains/a/b", "val/loss"}
    loss = columns["train/loss"]
    assert loss.steps.tolist() == list(range(400))
    assert [math.isnan(value) for value in loss.values] == [k >= 250 for k in range(400)]
    assert columns["gains/a/b"].values.tolist() == [0.5] * 400
    assert (columns["val/loss"].steps, columns["val/loss"].values) == ([500], [math.inf])


@pytest.mark.parametrize("harm", ["cut", "flipped"])
def test_a_file_of_wandb_is_read_as_far_as_it_goes(wandb_folder, tmp_path, capsys, harm):
    (path,) = {p.resolve() for p in (wandb_folder / "healthy").rglob("*.wandb")}
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if harm == "cut":
        del content[middle:]
    else:
        content[middle] ^= 1
    (tmp_path / "run-1.wandb").write_bytes(content)
    code, _, said = judged(capsys, tmp_path)
    assert code == 0
    assert "it was read as far as it goes" in said
    (columns,) = wandb_logs.read(tmp_path).ranks.values()
    whole = wandb_logs.read(wandb_folder / "healthy").ranks[0]["train/loss"].values
    kept = columns["train/loss"].values
    assert 100 < len(kept) < 400
    assert kept.tolist() == whole[: len(kept)].tolist()


def test_several_runs_of_wandb_are_named(wandb_folder, capsys):
    code, _, said = judged(capsys, wandb_folder)
    assert code == 2
    assert "holds 2 runs; name one of them" in said


def test_mlflow(mlflow_store, capsys):
    code, report, _ = judged(capsys, mlflow_store, "--select", "broken")
    assert (code, report["run"]) == (1, "broken")
    (alert,) = (a for a in report["alerts"] if a["kind"] == "loss.nonfinite")
    assert alert["first_step"] == 250
    code, report, _ = judged(capsys, mlflow_store, "--select", "healthy")
    assert (code, report["alerts"]) == (0, [])


def test_runs_of_mlflow_have_to_be_chosen(mlflow_store, capsys):
    code, _, said = judged(capsys, mlflow_store)
    assert code == 2
    assert "holds 2 runs; choose one by --select: " in said
    assert "broken (" in said
    code, _, said = judged(capsys, mlflow_store, "--select", "other")
    assert code == 2
    assert "holds no run 'other'; there are " in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("run.wandb", "is no file of wandb"),
        ("mlflow.db", "is none of what is read here"),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, name, said):
    (tmp_path / name).write_bytes(b"something else")
    code, _, printed = judged(capsys, tmp_path / name)
    assert code == 2
    assert said in printed


def test_both_are_imported(wandb_folder, mlflow_store, tmp_path, capsys):
    with Service(tmp_path) as service:
        to = ["--server", service.url, "--project", "lake"]
        assert import_(["wandb", str(wandb_folder / "broken"), "--run", "w", *to]) == 0
        assert import_(["mlflow", str(mlflow_store), "--select", "broken", "--run", "m", *to]) == 0
        assert import_(["mlflow", str(wandb_folder), *to]) == 2
        assert "is no store of MLflow" in capsys.readouterr().err
        for run in ("w", "m"):
            address = f"{service.url}/api/v1/runs/{run}/series"
            (loss,) = httpx.get(address, params={"metric": "loss"}).json()["series"]
            assert loss["steps"] == list(range(400))
            assert loss["values"][250:] == ["NaN"] * 150
