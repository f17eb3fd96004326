"""`rankscope import tensorboard` against a real server, of files as torch and Keras write them."""

import json
import math

import httpx
import numpy as np
import pytest

from rankscope.agent.delivery.tensorboard import EventWriter
from rankscope.server.commands.export import export
from rankscope.server.commands.importing import import_
from tests.support.servers.service import Service, eventually

tensorboard = pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service.url


def imported(url, *arguments):
    return import_(["tensorboard", *map(str, arguments), "--server", url])


def series(url, run, metric):
    answer = httpx.get(f"{url}/api/v1/runs/{run}/series", params={"metric": metric})
    assert answer.status_code == 200, answer.text
    return {
        one["rank"]: dict(zip(one["steps"], map(float, one["values"]), strict=True))
        for one in answer.json()["series"]
    }


def test_a_summary_writer_s_folder(url, tmp_path, capsys):
    folder = tmp_path / "my run"
    with tensorboard.SummaryWriter(folder) as writer:
        for step in range(20):
            writer.add_scalar("Loss/train", 1 / (step + 1), step)
            writer.add_scalar("lr", 0.1, step, new_style=True)
            writer.add_scalars("Accuracy", {"train": 0.5, "val": 0.25}, step)
            writer.add_histogram("weights", np.arange(10.0), step)
        writer.add_scalar("Loss/train", math.nan, 20)
        writer.add_scalar("Loss/val", math.inf, 20)
        writer.add_hparams({"lr": 0.1}, {"final": 1.0})
    assert imported(url, folder, "--project", "lake") == 0
    printed = capsys.readouterr().out
    assert "Loss/train  " in printed
    assert "Run my-run: 82 points of 1 rank stored." in printed
    run = httpx.get(f"{url}/api/v1/runs/my-run").json()
    assert (run["project"], run["state"], run["world_size"]) == ("lake", "finished", 1)
    [loss] = series(url, "my-run", "loss").values()
    assert [loss[step] for step in range(20)] == [float(np.float32(1 / (k + 1))) for k in range(20)]
    assert math.isnan(loss[20])
    assert series(url, "my-run", "eval/loss") == {0: {20: math.inf}}
    assert series(url, "my-run", "eval/accuracy")[0][3] == 0.25
    assert series(url, "my-run", "accuracy")[0][3] == 0.5
    assert len(series(url, "my-run", "lr")[0]) == 20


def test_the_same_log_is_stored_once_and_one_that_has_grown_anew(url, tmp_path, capsys):
    folder = tmp_path / "twice"
    with tensorboard.SummaryWriter(folder) as writer:
        for step in range(5):
            writer.add_scalar("loss", step, step)
    assert imported(url, folder) == 0
    assert imported(url, folder) == 0
    assert "nothing was stored twice" in capsys.readouterr().out
    [rank] = httpx.get(f"{url}/api/v1/runs/twice").json()["rank_status"]
    assert rank["attempt"] == 0
    with tensorboard.SummaryWriter(folder) as writer:
        writer.add_scalar("loss", 40, 4)
        writer.add_scalar("loss", 50, 5)
    assert imported(url, folder) == 0
    assert series(url, "twice", "loss")[0] == {0: 0, 1: 1, 2: 2, 3: 3, 4: 40, 5: 50}


def test_what_was_exported_comes_back_bit_for_bit(url, tmp_path):
    folder, copy = tmp_path / "whole", tmp_path / "copy"
    for rank in range(3):
        # The agent's own files.
        writer = EventWriter(folder, rank)
        values = [1 / 3, math.nan, math.inf, -math.inf]
        writer.write([(k, {"loss": v + rank, "eval/val/x": -v}) for k, v in enumerate(values)])
        writer.close()
    assert imported(url, folder) == 0
    asked = ["whole", "--server", url, "--format", "tensorboard", "-o", str(copy)]
    assert export(asked) == 0
    assert imported(url, copy) == 0
    for metric in ("loss", "eval/val/x"):
        first, second = (series(url, run, metric) for run in ("whole", "copy"))
        assert list(first) == [0, 1, 2]
        assert repr(first) == repr(second)


