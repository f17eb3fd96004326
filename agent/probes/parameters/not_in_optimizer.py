"""Parameters that get gradients, are held by no optimizer that steps, and so are never updated."""

from __future__ import annotations

from typing import Any

import numpy as np

from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.numbers_in_transit import Arrival, Together
from rankscope.agent.wire import UInt64


class OutsideOptimizer(Probe):
    """`tensors_never_updated`: tensors outside the optimizer that are as they were at first.

    The number of parameters that require a gradient, that the optimizer does not hold, whose
    gradient at this step is not zero, and whose bits are still those of the first sample:
    nothing has updated them since, another optimizer neither. Tier `full`; a comparison of digests
    that other probes have taken, and nothing where the optimizer holds every parameter.
    """

    name = "outside_optimizer"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._group: TensorGroup | None = None
        self._optimizer: Any = None
        self._rows: list[int] = []
        self._first: UInt64 | None = None

    def after_step(self, facts: StepFacts) -> None:
        """Compares the digests with those of the first sample."""
        context = self.context
        group = context.parameters
        if group is not self._group or context.optimizer is not self._optimizer:
            self._group, self._optimizer = group, context.optimizer
            self._rows = sorted(outside_optimizer(group, context.optimizer))
            self._first = None
        found, norms = facts.shared.get("parameters"), facts.shared.get("gradient_norms")
        if not self._rows or not context.full or found is None or norms is None:
            return
        rows = np.array(self._rows)
        with facts.charged("full"):
            pushes = Arrival(norms.norms)

            def deliver() -> None:
                digests = found.result().digests[rows]
                first = self._first
                if first is None or len(first) != len(digests):
                    self._first = digests
                    return
                gradients = np.zeros(len(group.tensors))
                gradients[norms.rows] = pushes.result()
                same = (digests == first) & (gradients[rows] != 0)
                facts.scalars["tensors_never_updated"] = int(same.sum())

            facts.when_ready(Together(pushes, found), deliver)


def outside_optimizer(group: TensorGroup, optimizer: Any) -> frozenset[int]:
    """Rows of the parameters that an optimizer does not hold; empty where it holds none at all.

    One that holds copies of them (in float32, or flat) moves them all the same.
    """
    held = {id(p) for part in optimizer.param_groups for p in part["params"]}
    rows = frozenset(row for row, p in enumerate(group.tensors) if id(p) not in held)
    return frozenset() if len(rows) == len(group.tensors) else rows
