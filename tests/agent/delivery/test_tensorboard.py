"""Scalars as TensorBoard events, read back by TensorBoard's own reader."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.agent import wire
from rankscope.agent.delivery.records import Records
from rankscope.agent.delivery.sender import Sender
from rankscope.agent.delivery.tensorboard import EventWriter
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from tests.support.servers.collector import Collector

loader: Any = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """tag -> step -> value of all event files of a folder."""
    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in loader.LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_what_is_written_is_read_by_tensorboard(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, rank=3)
    writer.write([(0, {"loss": 9.0}), (0, {"loss": 2.5}), (1, {"loss": 0.5})])
    writer.write([(2, {"loss": math.inf}), (1, {"eval/accuracy": 0.25}), (3, {"loss": -0.125})])
    writer.close()

    assert scalars(tmp_path / "rank_3") == {
        "loss": {0: 2.5, 1: 0.5, 2: math.inf, 3: -0.125},
        "eval/accuracy": {1: 0.25},
    }


def test_not_a_number_stays_one(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, rank=0)
    writer.write([(0, {"loss": math.nan})])
    writer.close()

    assert math.isnan(scalars(tmp_path / "rank_0")["loss"][0])


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_the_sender_writes_each_ranks_scalars(tmp_path: Path, mode: Any) -> None:
    with Collector() as collector:
        for rank in range(2):
            records = Records()
            sender = Sender(
                records,
                options=Options(
                    server=collector.url, spool=tmp_path / "spool", tensorboard=tmp_path, mode=mode
                ),
                identity=Identity(run="run", rank=rank, world_size=2),
                hello=lambda: wire.Hello(started_at=1.0),
                phase=lambda: "step",
                on_problem=lambda text: None,
            )
            sender.start()
            for step in range(50):
                records.scalars(step, {"loss": float(step + rank)})
            sender.close()

    for rank in range(2):
        loss = scalars(tmp_path / f"rank_{rank}")["loss"]
        assert loss == {step: float(step + rank) for step in range(50)}


WITHOUT = """
import sys
sys.modules["tensorboard"] = None  # what an installation without the package looks like
from pathlib import Path
from rankscope.agent import wire
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from rankscope.agent.delivery.records import Records
from rankscope.agent.delivery.sender import Sender

records, folder = Records(), Path(sys.argv[2])
sender = Sender(
    records,
    options=Options(server=sys.argv[1], spool=folder / "spool", tensorboard=folder / "tb"),
    identity=Identity(run="run"),
    hello=lambda: wire.Hello(started_at=1.0),
    phase=lambda: "step",
)
sender.start()
for step in range(50):
    records.scalars(step, {"loss": 1.0})
"""


def test_a_missing_package_is_reported_once_with_the_line_that_helps(tmp_path: Path) -> None:
    with Collector() as collector:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, collector.url, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert len(collector.points("loss")) == 50

    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'rankscope[tensorboard]'" in done.stderr


def test_neither_tensorflow_nor_torch_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from rankscope.agent.delivery.tensorboard import EventWriter\n"
        "EventWriter(pathlib.Path(sys.argv[1]), 0).close()\n"
        "print({'tensorflow', 'torch', 'grpc'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )

    assert done.stdout == "set()\n"
