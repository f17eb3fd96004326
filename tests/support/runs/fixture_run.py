"""Synthetic runs, posted batch by batch through the real ingest of a running server.

    post(server_url, SyntheticRun("otter", ranks=4, steps=400, desync=(2, 137)))

The numbers are seeded: `values(metric, rank)` says what a page must show.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import quote

import httpx
import numpy as np

from rankscope.agent.wire import codec
from rankscope.agent.wire.batch import Batch, Column, Event, Fingerprint, Hello, Layers, TensorTable

TENSORS = TensorTable(
    names=("conv1.weight", "conv1.bias", "fc.weight"),
    shapes=((8, 1, 3, 3), (8,), (10, 128)),
    dtypes=("float32",) * 3,
    shards=("",) * 3,
)
EMA = TensorTable(
    names=tuple(f"blocks.{n}.attention.weight" for n in range(40)),
    shapes=((64, 64),) * 40,
    dtypes=("float32",) * 40,
    shards=("",) * 40,
)
# At this interval of steps an agent posts its plan, and numbers for each tensor.
TOLD_EVERY = 32
DENSE_START = 8
SAMPLED_EVERY = 8
# No slash in it, as it is also a run id, which is one segment of a path.
HOSTILE = "<img src=x onerror=\"document.title='xss'\"><b>bold"


@dataclass(frozen=True, kw_only=True)
class SyntheticRun:
    """What is posted.

    Attributes:
        desync: (rank, step) from which its reduced gradients and parameters differ, farther and
            farther; its loss follows some 20 steps later.
        reset: that rank reports that it lost its optimizer's state: its parameters alone differ.
        nan: (rank, step): one loss that is not a number.
        spike: (rank, step): one loss twenty times as large.
        silent: (rank, step): the last step this rank reports.
        told: agents post their plans, a fault, what they gave up, and numbers for each tensor.
        hostile: names and texts with markup in them.
        state: how the ranks end.
        buckets: of a sketch.
        settings: further members of the configuration.
    """

    run: str
    ranks: int = 4
    steps: int = 400
    project: str = "digits"
    seed: int = 0
    desync: tuple[int, int] | None = None
    reset: bool = False
    nan: tuple[int, int] | None = None
    spike: tuple[int, int] | None = None
    silent: tuple[int, int] | None = None
    told: bool = False
    hostile: bool = False
    state: str = "finished"
    seconds_ago: float = 600.0
    buckets: int = 64
    settings: dict[str, object] = field(default_factory=dict)
    _noise: dict[tuple[str, int], np.ndarray] = field(default_factory=dict, repr=False)

    def values(self, metric: str, rank: int) -> np.ndarray:
        """float64 [steps]: what the rank reports of a metric, step by step."""
        steps = np.arange(self.steps)
        falling = 2.3 * np.exp(-steps / max(60.0, self.steps / 4)) + 0.05
        noise = self._of(metric, rank)
        if metric == "loss":
            values = falling * np.exp(0.12 * noise)
            if self.desync is not None and rank == self.desync[0]:
                values = values * np.where(steps >= self.desync[1] + 20, 2.5, 1.0)
            for fault, value in ((self.nan, np.nan), (self.spike, 50.0)):
                if fault is not None and rank == fault[0] and fault[1] < self.steps:
                    values[fault[1]] = value
            return values
        if metric == "accuracy":
            return np.clip(np.round((1 - falling / 2.6) * 16 + 0.4 * noise) / 16, 0, 1)
        if metric == "grad_norm":
            # The same on every rank of a healthy job, as it is taken after the reduction.
            values = 3 * falling * np.exp(0.1 * self._of("grad_norm", -1))
            if self.desync is not None and rank == self.desync[0] and not self.reset:
                values = values * np.where(steps >= self.desync[1], 1.3, 1.0)
            return values
        if metric == "grad_norm_local":
            return 4 * falling * np.exp(0.15 * noise)
        if metric == "lr":
            return 0.1 * (1 + np.cos(np.pi * steps / self.steps)) / 2 + 1e-4
        if metric == "step_seconds":
            return 0.02 * np.exp(0.05 * noise)
        return 64 / self.values("step_seconds", rank)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all series."""
        named = (
            "loss", "accuracy", "grad_norm", "grad_norm_local", "lr", "step_seconds",
            "samples_per_second",
        )  # fmt: skip
        return (*named, HOSTILE) if self.hostile else named

    def batches(self, first: int = 0, end: int | None = None, size: int = 50) -> Iterator[Batch]:
        """All ranks' batches of the steps from `first` up to, not including, `end`, in turn."""
        end = self.steps if end is None else end
        for start in range(first, end, size):
            stop = min(start + size, end)
            for rank in range(self.ranks):
                if self.silent is not None and rank == self.silent[0] and start > self.silent[1]:
                    continue
                yield self._batch(rank, start, stop, seq=-(-start // size), last=stop == self.steps)

    def _batch(self, rank: int, start: int, stop: int, *, seq: int, last: bool) -> Batch:
        if self.silent is not None and rank == self.silent[0]:
            stop, last = min(stop, self.silent[1] + 1), False
        steps = np.arange(start, stop, dtype=np.int64)
        part = slice(start, stop)
        columns = {
            metric: Column(steps, self.values(metric, rank)[part]) for metric in self.metrics
        }
        if self.told:
            columns |= self._plan(rank, steps[steps % TOLD_EVERY == 0])
        words = {
            stage: Column(
                steps, np.array([self._word(stage, rank, s) for s in steps.tolist()], np.uint64)
            )
            for stage in ("reduced_gradient", "parameters")
        }
        return Batch(
            run=self.run,
            rank=rank,
            seq=seq,
            session=f"fixture-{rank}",
            project=self.project,
            world_size=self.ranks,
            sent_at=time.time(),
            through_step=stop - 1,
            state=self.state if last else "running",
            phase="idle" if last and self.state != "running" else "forward",
            hello=self._hello(rank) if seq == 0 else None,
            columns=columns,
            words=words,
            prints=tuple(
                self._print(stage, rank, step)
                for step in steps.tolist()
                if self._sampled(step)
                for stage in ("reduced_gradient", "parameters")
            ),
            layers=self._layers(rank, steps[steps % TOLD_EVERY == 0]) if self.told else (),
            events=self._events(rank, start, stop),
            dropped={"memory_full": 12} if self.told and rank == 1 else {},
        )

    def _plan(self, rank: int, steps: np.ndarray) -> dict[str, Column]:
        dense = 2 if rank % 64 == 1 else 1
        plan = {
            "overhead": 0.006 + 0.0001 * (rank % 8),
            "interval/basic": 1.0,
            "interval/signals": 1.0,
            "interval/word": 4.0 * dense,
            "interval/full": 32.0 * dense,
        }
        return {
            f"rankscope/{name}": Column(steps, np.full(len(steps), value))
            for name, value in plan.items()
            if len(steps)
        }

    def layer(self, tensor: int, steps: np.ndarray) -> np.ndarray:
        """float64 [steps]: the gradient norm of a tensor, on every rank."""
        return (1 + tensor) * np.exp(-np.asarray(steps) / 200)

    def _layers(self, rank: int, steps: np.ndarray) -> tuple[Layers, ...]:
        return tuple(
            Layers(
                step=step,
                table=table,
                metric=metric,
                values=np.array([float(self.layer(t, step)) for t in range(count)]),
            )
            for step in steps.tolist()
            for table, metric, count in (
                ("parameters", "grad_norm", len(TENSORS.names)),
                ("watched/ema", "weight_norm", len(EMA.names)),
            )
        )

    def _hello(self, rank: int) -> Hello:
        return Hello(
            started_at=time.time() - self.seconds_ago,
            host=HOSTILE if self.hostile else f"node{rank // 8}",
            pid=4000 + rank,
            local_rank=rank % 8,
            launcher="torchrun",
            wrapper="DistributedDataParallel",
            tables={"parameters": TENSORS} | ({"watched/ema": EMA} if self.told else {}),
            config={"optimizer": "SGD", "note": HOSTILE if self.hostile else "a fixture"}
            | self.settings,
        )

    def _events(self, rank: int, start: int, stop: int) -> tuple[Event, ...]:
        if self.reset and self.desync is not None and start <= self.desync[1] < stop:
            if rank == self.desync[0]:
                lost = {"how": "lost", "seen": self.desync[1] - 1}
                return (Event(step=self.desync[1], kind="optimizer.state", data=lost),)
        if start:
            return ()
        if rank:
            fault = HOSTILE if self.hostile else "clipping: RuntimeError: no such attribute"
            return (Event(step=3, kind="agent.fault", text=fault),) if self.told else ()
        text = "the loss is read from the module CrossEntropyLoss"
        return (Event(step=0, kind="agent.note", text=HOSTILE if self.hostile else text),)

    def _sampled(self, step: int) -> bool:
        near = self.desync is not None and 0 <= step - self.desync[1] < SAMPLED_EVERY
        return step < DENSE_START or step % SAMPLED_EVERY == 0 or near

    def _apart(self, rank: int, step: int) -> float:
        if self.desync is None or rank != self.desync[0] or step < self.desync[1]:
            return 0.0
        return 1e-4 * float(np.exp(min(step - self.desync[1], 200) / 40))

    def _word(self, stage: str, rank: int, step: int) -> int:
        apart = self._apart(rank, step) and not (self.reset and stage == "reduced_gradient")
        mine = rank + 1 if apart else 0
        return (hash((self.seed, step, mine)) * 31 + len(stage)) % 2**64

    def _print(self, stage: str, rank: int, step: int) -> Fingerprint:
        rng = np.random.default_rng([self.seed, step, len(stage)])
        shape = (len(TENSORS.names), self.buckets)
        sketches = rng.standard_normal(shape) / np.sqrt(self.buckets)
        apart = self._apart(rank, step)
        if apart and not (self.reset and stage == "reduced_gradient"):
            sketches = sketches + apart * rng.standard_normal(shape) / np.sqrt(self.buckets)
        digests = [
            (self._word(stage, rank, step) + 7919 * t) % 2**64 for t in range(len(TENSORS.names))
        ]
        return Fingerprint(
            step=step,
            stage=stage,
            table="parameters",
            digests=np.array(digests, np.uint64),
            sketches=sketches,
        )

    def _of(self, metric: str, rank: int) -> np.ndarray:
        key = (metric, rank)
        if key not in self._noise:
            rng = np.random.default_rng([self.seed, len(metric), ord(metric[0]), rank + 1])
            self._noise[key] = rng.standard_normal(self.steps)
        return self._noise[key]


def post(
    server: str, run: SyntheticRun, first: int = 0, end: int | None = None, size: int = 50
) -> None:
    """Posts the run's batches of the steps [first, end) to a running server."""
    headers = {"Content-Type": codec.CONTENT_TYPE}
    with httpx.Client(base_url=server, headers=headers, timeout=30) as client:
        for batch in run.batches(first, end, size):
            client.post("/api/v1/ingest", content=codec.encode(batch)).raise_for_status()


def wait_until_evaluated(server: str, run: SyntheticRun, seconds: float = 60) -> None:
    """Returns once the server's detectors have seen all steps of the run."""
    deadline = time.monotonic() + seconds
    address = f"{server}/api/v1/runs/{quote(run.run, safe='')}"
    while httpx.get(address).raise_for_status().json()["evaluated_step"] < run.steps - 1:
        assert time.monotonic() < deadline, f"{run.run} was not evaluated in {seconds} s"
        time.sleep(0.1)
