"""How long views take, over HTTP, from a server process on a database as large as a long run.

    python -m benchmarks.query --ranks 256 --steps 100000 --metrics 10 --json results.json

Fills a database by the server's own storing and compacting code, then asks a server for: one metric
of all ranks over the whole run in 2,000 buckets, a zoom to 1,000 steps, the list of 10,000 runs.
`--rollups-only` writes the roll-ups of a number of steps alone, without the points below them.
Ratios are to a plain transfer of the same bytes: a file read and sent by a server that does nothing
else.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import http.server
import json
import random
import shutil
import socketserver
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from sqlalchemy import Engine, insert

from benchmarks.load.target import running
from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, writing
from rankscope.server.storage.ingest.batches import store_batches
from rankscope.server.storage.ingest.dictionary import Dictionaries
from rankscope.server.storage.maintenance import rollups, watermarks
from rankscope.server.storage.maintenance.compaction import compact

RUN = "long"
GOALS_MS = {"whole run": 150, "zoom": 50, "runs": 50}


def fill(engine: Engine, *, ranks: int, steps: int, metrics: int, a_batch: int) -> None:
    """A run with all its points, stored and compacted as they come."""
    rng = np.random.default_rng(0)
    known = Dictionaries()
    names = ["loss", *(f"metric{n}" for n in range(1, metrics))]
    for seq, first in enumerate(range(0, steps, a_batch)):
        at = np.arange(first, min(first + a_batch, steps), dtype=np.int64)
        received = []
        for rank in range(ranks):
            values = rng.normal(2.0, 0.3, (metrics, len(at)))
            columns = {n: wire.Column(at, v) for n, v in zip(names, values, strict=True)}
            batch = wire.Batch(
                run=RUN,
                rank=rank,
                seq=seq,
                session=f"s{rank}",
                world_size=ranks,
                through_step=int(at[-1]),
                columns=columns,
            )
            received.append((batch, time.time()))
        with writing(engine) as connection:
            store_batches(connection, received, known)
        if seq % 40 == 39:
            compact_all(engine)
    compact_all(engine)


def compact_all(engine: Engine) -> None:
    """As the server's own thread does, without its pauses."""
    while compact(engine, 1, max_points=4_000_000):
        pass


