"""`rankscope check`: faults in the files of other tools are found as in a live run."""

import csv
import json
import math

import numpy as np
import pytest

from rankscope.server.commands.check import check

tensorboard = pytest.importorskip("torch.utils.tensorboard")

STEPS = 400


def healthy(seed=0):
    """The course of a loss that falls, with the noise of its batches."""
    noise = np.random.default_rng(seed).normal(0, 0.05, STEPS)
    return (0.3 + 2 * np.exp(-np.arange(STEPS) / 120)) * np.exp(noise)


def nonfinite():
    loss = healthy()
    loss[250:] = math.nan
    return loss


def spike():
    loss = healthy()
    loss[250:256] = 30.0, 22.0, 15.0, 8.0, 4.0, 2.0
    return loss


def diverging():
    loss = healthy()
    loss[200:] = loss[199] * np.exp(np.arange(200) / 40) * (loss[200:] / loss[200:].mean())
    return loss


def oscillating():
    loss = healthy()
    # To and fro about where it was, and down no more.
    noise = np.random.default_rng(1).normal(0, 0.05, 200)
    loss[200:] = loss[199] * np.where(np.arange(200) % 2, 1.5, 0.5) * np.exp(noise)
    return loss


FAULTS = {
    nonfinite: {"loss.nonfinite"},
    spike: {"loss.spike"},
    diverging: {"loss.diverging"},
    oscillating: {"loss.oscillating"},
}


def summary_writer(folder, loss, evaluated=None):
    with tensorboard.SummaryWriter(folder) as writer:
        for step, value in enumerate(loss):
            writer.add_scalar("Loss/train", value, step)
            writer.add_scalar("lr", 0.1, step)
        for step, value in evaluated or ():
            writer.add_scalar("Loss/val", value, step)
    return folder


def trainer_state(folder, loss, evaluated=None):
    """In the shape that Trainer writes at every checkpoint, `logging_steps=1`."""
    history = [
        {"epoch": k / 100, "grad_norm": 1.0, "learning_rate": 1e-4, "loss": float(v), "step": k + 1}
        for k, v in enumerate(loss)
    ]
    history += [
        {"epoch": k / 100, "eval_loss": float(v), "eval_runtime": 0.5, "step": k + 1}
        for k, v in evaluated or ()
    ]
    history.sort(key=lambda entry: entry["step"])
    state = {"best_metric": None, "epoch": 4.0, "global_step": STEPS, "log_history": history}
    checkpoint = folder / f"checkpoint-{STEPS}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    return folder


