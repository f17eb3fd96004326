"""All benchmarks of speed and size, and the same points through other trackers: `make bench`.

    python -m benchmarks.run [--quick] [--peers all|none|NAME,...] [--only PART] [--json FILE]

Parts, one after the other: `peers` (Rankscope, MLflow, trackio, wandb offline, aim and TensorBoard
in turns), `ingest`, `query`, `evaluation` (from a step to its alert) and `agent`. The peers are
installed into .venv-peers the first time, which takes minutes; `--peers none` measures Rankscope
alone. The same parts can be called with all their options: benchmarks.load, benchmarks.query,
benchmarks.alert_latency and benchmarks.agent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers import table, turns
from benchmarks.peers.environments import REQUIREMENTS

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".venv-peers"
# Part -> what it is called with, in full and quick; each writes or prints its figures as JSON.
_FULL = {
    "ingest": ("-m", "benchmarks.load", "--seconds", "60"),
    "query": ("-m", "benchmarks.query"),
    "evaluation": ("-m", "benchmarks.alert_latency"),
    "agent": ("-m", "benchmarks.agent"),
}
_QUICK = {
    "ingest": ("-m", "benchmarks.load", "--seconds", "6", "--ranks", "16"),
    "query": (
        *("-m", "benchmarks.query", "--ranks", "16", "--steps", "10000", "--metrics", "4"),
        *("--runs", "500", "--repeats", "10"),
    ),
    "evaluation": ("-m", "benchmarks.alert_latency", "--ranks", "16", "--runs", "3"),
    "agent": ("-m", "benchmarks.agent", "--quick"),
}
# These print their figures; the others write them to a given file.
_PRINTING = ("ingest", "evaluation")
_PLANS = {
    False: turns.Plan(),
    True: turns.Plan(steps=2000, seconds=3.0, rounds=1, limit_s=120.0),
}
_LIMIT_SECONDS = {False: 3600.0, True: 300.0}


def main(arguments: list[str] | None = None) -> int:
    """Runs what was asked for; exit code 1 where a part of Rankscope's own fails."""
    options = _options(arguments)
    parts = options.only or ["peers", *_FULL]
    began, load_before = time.monotonic(), os.getloadavg()
    results: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": options.quick,
        "machine": {
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "load_before": load_before,
        },
    }
    if "peers" in parts:
        results["peers"] = turns.measure(_PLANS[options.quick], options.peers, ENVIRONMENTS)
        sys.stdout.write("\n" + table.peers(results["peers"]) + "\n")
        sys.stdout.flush()
    commands = _QUICK if options.quick else _FULL
    own = results["rankscope"] = {}
    for part, command in commands.items():
        if part in parts:
            sys.stderr.write(f"{part} ...\n")
            own[part] = _part(part, command, _LIMIT_SECONDS[options.quick])
    if own:
        sys.stdout.write("\n" + table.own(own))
    results["machine"]["load_after"] = os.getloadavg()
    results["seconds"] = time.monotonic() - began
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    loads = " to ".join(f"{load:.1f}" for load in (load_before[0], os.getloadavg()[0]))
    sys.stdout.write(
        f"\n{os.cpu_count()} cores, load average {loads}; {results['seconds']:.0f} s; "
        f"all figures in {options.json}\n"
    )
    lines = results.get("peers", {"ways": {}})["ways"].items()
    broken = [name for name, line in lines if name.startswith("rankscope") and "failed" in line]
    return 1 if broken or any("failed" in found for found in own.values()) else 0


def _part(part: str, command: tuple[str, ...], limit_s: float) -> dict[str, Any]:
    """What a benchmark reports: `report` and its `exit_code`, or `failed` with the reason."""
    with tempfile.TemporaryDirectory(prefix="rankscope-bench-") as folder:
        out = Path(folder) / "report.json"
        flags = ("--json",) if part in _PRINTING else ("--json", str(out))
        try:
            done = subprocess.run(
                [sys.executable, *command, *flags],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {limit_s:.0f} s"}
        text = done.stdout if part in _PRINTING else out.read_text() if out.exists() else ""
        try:
            # An exit code of 1 with figures says that a goal is missed.
            return {"report": json.loads(text), "exit_code": done.returncode}
        except json.JSONDecodeError:
            return {"failed": f"exit code {done.returncode} and no figures: see above"}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help="2 to 3 minutes: for an impression, not for a judgement",
    )
    known = ",".join(turns.PEERS)
    add("--peers", type=_peers, default=turns.PEERS, help=f"all, none or some of {known}")
    add("--only", action="append", choices=("peers", *_FULL), help="this part; repeatable")
    add("--json", type=Path, default=ROOT / "out" / "bench.json", help="all figures go there")
    return parser.parse_args(arguments)


def _peers(given: str) -> tuple[str, ...]:
    if given == "all":
        return turns.PEERS
    names = () if given == "none" else tuple(given.split(","))
    if unknown := [name for name in names if name not in turns.PEERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is not in {REQUIREMENTS.name}")
    return names


if __name__ == "__main__":
    sys.exit(main())
