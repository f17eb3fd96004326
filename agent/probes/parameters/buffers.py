"""Buffers: what a model keeps besides its parameters, running statistics above all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.model.facts import core, held, plain_name
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import Context, Probe, StepFacts, processor_time
from rankscope.agent.probes.tables import ChangingTable, readable
from rankscope.agent.steps.hook_tables import HiddenHook
from rankscope.agent.steps.hooks import RootHook
from rankscope.agent.wire import Fingerprint

_STAGE = _TABLE = "buffers"
_MOST_NAMES = 20
_STATISTICS = ("running_mean", "running_var")


class Buffers(Probe):
    """Digest and fingerprints of the model's buffers, as the step's first forward pass begins.

    And `buffers_nonfinite`: how many of them hold NaN or infinities; their names are reported once.
    Those that held some when they were first seen are masks, and are meant so.

    Costs two passes over the buffers (tier `state`).

    DistributedDataParallel makes the buffers equal (`broadcast_buffers`) at the beginning of each
    forward pass, and batch norm makes them unequal in it: only what the model inside the wrapper
    begins with can be compared. A hook that exists for that one call reads it.
    """

    name = "buffers"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._core = core(context.model)
        self._table = ChangingTable(context, _TABLE)
        self._plans = TensorGroup(_TABLE, (), ())
        self._taken: tuple[Any, Any, str, dict[str, torch.Size]] | None = None
        self._seconds = 0.0
        self._handle: Any = None
        self._nonfinite: list[str] = []
        self._meant: set[str] = set()
        self._shapes: dict[str, torch.Size] = {}
        self.root_forward = context.guarded(self.name, self._inner_forward)

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Reads them at once, or where a wrapper still has to broadcast, right after that."""
        if (
            not self.context.state
            or self._taken is not None
            or not self._core.training
            or not torch.is_grad_enabled()
        ):
            return
        inner = module.module if type(module) is DistributedDataParallel else None
        if inner is None or not module.broadcast_buffers or _compiled(inner):
            self._take()
        elif self._handle is None:
            self._handle = HiddenHook(
                inner.register_forward_pre_hook(RootHook(self), with_kwargs=True)
            )

    def after_step(self, facts: StepFacts) -> None:
        """Reports what was seen; reads now, where the root module's forward was not seen."""
        if not self.context.state:
            return
        self._unhook()
        if self._taken is None:
            self._take()
        taken, self._taken = self._taken, None
        if taken is None:
            return
        facts.charge("state", self._seconds)
        plan, pending, table, shapes = taken

        def deliver() -> None:
            fingerprints = pending.result()
            self._report_nonfinite(facts, facts.step, shapes, fingerprints.sketches)
            facts.digests[_STAGE] = plan.model_digest(fingerprints.digests)
            facts.fingerprints.append(
                Fingerprint(
                    step=facts.step,
                    stage=_STAGE,
                    table=table,
                    digests=fingerprints.digests,
                    sketches=fingerprints.sketches,
                )
            )

        facts.when_ready(pending, deliver)

    def _report_nonfinite(
        self, facts: StepFacts, step: int, shapes: dict[str, torch.Size], sketches: Any
    ) -> None:
        bad = []
        for (name, shape), sketch in zip(shapes.items(), sketches, strict=True):
            # A sketch is a sum over the elements: one that is not finite makes it so.
            finite = bool(np.isfinite(sketch).all())
            if finite or self._shapes.get(name) != shape:
                self._meant.discard(name)
            # Masks are made of infinities, and stay what they are; statistics begin as numbers.
            if not finite and self._shapes.get(name) != shape and not name.endswith(_STATISTICS):
                self._meant.add(name)
            if not finite and name not in self._meant:
                bad.append(name)
        self._shapes = shapes
        facts.scalars["buffers_nonfinite"] = float(len(bad))
        if bad and bad != self._nonfinite:
            held = f"{', '.join(bad[:5])}{', ...' if len(bad) > 5 else ''}"
            text = f"buffers that are not finite: {held}"
            data = {"tensors": bad[:_MOST_NAMES], "count": len(bad)}
            self.context.event(step, "buffers.nonfinite", text, data)
        self._nonfinite = bad

    def close(self) -> None:
        """Takes the hook back."""
        self._unhook()

    def _inner_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._unhook()
        if self._taken is None:
            self._take()

    def _take(self) -> None:
        began = processor_time()
        every = self.context.modules.named_buffers()
        found = [(plain_name(n), b) for n, b in every if readable(b)]
        if found:
            names, given = zip(*found, strict=True)
            tensors = [held(t) for t in given]
            if self._plans.names != names:
                self._plans = TensorGroup(_TABLE, names, ())
            plan = self._plans.plan(tensors)
            pending = plan.begin(tensors, sketches=True)
            shapes = {n: t.shape for n, t in zip(names, tensors, strict=True)}
            self._taken = (plan, pending, self._table.name(names, given), shapes)
        self._seconds = processor_time() - began

    def _unhook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _compiled(module: torch.nn.Module) -> bool:
    # A hook would make it compile again; scripted modules take none.
    return (
        hasattr(module, "_orig_mod")
        or isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
    )
