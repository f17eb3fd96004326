"""Optional: a rank's scalars as TensorBoard events, in a folder of its own below the chosen one.

Written by a thread of its own, because such a folder is often on a network file system, and one
that hangs must not keep the sender from reporting to the server. The record writer of the package
`tensorboard` is used rather than its `EventFileWriter`: that one imports TensorFlow wherever it is
installed, which has no business in somebody's PyTorch trainer.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rankscope.agent.guard import Probe
from rankscope.agent.wire import Row

_FLUSH_SECONDS = 5.0
# Batches that may wait for the disk: half a minute's.
_MOST_WAITING = 64
# Points that may wait for it, some 100 bytes each.
_MOST_POINTS = 500_000
_CLOSE_SECONDS = 1.0


class EventThread:
    """An `EventWriter` in a thread of its own; only `close` waits for its disk, and not for long.

    Args:
        folder: as for `EventWriter`.
        rank: as for `EventWriter`.
        probe: answers for what fails in the thread.
    """

    def __init__(self, folder: Path, rank: int, probe: Probe) -> None:
        self._folder = folder
        self._rank = rank
        self._probe = probe
        self._waiting: queue.Queue[Sequence[Row] | None] = queue.Queue(_MOST_WAITING)
        # Each is counted by one thread alone.
        self._given = self._written = 0
        self._thread = threading.Thread(target=self._run, name="rankscope-tensorboard", daemon=True)
        self._thread.start()

    def write(self, rows: Sequence[Row]) -> None:
        """Has the points of some steps written.

        Raises:
            TimeoutError: the disk does not keep up.
        """
        try:
            if self._given - self._written > _MOST_POINTS:
                raise queue.Full
            self._waiting.put_nowait(rows)
            self._given += _points(rows)
        except queue.Full:
            raise TimeoutError(f"{self._folder} does not take what is written to it") from None

    def close(self) -> None:
        """Has the file closed after what was written, and waits for that a little.

        Raises:
            TimeoutError: it takes longer.
        """
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return  # `write` has raised, or will have nothing to raise
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._folder} has not taken all that was written to it")

    def _run(self) -> None:
        with self._probe:
            with contextlib.closing(EventWriter(self._folder, self._rank)) as writer:
                while (rows := self._waiting.get()) is not None:
                    writer.write(rows)
                    self._written += _points(rows)


def _points(rows: Sequence[Row]) -> int:
    return sum(len(values) for _, values in rows)


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

    def write(self, rows: Iterable[Row]) -> None:
        """Append the points of some steps; of two of a metric at one step the later one."""
        now = time.time()
        steps: dict[int, dict[str, float]] = {}
        for step, values in rows:
            steps.setdefault(step, {}).update(values)
        for step, values in sorted(steps.items()):
            value = self._summary.Value
            summary = self._summary(
                value=[value(tag=name, simple_value=number) for name, number in values.items()]
            )
            self._write(self._event(wall_time=now, step=step, summary=summary))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
