"""Every tracker in turns, round after round, so that a machine that is busy is busy for all."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.load.target import running
from benchmarks.peers.environments import NotInstalled, python_of
from rankscope.server.demo.processes import Process, free_port

WRITER = Path(__file__).with_name("writer.py")
# Ways for which the documentation of the tracker names no faster one are measured once.
WAYS: dict[str, tuple[str, ...]] = {
    "rankscope": ("ordinary", "fast"),
    "mlflow": ("ordinary", "fast"),
    "trackio": ("ordinary",),
    "wandb": ("ordinary",),
    "aim": ("ordinary",),
    "tensorboard": ("ordinary", "fast"),
}
PEERS = tuple(peer for peer in WAYS if peer != "rankscope")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Nothing is to be reported to anybody, and no terminal to be asked.
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # A dozen processes for jobs that nobody gives: they would take time from what is measured.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "WANDB_ERROR_REPORTING": "false",
    "AIM_UI_TELEMETRY_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "GIT_PYTHON_REFRESH": "quiet",
}
_START_SECONDS = 180.0


class Failed(Exception):
    """A tracker did not do it; the message says why."""


@dataclass(frozen=True)
class Plan:
    """How much is written.

    Attributes:
        scalars: a step.
        steps: of a run, at most; the agent holds 200,000 facts, so not more than that in all.
        seconds: after which a run takes no further step: slow ways write fewer points.
        rounds: how often each takes its turn.
        limit_s: a turn that takes longer has failed.
    """

    scalars: int = 20
    steps: int = 5000
    seconds: float = 15.0
    rounds: int = 3
    limit_s: float = 300.0


def measure(plan: Plan, peers: Sequence[str], environments: Path) -> dict[str, Any]:
    """Measures Rankscope and the peers.

    Returns:
        `ways`: for each "peer, way" `points`, `points_per_s`, `bytes_per_point`, `call_us`,
        `read_ms`, `version` (medians over the rounds) and `rounds` as they were measured; or
        `failed`, with the reason. `plan` as it was.
    """
    pythons: dict[str, Path | NotInstalled] = {}
    for peer in ("rankscope", *peers):
        try:
            pythons[peer] = python_of(peer, environments)
        except NotInstalled as error:
            pythons[peer] = error
    turns = [(peer, way) for peer in pythons for way in WAYS[peer]]
    measured: dict[str, Any] = {name_of(*turn): {"rounds": []} for turn in turns}
    for number in range(plan.rounds):
        # Each is first once, and not always after the same one.
        shift = number * len(turns) // plan.rounds
        order = turns[shift:] + turns[:shift]
        for peer, way in order if number % 2 == 0 else order[::-1]:
            line = measured[name_of(peer, way)]
            if "failed" in line:
                continue
            python = pythons[peer]
            if isinstance(python, NotInstalled):
                line["failed"] = str(python)
                continue
            sys.stderr.write(f"round {number + 1} of {plan.rounds}: {name_of(peer, way)}\n")
            try:
                line["rounds"].append(_turn(peer, way, python, plan))
            except (Failed, OSError, RuntimeError) as error:
                line["failed"] = str(error)
    return {
        "plan": asdict(plan),
        "ways": {name: _summary(line) for name, line in measured.items()},
    }


def name_of(peer: str, way: str) -> str:
    """How a line is called."""
    return f"{peer}, {way}"


def _summary(line: dict[str, Any]) -> dict[str, Any]:
    if "failed" in line:
        return line
    rounds = line["rounds"]

    def median(*path: str) -> float:
        values = []
        for found in rounds:
            for key in path:
                found = found[key]
            values.append(found)
        return statistics.median(values)

    return {
        "points": median("points"),
        "points_per_s": median("points_per_s"),
        "bytes_per_point": median("bytes_per_point"),
        "call_us": {q: median("call_us", q) for q in ("p50", "p99")},
        "read_ms": None if rounds[0]["read_ms"] is None else median("read_ms"),
        "version": rounds[0]["version"],
        "rounds": rounds,
    }


def _turn(peer: str, way: str, python: Path, plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(
        prefix="rankscope-peers-", ignore_cleanup_errors=True
    ) as folder:
        data = Path(folder) / "data"
        data.mkdir()
        given = {
            "peer": peer,
            "way": way,
            "folder": str(data),
            "scalars": plan.scalars,
            "steps": plan.steps,
            "seconds": plan.seconds,
        }
        with _server(peer, python, data) as url:
            found = _write(python, given | {"server": url}, Path(folder), plan.limit_s)
        # The server has ended: what it keeps beside its database while it runs is written or gone.
        found["points_per_s"] = found["points"] / found["seconds"]
        found["bytes_per_point"] = size_of(data) / found["points"]
        return found


def size_of(folder: Path) -> int:
    """Bytes in the files below a folder, but for logs of servers."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files if path.name != "server.log")


def _write(python: Path, given: dict[str, Any], home: Path, limit_s: float) -> dict[str, Any]:
    # Trackers keep settings and caches in the user's home: here they get one of their own.
    environment = os.environ | _ENVIRONMENT | {"HOME": str(home), "TMPDIR": str(home)}
    try:
        done = subprocess.run(
            # -P: a folder `agent` or `wandb` where the user stands is not to be imported.
            [str(python), "-P", str(WRITER), json.dumps(given)],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {limit_s:.0f} s") from None
    if done.returncode:
        stderr_lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise Failed(
            f"exit code {done.returncode}: {(stderr_lines or ['no reason given'])[-1][:300]}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextlib.contextmanager
def _server(peer: str, python: Path, folder: Path) -> Iterator[str]:
    if peer == "rankscope":
        with running(
            server=None, pid=None, database="sqlite", evaluate=True, folder=folder
        ) as target:
            yield target.url
        return
    if peer != "mlflow":
        yield ""
        return
    port = free_port()
    command = [
        *(str(python), "-P", "-m", "mlflow", "server", "--host", "127.0.0.1"),
        *("--port", str(port), "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"),
        *("--artifacts-destination", str(folder / "artifacts"), "--workers", "1"),
    ]
    url = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    with Process(command, log=log, environment=_ENVIRONMENT | {"HOME": str(folder)}) as process:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(f"{url}/health"):
            if process.exit_code is not None or time.monotonic() > deadline:
                raise Failed(f"its server does not come up: {process.tail(1)[:300]}")
            time.sleep(0.2)
        yield url


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
