"""`rankscope export` against a real server: every point comes back, bit for bit."""

import csv
import json
import math
import os
import stat
import struct
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.commands import export as command
from rankscope.server.commands.export import export
from tests.support.servers.service import Service

# More steps than one question takes; a third, so that no float32 holds the values.
LONG = 45_000
LOSS = np.arange(LONG) / 3.0
LOSS[[7, 20_000, 44_999]] = np.nan, np.inf, -np.inf
# Counts tokens, as some do: far apart, and far beyond 32 bits.
FAR = np.arange(30, dtype=np.int64) * 10**12


def post(url, **fields):
    batch = wire.Batch(run="otter", world_size=2, project="lake", **fields)
    headers = {"content-type": wire.CONTENT_TYPE}
    answer = httpx.post(f"{url}/api/v1/ingest", content=wire.encode(batch), headers=headers)
    assert answer.status_code == 200, answer.text


def column(steps, values):
    return wire.Column(np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        table = wire.TensorTable(("a.weight", "b"), ((2,), (1,)), ("float32",) * 2, ("",) * 2)
        hello = wire.Hello(started_at=1_700_000_000.0, tables={"parameters": table})
        norms = wire.Layers(
            step=3, table="parameters", metric="grad_norm", values=np.array([0.1, np.nan])
        )
        loss = column(range(LONG), LOSS)
        far = column(FAR, FAR / 7)
        post(
            service.url,
            rank=0,
            session="s",
            seq=0,
            hello=hello,
            columns={"loss": loss, "far": far},
            layers=(norms,),
        )
        # A restart: what it did again stands.
        post(service.url, rank=1, session="s", seq=0, columns={"loss": column(range(5), range(5))})
        again = {"loss": column([3, 4, 5], [30, 40, 50])}
        post(service.url, rank=1, session="t", seq=0, attempt=1, columns=again)
        yield service.url


def expected():
    points = {("loss", 0, step): value for step, value in enumerate(LOSS.tolist())}
    points |= {("far", 0, step): step / 7 for step in FAR.tolist()}
    points |= {("loss", 1, step): value for step, value in enumerate([0, 1, 2, 30, 40, 50])}
    return points | {("grad_norm/a.weight", 0, 3): 0.1, ("grad_norm/b", 0, 3): math.nan}


def bits(points):
    return {key: struct.pack("<d", value) for key, value in points.items()}


def test_csv_has_every_point(url, tmp_path, capsys):
    path = tmp_path / "run.csv"
    assert export(["otter", "--server", url, "--format", "csv", "-o", str(path)]) == 0
    assert "45,038 points of 4 metrics of 2 ranks" in capsys.readouterr().out
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = {(r["metric"], int(r["rank"]), int(r["step"])): float(r["value"]) for r in rows}
    assert len(rows) == len(found)
    assert bits(found) == bits(expected())
    # Any other spelling makes a column of text in polars.
    assert {r["value"] for r in rows if not r["value"][-1].isdigit()} == {"NaN", "inf", "-inf"}
    assert [p.name for p in tmp_path.iterdir()] == ["run.csv"]


def test_parquet_has_every_point_and_says_whose(url, tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "run.parquet"
    path.write_text("an older one", encoding="utf-8")
    asked = ["otter", "--server", url, "--format", "parquet", "-o", str(path), "--json"]
    assert export(asked) == 0
    assert json.loads(capsys.readouterr().out) == {
        "run": "otter",
        "format": "parquet",
        "path": str(path),
        "metrics": 4,
        "ranks": 2,
        "points": 45038,
    }
    table = parquet.read_table(path)
    rows = zip(*(table.column(n).to_pylist() for n in ("metric", "rank", "step")), strict=True)
    values = table.column("value")
    assert values.null_count == 0
    assert bits(dict(zip(rows, values.to_pylist(), strict=True))) == bits(expected())
    about = json.loads(table.schema.metadata[b"rankscope"])
    assert (about["id"], about["project"], about["world_size"]) == ("otter", "lake", 2)
    assert parquet.ParquetFile(path).num_row_groups == 1


def by_pandas(path):
    import pandas

    return pandas.read_parquet(path)[["metric", "rank", "step", "value"]].to_numpy().tolist()


def by_polars(path):
    import polars

    return polars.read_parquet(path).select("metric", "rank", "step", "value").rows()


def by_duckdb(path):
    import duckdb

    return duckdb.sql(f"SELECT metric, rank, step, value FROM '{path}'").fetchall()


@pytest.mark.parametrize("read", [by_pandas, by_polars, by_duckdb])
def test_parquet_opens_in_what_people_use(url, tmp_path, read):
    path = tmp_path / "run.parquet"
    assert export(["otter", "--server", url, "--format", "parquet", "-o", str(path)]) == 0
    rows = read(path)
    found = {(metric, rank, step): value for metric, rank, step, value in rows}
    assert len(rows) == len(found)
    # NaN is data, and no value that is missing.
    assert bits(found) == bits(expected())


def test_tensorboard_has_every_point(url, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    util = pytest.importorskip("tensorboard.util.tensor_util")
    path = tmp_path / "events"
    assert export(["otter", "--server", url, "--format", "tensorboard", "-o", str(path)]) == 0
    found = {}
    for rank in (0, 1):
        # As TensorBoard reads it.
        reader = accumulator.EventAccumulator(str(path / f"rank_{rank}"), {"tensors": 0})
        reader.Reload()
        for tag in reader.Tags()["tensors"]:
            assert reader.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"
            for event in reader.Tensors(tag):
                found[tag, rank, event.step] = util.make_ndarray(event.tensor_proto).item()
                assert event.wall_time == 1_700_000_000.0 or rank
    assert bits(found) == bits(expected())


def test_a_folder_with_something_in_it_stays_as_it_is(url, tmp_path, capsys):
    (tmp_path / "mine").write_text("x", encoding="utf-8")
    asked = ["otter", "--server", url, "--format", "tensorboard", "-o", str(tmp_path)]
    assert export(asked) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_link_stays_one_and_its_file_is_replaced(url, tmp_path, capsys):
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to("real.csv")
    asked = ["otter", "--server", url, "--format", "csv", "-o", str(tmp_path / "link.csv")]
    assert export(asked) == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text().startswith("metric,rank")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_what_is_no_file_stays_what_it_is(url, tmp_path, capsys, form):
    os.mkfifo(tmp_path / "pipe")
    assert export(["otter", "--server", url, "--format", form, "-o", str(tmp_path / "pipe")]) == 2
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert "is no ordinary file" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_nothing_is_left_where_the_disk_is_full(url, tmp_path, capsys, form):
    (tmp_path / ".run.part").symlink_to("/dev/full")
    assert export(["otter", "--server", url, "--format", form, "-o", str(tmp_path / "run")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("run", "output", "code", "said"),
    [
        ("nobody", "x.csv", 4, "there is no run 'nobody'"),
        ("otter", "missing/x.csv", 2, "missing; make it first"),
        ("otter", ".", 2, "is a folder"),
    ],
)
def test_what_cannot_be_done_is_said(url, tmp_path, capsys, run, output, code, said):
    asked = [run, "--server", url, "--format", "csv", "-o", str(tmp_path / output)]
    assert export(asked) == code
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_away_is_unreachable(tmp_path, capsys):
    asked = ["otter", "--server", "http://127.0.0.1:9", "--format", "csv"]
    assert export([*asked, "-o", str(tmp_path / "x.csv")]) == 3
    assert "does not answer" in capsys.readouterr().err


def test_nothing_is_left_of_an_export_that_breaks_off(url, tmp_path, monkeypatch):
    def breaks_off(*_):
        yield from ()
        raise command.client.Refused(3, "gone")

    monkeypatch.setattr(command, "_points", breaks_off)
    for name in ("csv", "parquet", "tensorboard"):
        asked = ["otter", "--server", url, "--format", name, "-o", str(tmp_path / "x")]
        assert export(asked) == 3
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "module"),
    [("parquet", "pyarrow"), ("tensorboard", "tensorboard.summary.writer.record_writer")],
)
def test_a_missing_package_is_named_with_its_extra(
    url, tmp_path, monkeypatch, capsys, name, module
):
    monkeypatch.setitem(sys.modules, module, None)
    asked = ["otter", "--server", url, "--format", name, "-o", str(tmp_path / "x")]
    assert export(asked) == 2
    assert f"pip install 'rankscope[{name}]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
