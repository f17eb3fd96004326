"""TensorBoard event files: written a folder for each rank, and read whoever wrote them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.server.exchange.points import ExchangeError, Points, require

_EXTRA = "tensorboard"


class EventWriter:
    """Writes `rank_<rank>` below a folder, each with one event file.

    Values are written as scalars of 64 bits, where the usual summaries have 32: what is read from
    them is what the run has. Steps have no times in the run, so all events have that of its start.

    Args:
        path: folder, which is made; it must be empty, as TensorBoard would mix what lies in it.
        about: what is known of the run; `started` is seconds since 1970.

    Raises:
        ExchangeError: tensorboard is not installed, or the path is not an empty folder.
        OSError: the files cannot be written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._record = require("tensorboard.summary.writer.record_writer", _EXTRA, "Event files")
        self._proto = {
            name: require(f"tensorboard.compat.proto.{name}", _EXTRA, "Event files")
            for name in ("event_pb2", "summary_pb2", "tensor_pb2", "types_pb2")
        }
        self._time = float(about["started"])
        self._path = path
        self._made = not path.exists()
        if not self._made and (not path.is_dir() or any(path.iterdir())):
            raise ExchangeError(
                f"{path} is not an empty folder: TensorBoard would show what lies in it as part "
                "of the run; name a new one"
            )
        path.mkdir(parents=True, exist_ok=True)
        self._writers: dict[int, Any] = {}
        self._known: set[tuple[int, str]] = set()

    def write(self, points: Points) -> None:
        """Writes some points of a series, an event each."""
        writer = self._writers.get(points.rank) or self._open(points.rank)
        event = self._proto["event_pb2"].Event
        values = zip(points.steps.tolist(), points.values.tolist(), strict=True)
        for step, value in values:
            made = event(wall_time=self._time, step=step, summary=self._summary(points, value))
            writer.write(made.SerializeToString())

    def close(self) -> None:
        """Closes all files."""
        for writer in self._writers.values():
            writer.close()

    def abandon(self) -> None:
        """Removes what was written."""
        for rank, writer in self._writers.items():
            # Where the disk is full, closing writes what is left, and fails once more.
            with contextlib.suppress(OSError):
                writer.close()
            shutil.rmtree(self._path / f"rank_{rank}", ignore_errors=True)
        if self._made:
            self._path.rmdir()

    def _open(self, rank: int) -> Any:
        folder = self._path / f"rank_{rank}"
        folder.mkdir()
        name = f"events.out.tfevents.{self._time:010.0f}.rankscope.{rank}.0"
        writer = self._record.RecordWriter((folder / name).open("wb"))
        version = self._proto["event_pb2"].Event(wall_time=self._time, file_version="brain.Event:2")
        writer.write(version.SerializeToString())
        self._writers[rank] = writer
        return writer

    def _summary(self, points: Points, value: float) -> Any:
        summary, types = self._proto["summary_pb2"], self._proto["types_pb2"]
        tensor = self._proto["tensor_pb2"].TensorProto(dtype=types.DT_DOUBLE, double_val=[value])
        tensor.tensor_shape.SetInParent()  # of no dimensions: a scalar
        made = summary.Summary.Value(tag=points.metric, tensor=tensor)
        if (points.rank, points.metric) not in self._known:
            # The first of a tag says what it is.
            self._known.add((points.rank, points.metric))
            made.metadata.plugin_data.plugin_name = "scalars"
            made.metadata.data_class = summary.DATA_CLASS_SCALAR
        return summary.Summary(value=[made])
