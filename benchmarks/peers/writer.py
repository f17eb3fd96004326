"""Writes a run with one tracker and reads a series back; called in the tracker's own Python.

    python writer.py '{"peer": "trackio", "way": "ordinary", "scalars": 20, "steps": 1000, ...}'

The last line it prints is what it measured, as JSON. It imports the tracker and the standard
library alone: the project is not installed where most of the trackers are.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import struct
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

Scalars = dict[str, float]
# Points of a call of the ways that collect first: the largest that MLflow takes, and as much as
# the agent itself puts into a batch of 20 scalars at 100 steps a second.
_MLFLOW_BATCH = 1000
_RANKSCOPE_STEPS = 500


class Tracker:
    """A run that is written: `log` once a step, then `close`, then `read`."""

    package = ""

    def log(self, scalars: Scalars, step: int) -> None:
        """Takes the numbers of a step."""
        raise NotImplementedError

    def end_step(self) -> None:
        """What a trainer calls besides; not part of a log call, but of the whole."""

    def close(self) -> None:
        """Returns when all is where it belongs."""
        raise NotImplementedError

    def read(self, name: str) -> int | None:
        """Reads a whole series back; how many points it has. None: there is no way to."""
        return None


class TensorBoard(Tracker):
    package = "tensorboard"

    def __init__(self, given: dict[str, Any]) -> None:
        self._folder = given["folder"]
        if given["way"] == "fast":
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._event, self._summary = Event, Summary
            self._writer = EventFileWriter(self._folder)
            self.log = self._log_event  # type: ignore[method-assign]
        else:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder)

    def log(self, scalars: Scalars, step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def _log_event(self, scalars: Scalars, step: int) -> None:
        value = self._summary.Value
        summary = self._summary(value=[value(tag=n, simple_value=v) for n, v in scalars.items()])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()

    def read(self, name: str) -> int:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        # 0: all of them; it keeps a random 10,000 otherwise.
        held = EventAccumulator(self._folder, size_guidance={"scalars": 0})
        held.Reload()
        return len(held.Scalars(name))


class Trackio(Tracker):
    package = "trackio"

    def __init__(self, given: dict[str, Any]) -> None:
        os.environ["TRACKIO_DIR"] = given["folder"]
        import trackio

        self._trackio = trackio
        trackio.init(project="bench", name="bench", embed=False)

    def log(self, scalars: Scalars, step: int) -> None:
        self._trackio.log(scalars, step=step)

    def close(self) -> None:
        self._trackio.finish()

    def read(self, name: str) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        # What its own page asks; it gives whole steps.
        return sum(name in row for row in SQLiteStorage.get_logs("bench", "bench"))


class Wandb(Tracker):
    package = "wandb"

    def __init__(self, given: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project="bench",
            mode="offline",
            dir=given["folder"],
            settings=wandb.Settings(silent=True),
        )

    def log(self, scalars: Scalars, step: int) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


class Aim(Tracker):
    package = "aim"

    def __init__(self, given: dict[str, Any]) -> None:
        from aim import Run

        self._folder = given["folder"]
        self._run = Run(repo=self._folder)
        self._hash = self._run.hash
        self._indexed = False

    def log(self, scalars: Scalars, step: int) -> None:
        self._run.track(scalars, step=step)

    def close(self) -> None:
        self._run.close()

    def read(self, name: str) -> int:
        from aim import Repo, Run
        from aim.storage.context import Context

        repo = Repo(self._folder)
        if not self._indexed:
            from aim.sdk.index_manager import RepoIndexManager

            # A run that is not in the index seems to have no series. Its page's server puts it
            # there in the background.
            RepoIndexManager.get_index_manager(repo).index(self._hash)
            self._indexed = True
            repo = Repo(self._folder)
        run = Run(self._hash, repo=repo, read_only=True)
        return len(run.get_metric(name, Context({})).values.sparse_numpy()[0])


class Mlflow(Tracker):
    package = "mlflow"

    def __init__(self, given: dict[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Metric

        self._mlflow, self._metric = mlflow, Metric
        mlflow.set_tracking_uri(given["server"])
        self._client = mlflow.MlflowClient()
        self._id = mlflow.start_run(log_system_metrics=False).info.run_id
        self._held: list[Any] = []
        if given["way"] == "fast":
            self.log = self._collect  # type: ignore[method-assign]

    def log(self, scalars: Scalars, step: int) -> None:
        self._mlflow.log_metrics(scalars, step=step)

    def _collect(self, scalars: Scalars, step: int) -> None:
        now = int(time.time() * 1000)
        self._held += [self._metric(n, v, now, step) for n, v in scalars.items()]
        while len(self._held) >= _MLFLOW_BATCH:
            self._client.log_batch(self._id, metrics=self._held[:_MLFLOW_BATCH])
            del self._held[:_MLFLOW_BATCH]

    def close(self) -> None:
        if self._held:
            self._client.log_batch(self._id, metrics=self._held)
        self._mlflow.end_run()

    def read(self, name: str) -> int:
        return len(self._client.get_metric_history(self._id, name))


class Rankscope(Tracker):
    """Ordinary: the agent. Fast: batches posted to the REST interface, one after the other."""

    package = "rankscope"

    def __init__(self, given: dict[str, Any]) -> None:
        import http.client

        self._server = given["server"]
        self._points = 0
        self._monitor: Any = None
        if given["way"] == "fast":
            from rankscope.agent import wire

            self._wire = wire
            self._names = [f"metric_{n}" for n in range(given["scalars"])]
            self._line = http.client.HTTPConnection(self._server.removeprefix("http://"))
            self._line.connect()
            self._held: list[Scalars] = []
            self._seq = self._first = 0
            self.log = self._collect  # type: ignore[method-assign]
        else:
            from rankscope import agent

            folder = str(Path(given["folder"]) / "spool")
            self._monitor = agent.start(
                server=self._server, run="bench", spool=folder, rank=0, world_size=1
            )

    def log(self, scalars: Scalars, step: int) -> None:
        self._monitor.log(**scalars)

    def end_step(self) -> None:
        if self._monitor is not None:
            self._monitor.step()

    def _collect(self, scalars: Scalars, step: int) -> None:
        self._held.append(scalars)
        if len(self._held) == _RANKSCOPE_STEPS:
            self._post()

    def _post(self) -> None:
        import numpy as np

        wire, rows = self._wire, self._held
        steps = np.arange(self._first, self._first + len(rows))
        table = np.array([list(row.values()) for row in rows]).T
        batch = wire.Batch(
            run="bench",
            rank=0,
            session="benchmark",
            seq=self._seq,
            world_size=1,
            sent_at=time.time(),
            through_step=int(steps[-1]),
            columns={n: wire.Column(steps, v) for n, v in zip(self._names, table, strict=True)},
        )
        kind = {"Content-Type": wire.CONTENT_TYPE}
        self._line.request("POST", "/api/v1/ingest", wire.encode(batch), kind)
        answer = self._line.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} {body[:300]!r}")
        self._first, self._seq, self._held = self._first + len(rows), self._seq + 1, []

    def close(self) -> None:
        if self._monitor is None:
            if self._held:
                self._post()
            return
        self._monitor.close()
        run = self._ask("/api/v1/runs/bench")
        if run["state"] != "finished" or any(run["agent"]["dropped"].values()):
            raise RuntimeError(f"not all of it has come: {run['state']}, {run['agent']}")

    def read(self, name: str) -> int:
        found = self._ask(f"/api/v1/runs/bench/series?metric={name}&rank=0&max_points=100000")
        return sum(len(series["steps"]) for series in found["series"])

    def _ask(self, path: str) -> Any:
        with urllib.request.urlopen(self._server + path, timeout=60) as answer:
            return json.load(answer)


TRACKERS: dict[str, type[Tracker]] = {
    "rankscope": Rankscope,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": Wandb,
    "aim": Aim,
    "mlflow": Mlflow,
}


def write(given: dict[str, Any]) -> dict[str, Any]:
    """Writes a run.

    Args:
        given: `peer`, `way` (`ordinary` or `fast`), `folder`, `server` where there is one,
            `scalars` a step, `steps` at most, and `seconds` after which no step is begun.

    Returns:
        `points` and `seconds` from the first call until closed, `call_us` quantiles of a log call,
        `read_ms` of a whole series or None, `version`.
    """
    made = random.Random(0)
    # Losses and norms come from single precision.
    numbers = [struct.unpack("f", struct.pack("f", made.gauss(2, 0.3)))[0] for _ in range(8192)]
    width = given["scalars"]
    names = [f"metric_{n}" for n in range(width)]
    rows = [
        {name: numbers[(step * width + n) % 8192] for n, name in enumerate(names)}
        for step in range(given["steps"])
    ]
    tracker = TRACKERS[given["peer"]](given)
    clock = time.perf_counter
    calls: list[float] = []
    began = clock()
    for step, row in enumerate(rows):
        at = clock()
        tracker.log(row, step)
        after = clock()
        calls.append(after - at)
        tracker.end_step()
        if after - began > given["seconds"]:
            break
    tracker.close()
    seconds = clock() - began
    # What the first one imports is not a matter of reading.
    tracker.read(names[-1])
    began = clock()
    found = tracker.read(names[-1])
    read_ms = (clock() - began) * 1e3
    if found is not None and found != len(calls):
        raise RuntimeError(f"{len(calls)} steps were written and {found} are there")
    calls.sort()
    return {
        "points": len(calls) * width,
        "seconds": seconds,
        "call_us": {
            "p50": calls[len(calls) // 2] * 1e6,
            "p99": calls[min(len(calls) * 99 // 100, len(calls) - 1)] * 1e6,
        },
        "read_ms": None if found is None else read_ms,
        "version": importlib.metadata.version(tracker.package),
    }


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(write(json.loads(sys.argv[1]))) + "\n")
