"""What others can do to an honest job: its posts' latency and its alerts' delay beside a flood.

    python -m benchmarks.flood --rounds 3
    python -m benchmarks.flood --only full_speed --jobs 6

64 honest ranks post every half second, as agents do in their first 20 seconds, and one of them
diverges. Beside them, one after the other and each after a round without any: `full_speed`, one
run of 64 ranks that posts again as soon as it is answered; `tiny_runs`, 3,000 runs of one point
each; `dashboards`, 50 pages that ask for all that a run's page shows; `half_open`, 1,000 posts
whose second half never comes.

All of it is on one machine. The flood gives way to others (nice), as it would not take the server's
processor if it came from elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.alert_latency import Busy, Job, Line
from benchmarks.load.target import running
from rankscope.agent import wire

_CALM = "alone"
_BIG = "flood-big"
_RUNS, _PAGES, _HALF_OPEN, _LINES = 3000, 50, 1000, 64
# How often each page asks.
_REFRESH_S = 0.5
# The honest job diverges after so many steps.
_BAD_STEP = 60


def _point(run: str, seq: int = 0, steps: int = 1) -> bytes:
    at = np.arange(seq * steps, (seq + 1) * steps)
    batch = wire.Batch(
        run=run,
        rank=0,
        session=uuid.uuid4().hex[:16],
        seq=seq,
        sent_at=time.time(),
        through_step=int(at[-1]),
        hello=wire.Hello(started_at=time.time()),
        columns={"loss": wire.Column(at, np.ones(steps))},
    )
    return wire.encode(batch)


async def _tiny_runs(address: tuple[str, int]) -> None:
    """Runs of a point each, as fast as they are taken, again and again."""
    waves = 0
    while True:
        names = [f"tiny-{os.getpid()}-{waves}-{n}" for n in range(_RUNS)]
        waves += 1

        async def line(names: list[str] = names) -> None:
            async with Line(address) as open_line:
                while names:
                    body = _point(names.pop())
                    with contextlib.suppress(Busy):
                        await open_line.ask("POST", "/ingest", body)

        await asyncio.gather(*(line() for _ in range(_LINES)))


async def _dashboards(address: tuple[str, int]) -> None:
    """Pages of a long run, which ask for everything they show."""
    shows = ["", "/metrics", "/alerts?state=open", "/divergence", "/verdict"]
    shows += [f"/series?metric={name}" for name in ("loss", "grad_norm", "lr", "step_seconds")]

    async def page() -> None:
        await asyncio.sleep(random.random() * _REFRESH_S)
        async with Line(address) as line:
            while True:
                for path in shows:
                    with contextlib.suppress(Busy):
                        await line.ask("GET", f"/runs/{_BIG}{path}")
                await asyncio.sleep(_REFRESH_S)

    await asyncio.gather(*(page() for _ in range(_PAGES)))


async def _half_open(address: tuple[str, int]) -> None:
    """Posts that break off in the middle, and connections that stay, begun anew where closed."""
    body = _point("half-open")
    head = (
        f"POST /api/v1/ingest HTTP/1.1\r\nHost: localhost\r\nContent-Type: {wire.CONTENT_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()

    async def half() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(head + body[: len(body) // 2])
                await reader.read()
                writer.close()
            await asyncio.sleep(1)

    await asyncio.gather(*(half() for _ in range(_HALF_OPEN)))


_ACTORS: dict[str, Callable[[tuple[str, int]], Awaitable[None]]] = {
    "tiny_runs": _tiny_runs,
    "dashboards": _dashboards,
    "half_open": _half_open,
}
_FLOODS = (*_ACTORS, "full_speed")


@contextlib.contextmanager
def _flood(name: str, url: str) -> Iterator[None]:
    """A flood in a process of its own, until the block ends."""
    if name == _CALM:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.flood", "--actor", name, "--server", url]
    if name == "full_speed":
        # No end that comes sooner than the block's.
        command = [sys.executable, "-m", "benchmarks.load", "--server", url, "--seconds", "100000"]
    process = subprocess.Popen(
        ["nice", "-n", "10", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(2)  # until it has begun
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the flood {name} has ended by itself: {process.returncode}")
    finally:
        process.kill()
        process.wait()


def _measure(
    name: str, url: str, address: tuple[str, int], jobs: int, interval: float
) -> dict[str, Any]:
    options = argparse.Namespace(ranks=64, pace=10.0, interval=interval)

    async def all_jobs() -> list[tuple[Job, dict[str, float] | None]]:
        done = []
        for _ in range(jobs):
            job = Job(options, address, _BAD_STEP + random.randrange(5))
            done.append((job, await job.measure()))
        return done

    with _flood(name, url):
        done = asyncio.run(all_jobs())
    latency = 1000 * np.concatenate([job.latency_s for job, _ in done])
    delay = [found["visible"] for _, found in done if found is not None]
    return {
        "posts": len(latency),
        "p50_ms": float(np.percentile(latency, 50)),
        "p99_ms": float(np.percentile(latency, 99)),
        "max_ms": float(latency.max()),
        "alert_s": float(np.median(delay)) if delay else None,
        "missed": jobs - len(delay),
        "refused": sum(job.refused for job, _ in done),
    }


def _fill(url: str) -> None:
    """The run that the pages show."""
    command = [sys.executable, "-m", "benchmarks.load", "--server", url, "--run", _BIG]
    subprocess.run(
        [*command, "--seconds", "8", "--ranks", "64", "--scalars", "8"],
        stdout=subprocess.DEVNULL,
        check=True,
    )


def main() -> int:
    """Prints a line for each flood; exit code 1 where honest ranks were hurt."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flood",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", action="append", choices=_FLOODS, help="this flood; repeatable")
    add("--rounds", type=int, default=1, help="of all floods, each beside one without any")
    add("--jobs", type=int, default=4, help="honest jobs beside each, one after the other")
    add("--interval", type=float, default=0.5, help="seconds between two posts of an honest rank")
    add("--database", default="sqlite", metavar="sqlite|postgresql")
    add("--json", action="store_true")
    add("--actor", choices=[*_ACTORS], help=argparse.SUPPRESS)
    add("--server", help=argparse.SUPPRESS)
    options = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if options.actor:
        parts = urlsplit(options.server)
        asyncio.run(_run_for_ever(options.actor, (parts.hostname or "", parts.port or 0)))
    report: list[dict[str, Any]] = []
    with running(
        server=None, pid=None, database=options.database, evaluate=True, folder=None
    ) as target:
        _fill(target.url)
        _measure(
            _CALM, target.url, target.address, 1, options.interval
        )  # everything is loaded by then
        for _ in range(options.rounds):
            for name in options.only or _FLOODS:
                for flood in (_CALM, name):
                    found = _measure(
                        flood, target.url, target.address, options.jobs, options.interval
                    )
                    line = {"beside": name, "flood": flood, "load": os.getloadavg()[0], **found}
                    report.append(line)
                    if not options.json:
                        print(_text(line), flush=True)
                    if flood != _CALM:
                        time.sleep(3)  # what it left behind is worked off
    if options.json:
        print(json.dumps(report, indent=1))
    return 1 if _hurt(report) else 0


