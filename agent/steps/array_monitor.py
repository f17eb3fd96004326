"""The monitor of trainers without a torch optimizer: the trainer reports each step, in arrays."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from rankscope.agent.delivery.session import Session
from rankscope.agent.fingerprint.array_plan import HostArray, numbers
from rankscope.agent.model.arrays import ArrayGroup, Arrays, read
from rankscope.agent.model.parts import part_of
from rankscope.agent.monitor import Monitor
from rankscope.agent.process.resident_memory import ResidentMemory
from rankscope.agent.schedule import TIERS
from rankscope.agent.wire import Event, Fingerprint

# Kinds of arrays that one table name is used for, in turn.
_GROUPS = 4
# Names of arrays that are reported; and steps after such a report without another one.
_MOST_NAMES, _QUIET = 20, 64


class ArrayMonitor(Monitor):
    """What `agent.start` returns."""

    def __init__(self, *, connection: Session, step: int, parameters: Arrays | None = None) -> None:
        super().__init__(connection, step=step)
        # Those met last: local gradients may be of fewer arrays than reduced ones, in turn.
        self._groups: dict[str, deque[ArrayGroup]] = {}
        self._versions: dict[str, int] = {}
        self._parts: list[tuple[str, str]] = []
        self._ended: float | None = None
        # Step, table and sketches of the parameters taken last.
        self._sketched: tuple[int, str, np.ndarray[Any, np.dtype[np.float64]]] | None = None
        self._bad_step = -_QUIET - 1
        self._resident = ResidentMemory()
        if parameters is not None:
            with self._guard.probe("parameters"):
                self._take(step, "start", "parameters", parameters, sketches=True)
        self._begin()

    def step(
        self,
        *,
        loss: Any = None,
        accuracy: Any = None,
        parameters: Arrays | None = None,
        gradients: Arrays | None = None,
        local_gradients: Arrays | None = None,
        **scalars: Any,
    ) -> None:
        """Ends the step in progress: the update has been applied.

        Arrays may be of numpy, JAX, TensorFlow or torch, in nested mappings and lists, or come from
        a function without arguments that returns them: it is called only at sampled steps, so that
        nothing is copied from a device for the others.

        Args:
            loss: of this rank's batch; a number or an array of one element.
            accuracy: of this rank's batch.
            parameters: after the update; must be the same on all replicas.
            gradients: as they were applied, after the reduction over the ranks.
            local_gradients: of this rank's batch, before the reduction.
            **scalars: further numbers, under their names.
        """
        began = time.perf_counter()
        step = self._count.step
        basic, signals, word, full, _ = self._schedule.plan(step)
        self._sampled_steps += full
        tiers: dict[str, float] = {}
        if basic or scalars:
            given = {"loss": loss, "accuracy": accuracy, **scalars} if basic else scalars
            with self._bookkeeping:
                self._scalars(step, {name: v for name, v in given.items() if v is not None})
        charged = time.perf_counter()
        if word and parameters is not None:
            with self._guard.probe("parameters"):
                self._take(step, "parameters", "parameters", parameters, sketches=full)
            now = time.perf_counter()
            tiers["full" if full else "word"] = now - charged
            charged = now
        if signals:
            with self._guard.probe("gradients"):
                self._gradients(step, "grad_norm", "reduced_gradient", gradients, full)
                self._gradients(step, "grad_norm_local", "local_gradient", local_gradients, full)
            with self._guard.probe("memory"):
                self._memory(step)
            tiers["signals"] = time.perf_counter() - charged
        with self._bookkeeping:
            self._account(step, began, tiers)
            self._records.complete(step - 1)
        self._count.ended()

    def go_to(self, step: int) -> int:
        """Leaves steps out, where they are counted for the whole job and not by this rank.

        Args:
            step: the one that is in progress now; one that has been ended already is not gone back
                to.

        Returns:
            The step in progress.
        """
        self._count.go_to(step)
        return self._count.step

    def replicas(self, key: str | None, tensors: str = "*") -> None:
        """Declares which ranks hold replicas: those that give the same key.

        Without it all ranks must agree on arrays of the same name and shape. To be called before
        the first step.

        `monitor.replicas(None, "embedding.*")` says that each rank trains a copy of its own of
        these arrays, which are averaged now and then, or never: they are compared with nothing.
        For all else the ranks are replicas, each with batches of its own.

        Args:
            key: the same on all replicas and on no other rank; None for a copy of this rank's own.
            tensors: names of the arrays it holds for, with `*` and `?` as in file names; of several
                that fit, the one declared last counts.
        """
        self._parts.append((tensors, part_of(key, self.rank)))
        self._groups.clear()
        self._versions.clear()

    def _gradients(
        self, step: int, metric: str, stage: str, arrays: Arrays | None, full: bool
    ) -> None:
        if arrays is None:
            return
        if full:
            held = self._take(step, stage, "gradients", arrays, sketches=True)
        else:
            held = read(arrays)
        with np.errstate(all="ignore"):  # what is not finite is data here
            squares = sum(float(np.square(numbers(a)).sum()) for a in held.values())
        self._scalars(step, {metric: math.sqrt(squares)})
        if not math.isfinite(squares):
            self._not_finite(step, metric, held)

    def _memory(self, step: int) -> None:
        if resident := self._resident.read():
            self._records.scalars(step, resident)

    def _end(self, state: str) -> None:
        self._resident.close()

    def _not_finite(self, step: int, metric: str, held: Mapping[str, HostArray]) -> None:
        """Reports which gradients hold values that are not finite, once for each incident."""
        before, self._bad_step = self._bad_step, step
        if before < step <= before + _QUIET:
            return
        counts = {name: int((~np.isfinite(numbers(a))).sum()) for name, a in held.items()}
        bad = {name: count for name, count in counts.items() if count}
        if bad:
            text = f"{metric} not finite; {len(bad)} gradients hold such values"
            data = {
                "scalars": [metric],
                "gradients": dict(list(bad.items())[:_MOST_NAMES]),
                "tensors": len(bad),
            }
            self._records.event(Event(step=step, kind="nonfinite", text=text, data=data))

    def _bad_at_start(self, step: int, names: list[str]) -> None:
        text = f"{len(names)} parameters are not finite before the first step"
        data = {"at_start": names[:_MOST_NAMES], "count": len(names)}
        self._records.event(Event(step=step, kind="nonfinite", text=text, data=data))

    def _take(
        self, step: int, stage: str, table: str, arrays: Arrays, *, sketches: bool
    ) -> dict[str, HostArray]:
        held = read(arrays)
        group = self._group(table, held)
        digests, sketched = group.plan.compute(tuple(held.values()), sketches=sketches)
        if table == "parameters":
            self._records.digests(step, {stage: group.plan.model_digest(digests)})
        if stage == "start" and sketched is not None:
            lost = np.flatnonzero(~np.isfinite(sketched).all(axis=1))
            if len(lost):
                self._bad_at_start(step, [group.table.names[row] for row in lost])
        if table == "parameters" and sketched is not None:
            self._moved(step if stage == "parameters" else step - 1, group.name, sketched)
        if sketches:
            fingerprint = Fingerprint(
                step=step, stage=stage, table=group.name, digests=digests, sketches=sketched
            )
            self._records.fingerprint(fingerprint)
        return held

    def _moved(
        self, step: int, table: str, sketches: np.ndarray[Any, np.dtype[np.float64]]
    ) -> None:
        """Reports how far a step has moved the parameters, `update_ratio`.

        From the sketches before and after it, float64 [T, 64]: the length of a difference of
        sketches is that of the difference (Charikar et al. 2002), here to some 10 %.
        """
        before, self._sketched = self._sketched, (step, table, sketches)
        if before is None or before[:2] != (step - 1, table):
            return
        with np.errstate(all="ignore"):
            moved, size = np.linalg.norm(sketches - before[2]), np.linalg.norm(sketches)
            ratio = float(moved / size)
        # Of parameters that are not finite, or all zero, the digests speak.
        if math.isfinite(ratio):
            self._records.scalars(step, {"update_ratio": ratio})

    def _group(self, table: str, held: Mapping[str, HostArray]) -> ArrayGroup:
        groups = self._groups.setdefault(table, deque(maxlen=_GROUPS))
        for known in groups:
            if known.fits(held):
                return known
        version = self._versions[table] = self._versions.get(table, -1) + 1
        name = f"{table}@{version}" if version else table
        group = ArrayGroup.of(name, held, self._parts)
        groups.append(group)
        self._connection.announce(name, group.table)
        return group

    def _account(self, step: int, began: float, tiers: dict[str, float]) -> None:
        now = time.perf_counter()
        if self._ended is not None:
            # From the end of the step before to the end of this one, without what was done here.
            seconds = began - self._ended
            if self._schedule.due(TIERS[0], step):
                self._records.scalars(step, {"step_seconds": seconds})
            tiers[TIERS[0]] = max(now - began - sum(tiers.values()), 0.0)
            self._schedule.note(step, step_seconds=seconds, base=0.0, tiers=tiers)
        self._ended = now
        self._report_sampling(step)
