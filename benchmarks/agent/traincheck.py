"""TrainCheck (https://github.com/OrderLab/TrainCheck) beside us, in its selective mode.

A short reference run is traced in full, invariants are inferred from it, and the measured run
traces what these invariants need, at one step in ten: its documented way of use, at its defaults.
Its online checker would be a further process; only the tracing is measured.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

from .figures import Round, Steps, compared

_SCRIPT = Path(__file__).with_name("traincheck_script.py")
# Name -> milliseconds of the plain step, and measured steps of a block.
_WORKLOADS = {"MLP, 1 ms": (1.0, 100), "MLP, 10 ms": (10.0, 20)}
_ROUNDS = 9
_WARM_UP = 31  # it traces every one of its first ten steps


class Unusable(Exception):
    """TrainCheck cannot be installed or does not run; says why."""


class Process:
    """The script, running: trains a block when it is asked."""

    def __init__(self, command: list[str], folder: Path) -> None:
        folder.mkdir()
        self._times = folder / "times.jsonl"
        self._log = (folder / "log.txt").open("w+")
        self._read = 0
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=_environment() | {"TIMES": str(self._times)},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def block(self, batch: int, steps: int, timeout: float = 180.0) -> list[float]:
        """Trains; step times in seconds."""
        assert self._process.stdin is not None
        deadline = time.monotonic() + timeout
        try:
            self._process.stdin.write(f"{batch} {steps}\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise Unusable(f"it ended: {self._output()}") from error
        while True:
            lines = self._times.read_text().splitlines(True) if self._times.exists() else []
            if len(lines) > self._read and lines[self._read].endswith("\n"):
                self._read += 1
                times: list[float] = json.loads(lines[self._read - 1])
                return times
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise Unusable(f"no answer: {self._output()}")
            time.sleep(0.02)

    def close(self) -> None:
        """Ends it: a script ends with its input."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait(20)
        self._log.close()

    def _output(self) -> str:
        self._log.seek(0)
        return self._log.read()[-400:]


def measure(folder: Path) -> dict[str, Any]:
    """Figures for each workload, or a sentence that says why there are none."""
    folder = folder / "traincheck"
    folder.mkdir()
    try:
        python = _installed(folder / "environment")
        return _measured(python, _prepared(python, folder), folder)
    except Unusable as error:
        return {"TrainCheck": f"did not run: {error}"}


def _installed(home: Path) -> Path:
    """The Python of an environment with TrainCheck, and with all that is installed here."""
    _call([sys.executable, "-m", "venv", "--without-pip", str(home)], home.parent, 60)
    [packages] = home.glob("lib/python*/site-packages")
    # So that it does not bring another torch with it.
    (packages / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "traincheck"]
    _call(pip, home.parent, 300)
    return python


def _prepared(python: Path, folder: Path) -> list[str]:
    """The command that runs the script with selective tracing."""
    script = folder / "script.py"  # it writes the instrumented copy beside it
    script.write_text(_SCRIPT.read_text())
    collect = [str(python.with_name("traincheck-collect")), "--pyscript", str(script)]
    collect += ["--models-to-track", "model"]
    reference = str(folder / "reference")
    reference_run = Process([*collect, "--output-dir", reference], folder / "reference-run")
    try:
        reference_run.block(32, 20)
    finally:
        reference_run.close()
    invariants = str(folder / "invariants.json")
    infer = [str(python.with_name("traincheck-infer")), "-f", reference, "-o", invariants]
    _call(infer, folder, 300)
    return [*collect, "--invariants", invariants, "--output-dir", str(folder / "target")]


def _measured(python: Path, command: list[str], folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    plain = Process([str(python), str(_SCRIPT)], folder / "plain-run")
    traced = Process(command, folder / "traced-run")
    try:
        for name, (step_ms, steps) in _WORKLOADS.items():
            batch = _fitted_batch(plain, step_ms)
            traced.block(batch, _WARM_UP)
            rounds: list[Round] = []
            for turn in range(_ROUNDS):
                order = [plain, traced] if turn % 2 == 0 else [traced, plain]
                blocks: dict[str, list[float]] = {"plain": [], "traincheck": []}
                for process in (*order, *reversed(order)):
                    name_of_arm = "plain" if process is plain else "traincheck"
                    blocks[name_of_arm] += process.block(batch, steps)
                rounds.append(
                    {
                        arm: Steps(np.array(times), np.zeros(len(times), dtype=np.bool_))
                        for arm, times in blocks.items()
                    }
                )
            middle = float(np.median(np.concatenate([r["plain"].seconds for r in rounds])))
            results[name] = {
                "plain_ms": 1e3 * middle,
                "batch": batch,
                "traincheck": compared(rounds, "traincheck"),
            }
    finally:
        plain.close()
        traced.close()
    return results


def _fitted_batch(plain: Process, step_ms: float) -> int:
    batch = 32
    for _ in range(5):
        took = 1e3 * statistics.median(plain.block(batch, 40)[10:])
        batch = max(1, round(batch * min(max(step_ms / took, 0.25), 4.0)))
    return batch


def _call(command: list[str], folder: Path, timeout: float) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unusable(str(error)[:300]) from error
    if done.returncode:
        raise Unusable(f"{Path(command[0]).name}: {(done.stdout + done.stderr)[-300:]}")


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}
