"""The monitor of trainers without a torch optimizer: it is told each step, in arrays."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from rankscope.agent.arrays import Arrays, as_tensor, flat
from rankscope.agent.connection import Connection
from rankscope.agent.monitor import Monitor
from rankscope.agent.readout import Readout
from rankscope.agent.schedule import TIERS
from rankscope.agent.tensors import TensorGroup

_STAGES = {"parameters": "parameters", "gradients": "reduced_gradient"}


class ArrayMonitor(Monitor):
    """What `agent.start` returns."""

    def __init__(
        self, *, connection: Connection, step: int, parameters: Arrays | None = None
    ) -> None:
        super().__init__(connection, step=step)
        self._readout = Readout()
        self._groups: dict[str, TensorGroup] = {}
        self._ended: float | None = None
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
        step = self._step
        basic, signals, word, full, _ = self._schedule.plan(step)
        tiers: dict[str, float] = {}
        with self._bookkeeping:
            given = {"loss": loss, "accuracy": accuracy, **scalars}
            values = {name: v for name, v in given.items() if v is not None}
            if self._ended is not None:
                values["step_seconds"] = began - self._ended
            if basic or scalars:
                self._scalars(step, values)
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
            tiers["signals"] = time.perf_counter() - charged
        with self._bookkeeping:
            self._records.complete(step - 1)
            self._account(step, began, tiers)
        self._step = step + 1

    def _step_of_log(self) -> int:
        return self._step

    def _gradients(
        self, step: int, metric: str, stage: str, arrays: Arrays | None, full: bool
    ) -> None:
        if arrays is None:
            return
        if full:
            tensors = self._take(step, stage, "gradients", arrays, sketches=True)
        else:
            tensors = [as_tensor(a) for a in _named(arrays).values()]
        squares = [torch.linalg.vector_norm(t.double()).square() for t in tensors]
        norm = torch.stack([s.to(squares[0].device) for s in squares]).sum().sqrt()
        self._scalars(step, {metric: norm})

    def _take(
        self, step: int, stage: str, table: str, arrays: Arrays, *, sketches: bool
    ) -> list[torch.Tensor]:
        named = _named(arrays)
        tensors = [as_tensor(a) for a in named.values()]
        group = self._groups.get(table)
        if group is None or group.names != tuple(named):
            version = 0 if group is None else int(group.table.partition("@")[2] or 0) + 1
            name = f"{table}@{version}" if version else table
            group = self._groups[table] = TensorGroup(name, tuple(named), tensors)
            self._announce(group)
        plan = group.plan(tensors)
        pending = plan.begin(tensors, sketches=sketches)

        def deliver() -> None:
            prints = pending.result()
            if stage not in ("local_gradient", "reduced_gradient"):
                self._records.word(step, stage, plan.word(prints.digests))
            if sketches:
                self._records.fingerprint(group.prints(step, stage, prints))

        if pending.ready() and not self._readout.waiting:
            deliver()
        else:
            self._readout.when_ready(pending, deliver)
        return tensors

    def _scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        plain: dict[str, float] = {}
        distant: dict[str, torch.Tensor] = {}
        for name, value in scalars.items():
            if isinstance(value, torch.Tensor):
                distant[name] = value
            else:
                plain[name] = float(value)
        if plain:
            self._records.scalars(step, plain)
        if distant:
            names = tuple(distant)
            self._readout.push(
                tuple(distant.values()),
                lambda values: self._records.scalars(step, dict(zip(names, values, strict=True))),
            )

    def _account(self, step: int, began: float, tiers: dict[str, float]) -> None:
        self._readout.poll()
        now = time.perf_counter()
        if self._ended is not None:
            tiers[TIERS[0]] = max(now - began - sum(tiers.values()), 0.0)
            self._schedule.note(step, step_seconds=now - self._ended, base=0.0, tiers=tiers)
        self._ended = now
        self._report_sampling(step)

    def _end(self, state: str) -> None:
        with self._bookkeeping:
            if state == "finished":
                self._readout.finish()
            self._readout.poll()


def _named(arrays: Arrays) -> dict[str, Any]:
    return flat(arrays() if callable(arrays) else arrays)
