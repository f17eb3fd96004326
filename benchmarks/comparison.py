"""What it costs to compare the fingerprints of many ranks: processor time and memory.

    python -m benchmarks.comparison --ranks 1024 --tensors 200 --steps 20

All ranks post digests and sketches of every tensor, of the reduced gradient and of the parameters,
at every step; what is stored is then evaluated as the server does it: read, aligned, compared, and
shown to all detectors. Cases: `equal`, where all ranks agree; `one`, where one rank's last tensors
part from the others' after a third of the steps; `all`, where every rank is alone with what it
holds, which is the worst there can be. Processor time is that of the evaluation alone, memory that
of a process that has stored the batches, too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.agent import wire
from rankscope.agent.fingerprint.constants import BUCKETS
from rankscope.server.evaluation.worker import Worker
from rankscope.server.storage import schema
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, reading, writing
from rankscope.server.storage.ingest.batches import store_batches
from rankscope.server.storage.ingest.dictionary import Dictionaries

CASES = ("equal", "one", "all")
STAGES = ("reduced_gradient", "parameters")
# Batches a transaction, as they come together on a busy server.
_TOGETHER = 256


class _Job:
    """Batches of simulated ranks, step by step."""

    def __init__(self, options: argparse.Namespace, case: str) -> None:
        self._ranks, self._tensors = options.ranks, options.tensors
        self._bad = options.steps // 3 if case == "one" else None
        self._alone = case == "all"
        names = tuple(f"layers.{n}.weight" for n in range(self._tensors))
        self._hello = wire.Hello(
            started_at=time.time(),
            tables={
                "parameters": wire.TensorTable(
                    names,
                    ((64, 64),) * self._tensors,
                    ("float32",) * self._tensors,
                    ("",) * self._tensors,
                )
            },
        )

    def batches(self, step: int) -> list[wire.Batch]:
        """Those of all ranks at one step."""
        draw = np.random.default_rng(step)
        shared = {stage: self._content(draw) for stage in STAGES}
        made = []
        for rank in range(self._ranks):
            held = {stage: self._content(draw) for stage in STAGES} if self._alone else shared
            if self._bad is not None and rank == self._ranks // 2 and step >= self._bad:
                held = {stage: _spread(*content) for stage, content in shared.items()}
            made.append(
                wire.Batch(
                    run="comparison",
                    rank=rank,
                    session=f"session{rank}",
                    seq=step,
                    world_size=self._ranks,
                    sent_at=time.time(),
                    through_step=step,
                    hello=self._hello if step == 0 else None,
                    prints=tuple(
                        wire.Fingerprint(
                            step=step,
                            stage=stage,
                            table="parameters",
                            digests=digests,
                            sketches=sketches,
                        )
                        for stage, (digests, sketches) in held.items()
                    ),
                )
            )
        return made

    def _content(self, draw: np.random.Generator) -> tuple[wire.UInt64, wire.Float64]:
        digests = draw.integers(0, 2**64, self._tensors, dtype=np.uint64)
        return digests, draw.standard_normal((self._tensors, BUCKETS))


def _spread(digests: Any, sketches: Any) -> tuple[Any, Any]:
    last = slice(-3, None)
    digests, sketches = digests.copy(), sketches.copy()
    digests[last] += np.uint64(1)
    sketches[last, 0] += 1e-3
    return digests, sketches


def measure(options: argparse.Namespace, case: str) -> dict[str, Any]:
    """Evaluates a run of one case; to be called in a process of its own, for its memory."""
    job = _Job(options, case)
    at_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(prefix="rankscope-comparison-") as folder:
        engine = open_engine(f"sqlite:///{Path(folder) / 'comparison.db'}")
        migrate.upgrade(engine)
        worker = Worker(engine, threading.Event(), strict=True)
        known = Dictionaries()
        cpu = []
        for step in range(options.steps):
            batches = job.batches(step)
            for at in range(0, len(batches), _TOGETHER):
                with writing(engine) as connection:
                    received = [(batch, time.time()) for batch in batches[at : at + _TOGETHER]]
                    store_batches(connection, received, known)
            began = time.thread_time()
            worker.sweep()
            cpu.append(time.thread_time() - began)
        with reading(engine) as connection:
            run = connection.execute(schema.run.select()).one()
            alerts = connection.execute(schema.alert.select()).all()
        worker.stop()
        engine.dispose()
    if run.evaluated_step != options.steps - 1 or run.late or run.given_up:
        raise RuntimeError(f"not all of it was compared: {run}")
    return {
        "case": case,
        "ranks": options.ranks,
        "tensors": options.tensors,
        "comparisons_a_step": len(STAGES),
        "cpu_ms_a_step": {
            "median": 1e3 * float(np.median(cpu[1:])),
            "max": 1e3 * max(cpu[1:]),
        },
        "rss_mb": {
            "at_start": at_start / 1024,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        },
        "alerts": sorted({alert.kind for alert in alerts}),
    }


def main() -> int:
    """Prints one line a case; exit code 1 where a core does not keep up with a step a second."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.comparison",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.steps < 4 or options.ranks < 2:
        parser.error("at least 4 steps of 2 ranks")
    keeps_up = True
    for case in options.cases:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(measure, (options, case))
        cpu, rss = found["cpu_ms_a_step"], found["rss_mb"]
        keeps_up &= cpu["median"] < 1000 and rss["peak"] < 1024
        if options.json:
            print(json.dumps(found))
        else:
            print(
                f"{case:6} {cpu['median']:8.1f} ms CPU a step (most {cpu['max']:.1f}), "
                f"peak {rss['peak']:.0f} MB of which {rss['at_start']:.0f} at the start, "
                f"alerts: {', '.join(found['alerts']) or 'none'}",
                flush=True,
            )
    return 0 if keeps_up else 1


if __name__ == "__main__":
    sys.exit(main())