def fill_rollups(engine: Engine, *, ranks: int, steps: int) -> None:
    """Roll-ups of one metric of a run, as compaction leaves them, and a last short batch."""
    fill(engine, ranks=ranks, steps=16, metrics=1, a_batch=16)
    rng = np.random.default_rng(0)
    end = steps // rollups.BASE * rollups.BASE
    with writing(engine) as connection:
        mark = watermarks.load(connection, run=1)
        for rank in range(ranks):
            rows = []
            for level in range(1, rollups.LEVELS):
                step = rollups.width(level)
                index = np.arange(rollups.level_end(level, end) // step, dtype=np.int64)
                mean = rng.normal(2.0, 0.01, (1, len(index)))
                made = rollups.Buckets(
                    index, np.full(len(index), step, np.int64), mean, mean - 1, mean + 1
                )
                key = {"run": 1, "metric": 0, "level": level, "rank": rank}
                rows += [key | row for row in rollups.rows(made, level)]
            connection.execute(insert(schema.rollup), rows)
            mark.ranks[rank].end = end
            mark.ranks[rank].last = end - 1
        watermarks.save(connection, mark, run=1, pending=False)
    at = np.arange(end, end + 16, dtype=np.int64)
    columns = {"loss": wire.Column(at, rng.normal(2.0, 0.3, 16))}
    received = [
        (wire.Batch(run=RUN, rank=r, seq=1, session=f"s{r}", columns=columns), time.time())
        for r in range(ranks)
    ]
    with writing(engine) as connection:
        store_batches(connection, received, Dictionaries())


def fill_runs(engine: Engine, count: int) -> None:
    """Further runs, with two ranks each."""
    known = Dictionaries()
    at = np.array([0], np.int64)
    columns = {"loss": wire.Column(at, np.array([1.0]))}
    for first in range(0, count, 500):
        received = [
            (
                wire.Batch(
                    run=f"run-{n}",
                    rank=rank,
                    seq=0,
                    session="s",
                    world_size=2,
                    columns=columns,
                ),
                time.time(),
            )
            for n in range(first, min(first + 500, count))
            for rank in range(2)
        ]
        with writing(engine) as connection:
            store_batches(connection, received, known)


def timed(ask: Callable[[], bytes], repeats: int) -> tuple[list[float], int]:
    """Milliseconds of each call, after two that warm up, and the length of the last answer."""
    times = []
    size = 0
    for n in range(repeats + 2):
        began = time.perf_counter()
        size = len(ask())
        if n >= 2:
            times.append((time.perf_counter() - began) * 1e3)
    return times, size


class _Plain(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    file: Path

    def do_GET(self) -> None:
        body = self.file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: a line a request would be timed, too."""


def plain_ms(folder: Path, size: int, repeats: int) -> float:
    """Median of reading and sending a file of a number of bytes."""
    path = folder / "plain"
    path.write_bytes(random.Random(0).randbytes(size))
    handler = type("Handler", (_Plain,), {"file": path})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1])

        def ask() -> bytes:
            connection.request("GET", "/")
            return connection.getresponse().read()

        times, _ = timed(ask, repeats)
        connection.close()
        server.shutdown()
        thread.join()
    return statistics.median(times)


def measure(url: tuple[str, int], folder: Path, asked: dict[str, Any], repeats: int) -> list[Any]:
    """A line for each view."""
    connection = http.client.HTTPConnection(*url, timeout=60)
    lines = []
    for name, (path, headers) in asked.items():

        def ask(path: str = path, headers: dict[str, str] = headers) -> bytes:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
            if answer.status not in (200, 304):
                raise RuntimeError(f"{path}: {answer.status} {body[:300]!r}")
            packed = answer.headers.get("Content-Encoding") == "gzip"
            return gzip.decompress(body) if packed else body

        times, size = timed(ask, repeats)
        plain = plain_ms(folder, max(size, 1), repeats)
        goal = next((g for start, g in GOALS_MS.items() if name.startswith(start)), None)
        lines.append(
            {
                "view": name,
                "median_ms": round(statistics.median(times), 1),
                "p95_ms": round(float(np.percentile(times, 95)), 1),
                "bytes": size,
                "plain_ms": round(plain, 2),
                "ratio": round(statistics.median(times) / plain, 1),
                "goal_ms": goal,
            }
        )
    connection.close()
    return lines


def tag_of(url: tuple[str, int], path: str, headers: dict[str, str]) -> str:
    """The entity tag of an answer."""
    connection = http.client.HTTPConnection(*url, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.headers["ETag"]


def main() -> int:
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--metrics", type=int, default=10)
    parser.add_argument("--a-batch", type=int, default=200, help="steps of a batch")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rollups-only", action="store_true")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where the database stays; made if not there")
    chosen = parser.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="rankscope-query-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _main(chosen, folder)
    finally:
        if chosen.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def _main(chosen: argparse.Namespace, folder: Path) -> int:
    path = folder / "load.db"
    filled = None
    if not path.exists():
        engine = open_engine(f"sqlite:///{path}")
        migrate.upgrade(engine)
        began = time.perf_counter()
        if chosen.rollups_only:
            fill_rollups(engine, ranks=chosen.ranks, steps=chosen.steps)
        else:
            fill(
                engine,
                ranks=chosen.ranks,
                steps=chosen.steps,
                metrics=chosen.metrics,
                a_batch=chosen.a_batch,
            )
        filled = round(time.perf_counter() - began, 1)
        fill_runs(engine, chosen.runs)
        engine.dispose()
    series = f"/api/v1/runs/{RUN}/series?"
    figures = f"/runs/{RUN}/figures/curves.json?"
    binary = {"Accept": "application/msgpack"}
    middle = chosen.steps // 2
    zoom = {"from_step": middle, "to_step": middle + 999}
    whole = series + urlencode({"metric": "loss", "max_points": 2000})
    near = series + urlencode({"metric": "loss", "max_points": 2000, **zoom})
    with running(server=None, pid=None, database="sqlite", evaluate=False, folder=folder) as target:
        asked = {
            "whole run, 2,000 buckets, all ranks": (whole, binary),
            "whole run again, 304": (
                whole,
                binary | {"If-None-Match": tag_of(target.address, whole, binary)},
            ),
            "page's figure of the whole run": (figures + urlencode({"metric": "loss"}), {}),
            "runs, a page of 100": ("/api/v1/runs?limit=100", {}),
            "run": (f"/api/v1/runs/{RUN}", {}),
            "metrics": (f"/api/v1/runs/{RUN}/metrics", {}),
        }
        if not chosen.rollups_only:
            asked["zoom to 1,000 steps, all ranks"] = (near, binary)
            asked["page's figure of the zoom"] = (
                figures + urlencode({"metric": "loss", **zoom}),
                {},
            )
        lines = measure(target.address, folder, asked, chosen.repeats)
        size = target.disk()
        points = chosen.ranks * chosen.steps * chosen.metrics
    result = {
        "ranks": chosen.ranks,
        "steps": chosen.steps,
        "metrics": chosen.metrics,
        "filled_s": filled,
        "database_bytes": size,
        "bytes_a_point": None if chosen.rollups_only or not size else round(size / points, 2),
        "views": lines,
    }
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1))
    sys.stdout.write(_table(result))
    return 0


def _table(result: dict[str, Any]) -> str:
    head = {key: value for key, value in result.items() if key != "views"}
    rows = [f"{head}", f"{'view':38}{'median':>9}{'p95':>9}{'goal':>7}{'bytes':>12}{'ratio':>8}"]
    rows += [
        f"{v['view']:38}{v['median_ms']:9}{v['p95_ms']:9}{v['goal_ms'] or '':>7}"
        f"{v['bytes']:12,}{v['ratio']:8}"
        for v in result["views"]
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