def lightning_csv(folder, loss, evaluated=None):
    """As CSVLogger writes it: a line a call, with empty fields."""
    folder = folder / "version_0"
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, ["epoch", "step", "train_loss", "val_loss"])
        rows.writeheader()
        for step, value in enumerate(loss):
            rows.writerow({"epoch": step // 100, "step": step, "train_loss": value})
        for step, value in evaluated or ():
            rows.writerow({"epoch": step // 100, "step": step, "val_loss": value})
    return folder


WRITERS = (summary_writer, trainer_state, lightning_csv)


def judged(capsys, path, *arguments):
    code = check([str(path), "--format", "json", *arguments])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("write", WRITERS)
def test_a_healthy_run_passes(tmp_path, capsys, write):
    code, report = judged(capsys, write(tmp_path, healthy()))
    assert (code, report["verdict"], report["alerts"]) == (0, "pass", [])
    assert "update.ratio" in {one["name"] for one in report["not_checked"]}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("write", WRITERS)
def test_a_fault_of_the_loss_is_found(tmp_path, capsys, write, fault):
    code, report = judged(capsys, write(tmp_path, fault()), "--fail-on", "warning")
    assert code == 1
    assert FAULTS[fault] & {alert["kind"] for alert in report["alerts"]}


@pytest.mark.parametrize("write", WRITERS)
def test_overfitting_is_found(tmp_path, capsys, write):
    evaluations = range(9, STEPS, 10)
    evaluated = [
        (k, 0.6 + 2 * math.exp(-k / 60) + (max(0, k - 120) / 120) ** 1.2) for k in evaluations
    ]
    _, report = judged(capsys, write(tmp_path, healthy(), evaluated))
    assert "generalization.gap" in {alert["kind"] for alert in report["alerts"]}


def test_one_rank_that_differs_from_the_others_is_named(tmp_path, capsys):
    for rank in range(4):
        loss = healthy(rank)
        if rank == 2:
            loss[250] = math.nan
        summary_writer(tmp_path / f"rank_{rank}", loss)
    code, report = judged(capsys, tmp_path)
    assert code == 1
    found = [alert for alert in report["alerts"] if alert["kind"] == "loss.nonfinite"]
    assert [(alert["ranks"], alert["first_step"]) for alert in found] == [([2], 250)]


@pytest.mark.parametrize(("loss", "noted"), [(healthy, True), (nonfinite, False)])
def test_what_trainer_may_have_filtered_is_said_where_it_may_have(tmp_path, capsys, loss, noted):
    check([str(trainer_state(tmp_path, loss()))])
    assert ("logging_nan_inf_filter" in capsys.readouterr().err) == noted


def test_too_little_to_judge_is_no_pass(tmp_path, capsys):
    code, report = judged(capsys, summary_writer(tmp_path, healthy()[:5]))
    assert (code, report["verdict"]) == (4, "pending")


def test_severity_and_kinds_are_those_of_the_gate(tmp_path, capsys):
    folder = summary_writer(tmp_path, nonfinite())
    assert judged(capsys, folder, "--ignore", "loss.nonfinite")[0] != 1
    with pytest.raises(SystemExit):
        check([str(folder), "--kind", "loss.spik"])
    assert "did you mean 'loss.spike'" in capsys.readouterr().err


def test_a_person_reads_what_was_taken_for_what(tmp_path, capsys):
    assert check([str(summary_writer(tmp_path, nonfinite()))]) == 1
    said = capsys.readouterr()
    assert "Loss/train is loss" in said.err
    assert "loss.nonfinite" in said.out
    assert tmp_path.resolve().as_uri() in said.out


@pytest.mark.parametrize("name", ["lr=0.1", "données", "a+b"])
def test_names_of_folders_that_an_address_would_quote(tmp_path, capsys, name):
    code, report = judged(capsys, trainer_state(tmp_path / name, healthy()))
    assert (code, report["run"]) == (0, name)


def test_a_csv_file_of_a_spreadsheet(tmp_path, capsys):
    path = lightning_csv(tmp_path, healthy()) / "metrics.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert judged(capsys, path)[0] == 0


def test_a_number_that_no_float_holds_is_infinite(tmp_path, capsys):
    path = trainer_state(tmp_path, healthy()) / f"checkpoint-{STEPS}" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"][250]["loss"] = 10**400
    path.write_text(json.dumps(state))
    code, report = judged(capsys, path)
    assert code == 1
    assert "loss.nonfinite" in {alert["kind"] for alert in report["alerts"]}


def test_steps_that_are_none_are_counted(tmp_path, capsys):
    folder = lightning_csv(tmp_path, healthy())
    with (folder / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write(",-1,0.5,\n")
    check([str(folder)])
    assert "1 point has a negative or impossible step and was left out." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing", None, "there is no"),
        ("notes.txt", "x", "is none of what is read here"),
        ("trainer_state.json", "{", "is not JSON"),
        ("trainer_state.json", "[]", "has no list log_history"),
        ("trainer_state.json", '{"log_history": [{"loss": 1}]}', "log_history[0] has no step"),
        ("trainer_state.json", '{"log_history": []}', "holds no scalars"),
        ("metrics.csv", "loss\n1\n", "has no column step"),
        ("metrics.csv", "step,loss\nx,1\n", "line 2: 'x' is no step"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, capsys, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert check([str(path)]) == 2
    assert said in capsys.readouterr().err
