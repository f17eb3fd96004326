"""Optional: a rank's scalars as TensorBoard events, in a folder of its own below the chosen one.

Runs in the sender thread. The record writer of the `tensorboard` package is used rather than its
`EventFileWriter`: that one starts a further thread, and imports TensorFlow wherever it is
installed, which has no business in somebody's PyTorch trainer.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.agent.wire import Column

_FLUSH_SECONDS = 5.0


class EventWriter:
    """Writes one event a step, with the values of all metrics at that step.

    Args:
        folder: the log folder that TensorBoard is started with; `rank_<rank>` is made in it.
        rank: rank of this process.

    Raises:
        ImportError: the `tensorboard` package is missing; says how to install it.
        OSError: the file cannot be created.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard events need the package tensorboard: "
                "pip install 'rankscope[tensorboard]'"
            ) from error
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        own = folder / f"rank_{rank}"
        own.mkdir(parents=True, exist_ok=True)
        # The name is TensorBoard's convention; a process that restarts begins a file of its own.
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._writer: Any = RecordWriter(open(own / name, "ab"))
        self._flushed = time.monotonic()
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, columns: Mapping[str, Column]) -> None:
        """Append the points of some metrics."""
        now = time.time()
        steps: dict[int, list[Any]] = {}
        for name, column in columns.items():
            for step, value in zip(column.steps.tolist(), column.values.tolist(), strict=True):
                steps.setdefault(step, []).append(self._summary.Value(tag=name, simple_value=value))
        for step, values in sorted(steps.items()):
            summary = self._summary(value=values)
            self._write(self._event(wall_time=now, step=step, summary=summary))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