async def _run_for_ever(name: str, address: tuple[str, int]) -> None:
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await _ACTORS[name](address)


def _hurt(report: list[dict[str, Any]]) -> bool:
    """Whether a flood more than doubled the 99th percentile, or delayed alerts by over 2 s."""
    hurt = False
    for name in {line["beside"] for line in report}:

        def median(what: str, calm: bool, name: str = name) -> float:
            lines = [x for x in report if x["beside"] == name and (x["flood"] == _CALM) == calm]
            # An alert that did not come within half a minute is no number.
            return float(np.median([np.inf if x[what] is None else x[what] for x in lines]))

        hurt |= median("p99_ms", False) > 2 * median("p99_ms", True)
        hurt |= median("alert_s", False) > 2 + median("alert_s", True)
        hurt |= median("refused", False) > 0
    return hurt


def _text(line: dict[str, Any]) -> str:
    alert = "none" if line["alert_s"] is None else f"{line['alert_s']:.2f} s"
    return (
        f"{line['flood']:12} p50 {line['p50_ms']:7.1f} ms  p99 {line['p99_ms']:7.1f} ms  "
        f"max {line['max_ms']:7.0f} ms  alert {alert}, {line['missed']} missed, "
        f"{line['refused']} refused of {line['posts']}  (load {line['load']:.1f})"
    )


if __name__ == "__main__":
    sys.exit(main())
