"""`python -m tests.lab.seeds.goal [--runs 20]`: how often `rankscope gate --against` is right.

Real trainings, agents, server and gate: ten runs are the baseline; of each kind of candidate it
prints how many fail, and by what. Good ones should not, of the others nine in ten should.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rankscope.server.gate.gate import gate
from tests.support.servers.service import Service

KINDS = {"good": 100, "noisier": 200, "slow": 300, "halting": 400}
BASELINE = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Service(Path(folder), environment=os.environ) as service,
    ):
        baseline = [f"base-{seed}" for seed in range(BASELINE)]
        train(service, [f"{r}:{n}:good:{options.steps}" for n, r in enumerate(baseline)], folder)
        for kind, first in KINDS.items():
            runs = [f"{kind}-{n}" for n in range(options.runs)]
            wanted = [f"{r}:{first + n}:{kind}:{options.steps}" for n, r in enumerate(runs)]
            train(service, wanted, folder)
            codes: Counter[int] = Counter()
            failed: Counter[str] = Counter()
            shares: list[float] = []
            for run in runs:
                code, report = judged(service, run, baseline)
                codes[code] += 1
                failed.update(r.partition(":")[0] for r in report["reasons"])
                shares += [
                    m["value"] / m["expected"] - 1
                    for m in report["against"]["measures"]
                    if m["name"] == "loss"
                ]
            mean = f"{100 * sum(shares) / len(shares):+.1f} %"
            print(f"{kind}: exit codes {dict(codes)}, loss {mean}, {dict(failed)}", flush=True)


def train(service: Service, wanted: list[str], folder: str) -> None:
    """Trains the runs, and waits until they have been judged."""
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-P", "-m", "tests.support.jobs.seeds_job", *wanted],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "RANKSCOPE_SERVER": service.url,
            "RANKSCOPE_PROJECT": "seeds",
            "RANKSCOPE_SPOOL": f"{folder}/spool",
            "RANKSCOPE_ALLOWANCE": "0",
        },
        check=True,
        stderr=subprocess.DEVNULL,
    )
    for one in wanted:
        service.wait_for_state(one.partition(":")[0], "finished", timeout_s=120)
    print(f"{len(wanted)} runs in {time.monotonic() - began:.0f} s", flush=True)


def judged(service: Service, run: str, baseline: list[str]) -> tuple[int, dict]:
    """Exit code and report of the gate."""
    printed = io.StringIO()
    arguments = [run, "--server", service.url, "--against", ",".join(baseline), "--format", "json"]
    with contextlib.redirect_stdout(printed):
        code = gate(arguments)
    return code, json.loads(printed.getvalue())


if __name__ == "__main__":
    main()