def test_ranks_and_phases_are_folders(url, tmp_path):
    folder = tmp_path / "job"
    for rank in (0, 2):
        for phase, value in (("train", 1.0), ("validation", 2.0)):
            with tensorboard.SummaryWriter(folder / f"worker-{rank}" / phase) as writer:
                for step in range(3):
                    # As Keras writes it.
                    writer.add_scalar("epoch_loss", value + rank, step, new_style=True)
    assert imported(url, folder, "--json") == 0
    assert series(url, "job", "loss") == {
        0: dict.fromkeys(range(3), 1.0),
        1: dict.fromkeys(range(3), 3.0),
    }
    assert series(url, "job", "eval/loss")[1][0] == 4.0


def test_the_server_judges_it(url, tmp_path):
    folder = tmp_path / "judged"
    with tensorboard.SummaryWriter(folder) as writer:
        for step in range(300):
            writer.add_scalar("train/loss", math.nan if step >= 200 else 2 / (1 + step / 50), step)
    assert imported(url, folder) == 0

    def alerts():
        return httpx.get(f"{url}/api/v1/runs/judged/alerts").json()["items"]

    [alert] = eventually(alerts, timeout_s=60)
    assert (alert["kind"], alert["first_step"]) == ("loss.nonfinite", 200)
    checks = httpx.get(f"{url}/api/v1/runs/judged/verdict").json()["checks"]
    [ratio] = [c for c in checks if c["name"] == "update.ratio"]
    assert ratio["state"] == "not_run"


def test_json_has_the_mapping(url, tmp_path, capsys):
    with tensorboard.SummaryWriter(tmp_path / "m") as writer:
        writer.add_scalar("Loss/train", 1.0, 7)
    assert imported(url, tmp_path / "m", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tags"] == [
        {
            "tag": "Loss/train",
            "metric": "loss",
            "ranks": 1,
            "points": 1,
            "first_step": 7,
            "last_step": 7,
        }
    ]


def events(folder, tag="loss"):
    with tensorboard.SummaryWriter(folder) as writer:
        for step in range(3):
            writer.add_scalar(tag, 1.0, step)
    [path] = folder.glob("*tfevents*")
    return path


def test_a_file_that_breaks_off_is_read_as_far_as_it_goes(url, tmp_path, capsys):
    path = events(tmp_path / "cut")
    path.write_bytes(path.read_bytes()[:-5])
    assert imported(url, tmp_path / "cut") == 0
    assert "breaks off after 3 events" in capsys.readouterr().out
    assert len(series(url, "cut", "loss")[0]) == 2


def test_bad_input_is_refused_with_what_to_do(url, tmp_path, capsys):
    def refused(source, *more):
        assert imported(url, source, *more) == 2
        return capsys.readouterr().err

    assert "there is no" in refused(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "holds no TensorBoard events" in refused(tmp_path / "empty")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "events.out.tfevents.1").write_text("not that " * 20, encoding="utf-8")
    assert "is no event file" in refused(tmp_path / "bad")
    for name in ("a", "b"):
        events(tmp_path / "two" / name)
    assert "holds 2 runs; name one of them" in refused(tmp_path / "two")
    events(tmp_path / "nested")
    events(tmp_path / "nested" / "another")
    assert "is a run of its own" in refused(tmp_path / "nested")
    with tensorboard.SummaryWriter(tmp_path / "text") as writer:
        writer.add_text("note", "no numbers")
    assert "holds no scalars" in refused(tmp_path / "text")
    events(tmp_path / "mine")
    events(tmp_path / "other")
    assert imported(url, tmp_path / "mine") == 0
    capsys.readouterr()
    assert "was imported from" in refused(tmp_path / "other", "--run", "mine")


def test_a_server_that_is_away_is_unreachable(tmp_path, capsys):
    events(tmp_path / "x")
    assert imported("http://127.0.0.1:9", tmp_path / "x") == 3
    assert "does not answer" in capsys.readouterr().err
