"""What a server takes: many simulated ranks that post as the agent does.

    python -m benchmarks.load --ranks 64 --seconds 30 --scalars 20 --steps-a-batch 50
    python -m benchmarks.load --ranks 1024 --steps-a-batch 1 --pace 1 --layers-every 16 \
        --prints-every 32 --seconds 600

Without --server it starts one with an empty database. Every rank has a connection of its own and
posts again as soon as it is answered, or, with --pace, at a number of steps a second, done or not.

Points are numbers: values of scalars, digests of the whole model, statistics of tensors. A
fingerprint (digests and sketches of all tensors) counts as one, although it is large.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from benchmarks.load.batches import Rank, Shape, Templates
from benchmarks.load.posting import Posted, post
from benchmarks.load.target import Target, record, running


def main() -> int:
    """Runs the load; exit code 1 where a batch was refused or not answered."""
    options = _options()
    shape = Shape(
        run=options.run or f"load-{os.getpid()}",
        ranks=options.ranks,
        scalars=options.scalars,
        steps=options.steps_a_batch,
        layers_every=options.layers_every,
        prints_every=options.prints_every,
        tensors=options.tensors,
    )
    files = max(resource.getrlimit(resource.RLIMIT_NOFILE)[1], options.ranks)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with running(
        server=options.server,
        pid=options.server_pid,
        database=options.database,
        evaluate=not options.no_evaluation,
        folder=options.folder,
    ) as target:
        report = _load(target, shape, options)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        _show(report)
    return 1 if report["refused"] or report["errors"] else 0


def _load(target: Target, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    templates = Templates(shape, f"{target.address[0]}:{target.address[1]}")
    ranks = [Rank(number, templates) for number in range(shape.ranks)]
    disk_before = target.disk()
    trace: list[dict[str, Any]] = []

    def sample(at: float) -> None:
        server = target.server()
        entry = {"at": round(at, 1), "rss": server.rss, "cpu_s": server.cpu_s}
        if options.database and (lag := target.lag(shape.run)) is not None:
            entry |= {"lag_batches": lag[0], "lag_steps": lag[1]}
        trace.append(entry)

    profile = None
    if options.profile is not None and target.pid is not None:
        profile = record(target.pid, options.seconds, options.profile, options.py_spy)
    before, database_before, own_before = target.server(), target.database(), time.process_time()
    began = time.perf_counter()
    posted = post(
        ranks,
        target.address,
        seconds=options.seconds,
        interval_s=shape.steps / options.pace if options.pace else None,
        every_second=sample,
    )
    seconds = time.perf_counter() - began
    after, database_after = target.server(), target.database()
    own = time.process_time() - own_before
    if profile is not None:
        profile.wait(timeout=60)
    caught_up = _catch_up(target, shape.run, options.drain, sample)
    disk = target.disk()
    grown = None if disk is None or disk_before is None else disk - disk_before
    server_cpu = after.cpu_s - before.cpu_s
    points = sum(posted.points)
    return {
        "ranks": shape.ranks,
        "scalars": shape.scalars,
        "steps_a_batch": shape.steps,
        "layers_every": shape.layers_every,
        "prints_every": shape.prints_every,
        "seconds": seconds,
        "posts": len(posted.at),
        "posts_per_s": len(posted.at) / seconds,
        "points": points,
        "points_per_s": points / seconds,
        "accepted": posted.accepted,
        "refused": posted.refused,
        "errors": posted.errors,
        "mb_per_s": posted.bytes / seconds / 1e6,
        "latency_ms": _latency(posted.latency_s),
        "thirds": _thirds(posted, trace, seconds),
        "server_cpu_s": server_cpu,
        "points_per_server_cpu_s": points / server_cpu if server_cpu else None,
        "posts_per_server_cpu_s": len(posted.at) / server_cpu if server_cpu else None,
        "database_cpu_s": database_after.cpu_s - database_before.cpu_s,
        "generator_cpu_s": own,
        "server_rss_mb": after.rss / 1e6,
        "server_rss_max_mb": max([after.rss, *(t["rss"] for t in trace)]) / 1e6,
        "disk_bytes": grown,
        "disk_bytes_per_point": None if grown is None or not points else grown / points,
        "layout": target.layout(),
        "lag": _lag(trace),
        "caught_up_after_s": caught_up,
        "alerts": _alerts(target),
        "trace": trace,
    }


def _catch_up(target: Target, run: str, seconds: float, sample: Any) -> float | None:
    """How long the evaluation needs for what is left; None where it takes longer than given."""
    began = time.monotonic()
    while True:
        lag = target.lag(run)
        if lag is None:
            return None
        if lag[0] == 0:
            return time.monotonic() - began
        if time.monotonic() - began > seconds:
            return None
        sample(time.monotonic() - began)
        time.sleep(0.2)


def _latency(latencies: list[float]) -> dict[str, float]:
    if not latencies:
        return {}
    ms = np.array(latencies) * 1e3
    found = {f"p{p}": float(np.percentile(ms, p)) for p in (50, 95, 99)}
    return {**found, "max": float(ms.max())}


def _thirds(posted: Posted, trace: list[dict[str, Any]], seconds: float) -> list[dict[str, float]]:
    """Whether it stays as it began."""
    at, latency = np.array(posted.at), np.array(posted.latency_s)
    points = np.array(posted.points)
    found = []
    for n in range(3):
        low, high = n * seconds / 3, (n + 1) * seconds / 3
        part = (at >= low) & (at < high)
        rss = [t["rss"] for t in trace if low <= t["at"] < high]
        found.append(
            {
                "points_per_s": float(points[part].sum() / (high - low)),
                "p99_ms": float(np.percentile(latency[part], 99) * 1e3) if part.any() else 0.0,
                "rss_max_mb": max(rss, default=0) / 1e6,
            }
        )
    return found


def _lag(trace: list[dict[str, Any]]) -> dict[str, int]:
    lags = [t for t in trace if "lag_batches" in t]
    if not lags:
        return {}
    return {
        "max_batches": max(t["lag_batches"] for t in lags),
        "max_steps": max(t["lag_steps"] for t in lags),
        "last_batches": lags[-1]["lag_batches"],
        "last_steps": lags[-1]["lag_steps"],
    }


def _alerts(target: Target) -> int | None:
    """Alerts of the load, which is a healthy job: there should be none."""
    answer = urllib3.request("GET", f"{target.url}/metrics", timeout=30)
    lines = [line for line in answer.data.decode().splitlines() if "alerts_open{" in line]
    return sum(int(line.rsplit(" ", 1)[1]) for line in lines)


def _show(report: dict[str, Any]) -> None:
    for key, value in report.items():
        if key == "trace":
            continue
        text = f"{value:,.2f}" if isinstance(value, float) else value
        if isinstance(value, int) and not isinstance(value, bool):
            text = f"{value:,}"
        if isinstance(value, dict):
            text = ", ".join(f"{k} {v:,.1f}" for k, v in value.items())
        if key == "thirds":
            text = "; ".join(", ".join(f"{k} {v:,.0f}" for k, v in t.items()) for t in value)
        print(f"{key:24} {text}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, default=64)
    add("--seconds", type=float, default=20.0)
    add("--scalars", type=int, default=20, help="a step and rank")
    add("--steps-a-batch", type=int, default=50)
    add("--pace", type=float, help="steps a second of a rank; default: as fast as it is answered")
    add("--layers-every", type=int, default=0, help="steps between statistics of all tensors")
    add("--prints-every", type=int, default=0, help="steps between fingerprints of all tensors")
    add("--tensors", type=int, default=60)
    add("--server", metavar="URL", help="one that runs; default: start one")
    add("--server-pid", type=int, help="with --server: whose CPU and memory to report")
    add("--database", default="sqlite", metavar="sqlite|postgresql|URL")
    add("--no-evaluation", action="store_true", help="take batches only")
    add("--drain", type=float, default=0.0, help="seconds to wait for the evaluation at the end")
    add("--run", help="name of the run; default: a new one")
    add("--folder", type=Path, help="keep database and log there; default: a temporary folder")
    add("--profile", type=Path, help="stacks of the server as py-spy writes them (raw)")
    add("--py-spy", default="py-spy", help="where py-spy is")
    add("--json", action="store_true")
    options = parser.parse_args()
    if options.scalars < 0 or options.steps_a_batch < 1 or options.ranks < 1:
        parser.error("--ranks and --steps-a-batch are at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
