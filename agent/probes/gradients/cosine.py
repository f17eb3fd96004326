"""Which way the gradient points: against the step before, and the rank against all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.numbers_in_transit import Together
from rankscope.agent.wire import Float64


class GradientCosine(Probe):
    """`grad_cosine` and `grad_cosine_local`, from the sketches that other probes have taken.

    `grad_cosine`, at a step after one at which the tier `full` was due: cosine of the applied
    gradient to that of the step before. `grad_cosine_local`, where `full` is due: cosine of this
    rank's own gradient to the applied one. Both are estimates: with all the gradient in one tensor
    their standard error is at most 0.125 (64 buckets), and smaller by the root of the number of
    tensors that share it. Costs some microseconds, no pass.
    """

    name = "cosine"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._last: _Sample | None = None

    def after_step(self, facts: StepFacts) -> None:
        """Compares what was taken."""
        reduced, before = facts.shared.get("reduced_gradient"), self._last
        self._last = None
        if reduced is None:
            return
        group = self.context.parameters
        self._last = _Sample(group, facts.step, reduced)
        with facts.charged("full"):
            if before is not None and before.step == facts.step - 1 and before.group is group:
                self._compare(facts, "grad_cosine", before.taken, reduced)
            local = facts.shared.get("local_gradient")
            if local is not None:
                self._compare(facts, "grad_cosine_local", local, reduced)

    def _compare(self, facts: StepFacts, name: str, one: Any, other: Any) -> None:
        def deliver() -> None:
            found = cosine(one.result().sketches, other.result().sketches)
            if found is not None:
                facts.scalars[name] = found

        facts.when_ready(Together(one, other), deliver)


@dataclass(frozen=True, slots=True)
class _Sample:
    group: TensorGroup
    step: int
    taken: Any


def cosine(one: Float64, other: Float64) -> float | None:
    """Cosine of two gradients by their sketches; None where one of them is zero or not finite."""
    norm = math.sqrt(float(np.vdot(one, one)) * float(np.vdot(other, other)))
    if not (math.isfinite(norm) and norm > 0):
        return None
    return max(-1.0, min(1.0, float(np.vdot(one, other)) / norm))
