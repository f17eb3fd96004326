"""How long after the end of a step the alert about it is open in the REST answer.

    python -m benchmarks.alert_latency --ranks 64 --pace 10 --runs 20
    python -m benchmarks.alert_latency --interval 0.5       # as the agent sends

Simulated ranks post over real HTTP, each on a connection of its own. In every run one rank's
parameters diverge from the others' at a known step; the time counts from the end of that step. With
--interval 0 each step is posted when it ends: that is the server's share. With --interval 0.5, and
ranks that tick at random times within it as agents do, it is the whole chain but the trainer's own
part. Stages, each from the end of the step: `stored`, the last rank's post of that step is
answered; `opened`, the evaluation that found it began (the alert's `opened_at`); `visible`, a
client that asks every 10 ms has the alert in its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import uuid
from contextlib import suppress
from datetime import datetime
from typing import Any

import numpy as np

from benchmarks.load.target import running
from rankscope.agent import wire

_TENSORS = 60


class Busy(Exception):
    """The server asks to be asked again later.

    Attributes:
        seconds: when.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"busy, again in {seconds:.0f} s")
        self.seconds = seconds


class Line:
    """A kept connection that is asked one thing at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    async def __aenter__(self) -> Line:
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def ask(self, method: str, path: str, body: bytes = b"") -> Any:
        head = (
            f"{method} /api/v1{path} HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: {wire.CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        text = await self._reader.readexactly(length)
        if answer.startswith(b"HTTP/1.1 429"):
            after = answer.lower().split(b"retry-after:")[1].split(b"\r\n")[0]
            raise Busy(float(after))
        if not answer.startswith(b"HTTP/1.1 200"):
            if answer.startswith(b"HTTP/1.1 404") and method == "GET":
                return {"items": []}
            raise RuntimeError(f"{answer.splitlines()[0]!r} {text[:300]!r}")
        return json.loads(text)


class Job:
    """One run.

    Args:
        bad: the step from which one rank differs.

    Attributes:
        latency_s: of each post, from when it was due to its acceptance.
        refused: posts that the server would not take at the time.
    """

    def __init__(self, options: argparse.Namespace, address: tuple[str, int], bad: int) -> None:
        self.run = f"latency-{uuid.uuid4().hex[:8]}"
        self._options = options
        self._address = address
        self._bad = bad
        self._faulty_rank = random.randrange(options.ranks)
        self._over = asyncio.Event()
        self._stored_at: list[float] = []
        self.latency_s: list[float] = []
        self.refused = 0
        names = tuple(f"layers.{n}.weight" for n in range(_TENSORS))
        self._hello = wire.Hello(
            started_at=time.time(),
            tables={
                "parameters": wire.TensorTable(
                    names, ((64, 64),) * _TENSORS, ("float32",) * _TENSORS, ("",) * _TENSORS
                )
            },
        )

    async def measure(self) -> dict[str, float] | None:
        """Seconds from the end of the bad step to each stage; None: no alert within 30 s."""
        self._start = time.time() + 0.3
        ended = self._start + (self._bad + 1) / self._options.pace
        ranks = [asyncio.create_task(self._rank(n)) for n in range(self._options.ranks)]
        try:
            found = await asyncio.wait_for(self._watch(), ended + 30 - time.time())
        except TimeoutError:
            return None
        finally:
            self._over.set()
            await asyncio.gather(*ranks)
        opened_at, visible_at = found
        return {
            "stored": max(self._stored_at) - ended,
            "opened": opened_at - ended,
            "visible": visible_at - ended,
        }

    async def _watch(self) -> tuple[float, float]:
        async with Line(self._address) as line:
            while True:
                items = (await line.ask("GET", f"/runs/{self.run}/alerts?state=open"))["items"]
                for alert in items:
                    if alert["kind"].startswith("desync."):
                        opened = datetime.fromisoformat(alert["opened_at"]).timestamp()
                        return opened, time.time()
                await asyncio.sleep(0.01)

    async def _rank(self, rank: int) -> None:
        pace, interval = self._options.pace, self._options.interval
        session, seq, first = uuid.uuid4().hex[:16], 0, 0
        tick = self._start + random.random() * interval
        async with Line(self._address) as line:
            while not self._over.is_set():
                due = tick if interval else self._start + (first + 1) / pace
                await asyncio.sleep(max(due - time.time(), 0))
                tick += interval
                # Steps end on all ranks together, as an all-reduce makes them.
                end = int((time.time() - self._start) * pace)
                if end <= first:
                    continue
                batch = self._batch(rank, session, seq, first, end)
                await self._post(line, wire.encode(batch))
                self.latency_s.append(time.time() - max(due, self._start))
                if first <= self._bad < end:
                    self._stored_at.append(time.time())
                first, seq = end, seq + 1

    async def _post(self, line: Line, body: bytes) -> None:
        while True:
            try:
                await line.ask("POST", "/ingest", body)
                return
            except Busy as busy:
                self.refused += 1
                await asyncio.sleep(busy.seconds)

    def _batch(self, rank: int, session: str, seq: int, first: int, end: int) -> wire.Batch:
        steps = np.arange(first, end)
        digests = np.array([hash((self.run, step)) & (2**63 - 1) for step in steps], np.uint64)
        if rank == self._faulty_rank:
            digests[steps >= self._bad] ^= np.uint64(1)
        noise = np.random.default_rng([rank, first])
        columns = {
            "loss": 2.0 * np.exp(-steps / 200) * noise.normal(1, 0.05, len(steps)),
            # Equal on all ranks, whatever batch a step is in.
            "grad_norm": 1 + 0.01 * (steps % 7),
            "lr": np.full(len(steps), 3e-4),
            "step_seconds": noise.normal(0.1, 0.002, len(steps)),
            "samples_per_second": noise.normal(320, 5, len(steps)),
        }
        return wire.Batch(
            run=self.run,
            rank=rank,
            session=session,
            seq=seq,
            world_size=self._options.ranks,
            sent_at=time.time(),
            through_step=end - 1,
            hello=self._hello if seq == 0 else None,
            columns={name: wire.Column(steps, values) for name, values in columns.items()},
            words={"parameters": wire.Column(steps, digests)},
        )


async def _measure(options: argparse.Namespace, address: tuple[str, int]) -> list[Any]:
    found = []
    for _ in range(options.runs):
        # Not always the same place between two ticks of the server.
        await asyncio.sleep(random.random() * 0.3)
        bad = options.bad_step + random.randrange(5)
        found.append(await Job(options, address, bad).measure())
    return found


def main() -> int:
    """Prints the table; exit code 1 where an alert was missed or the limit is not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alert_latency")
    add = parser.add_argument
    add("--ranks", type=int, default=64)
    add("--pace", type=float, default=10.0, help="steps a second")
    add("--runs", type=int, default=20)
    add("--bad-step", type=int, default=15)
    add("--interval", type=float, default=0.0, help="seconds between two posts of a rank")
    add("--database", default="sqlite", metavar="sqlite|postgresql")
    add("--limit", type=float, default=1.0, help="seconds at the 95th percentile")
    add("--json", action="store_true")
    options = parser.parse_args()
    with running(
        server=None, pid=None, database=options.database, evaluate=True, folder=None
    ) as target:
        found = asyncio.run(_measure(options, target.address))
    reported = [one for one in found if one is not None]
    report: dict[str, Any] = {"missed": len(found) - len(reported), **vars(options)}
    for stage in ("stored", "opened", "visible"):
        values = [one[stage] for one in reported]
        report[stage] = {
            f"p{p}_ms": round(1000 * float(np.percentile(values, p))) for p in (50, 95, 100)
        }
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        for name, value in report.items():
            print(f"{name:10} {value}")
    kept = report["visible"]["p95_ms"] <= 1000 * options.limit
    return 0 if kept and not report["missed"] else 1


if __name__ == "__main__":
    sys.exit(main())
