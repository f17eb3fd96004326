"""Layer by layer: norms of gradients and weights, and how far a step moves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rankscope.agent.model_facts import held
from rankscope.agent.probes.arrival import Arrival, Together
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.norms import gathered, tensor_norms
from rankscope.agent.tensors import TensorGroup
from rankscope.agent.wire import Float64, Layers

# Up to this many elements a tensor is copied before the step, and its update known exactly; but no
# more than this many elements of all tensors together (16 MiB of float32).
_SMALL = 1 << 16
_ALL_SMALL = 1 << 22


class LayerNorms(Probe):
    """`grad_norm`, `weight_norm`, `update_ratio` of each parameter, and of the whole model.

    Tier `full`. Costs one pass over the parameters for their norms and two over the small ones;
    the norms of the gradients and the sketches are those that other probes have taken.

    The update is what the step added: update_norm = |new - old|, update_ratio = |new - old| / |new|
    (NaN where both are zero). Of tensors up to 65,536 elements it is exact, of larger ones
    estimated from the difference of the sketches before and after, with a standard error of 9 %.
    `tensors_unchanged` is the number of tensors whose bits the step left as they were although
    their gradient is not zero.
    """

    name = "layers"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._before: _Before | None = None

    @torch.no_grad()
    def before_step(self, facts: StepFacts) -> None:
        """Copies the small tensors."""
        if not self.context.full:
            self._before = None
            return
        with facts.charged("full"):
            group = self.context.parameters
            rows, left = [], _ALL_SMALL
            tensors = [held(p) for p in group.tensors]
            for row, tensor in enumerate(tensors):
                size = tensor.numel()
                if size <= _SMALL and size <= left and tensor.element_size() > 1:
                    rows.append(row)
                    left -= size
            # In one call, unlike `clone`.
            kept = torch._foreach_mul([tensors[row] for row in rows], 1.0) if rows else ()
            self._before = _Before(group, rows, list(kept))

    @torch.no_grad()
    def after_step(self, facts: StepFacts) -> None:
        """Measures what the step did."""
        before, self._before = self._before, None
        group = self.context.parameters
        if before is None or before.group is not group or not self.context.full:
            return
        with facts.charged("full"):
            tensors = [held(p) for p in group.tensors]
            if before.kept:
                torch._foreach_sub_(before.kept, [tensors[row] for row in before.rows])
            found = _Found(
                rows=before.rows,
                gradients=facts.shared.get("gradient_norms"),
                old=facts.shared.get("parameters_before"),
                new=facts.shared.get("parameters"),
                count=len(tensors),
            )
            numbers = tensor_norms(tensors) + tensor_norms(before.kept)
            if found.gradients is not None:
                numbers += found.gradients.norms.unbind()
            found.arrival = Arrival(gathered(numbers))

            def deliver() -> None:
                _deliver(facts, group, found)

            facts.when_ready(Together(found.arrival, found.old, found.new), deliver)


@dataclass(frozen=True, slots=True)
class _Before:
    """Copies of the small parameters before a step."""

    group: TensorGroup
    rows: list[int]
    kept: list[torch.Tensor]


@dataclass(slots=True)
class _Found:
    """What was read off one step: norms of weights, of small updates and of gradients arrive."""

    rows: list[int]
    gradients: Any
    old: Any
    new: Any
    count: int
    arrival: Arrival | None = None


def _deliver(facts: StepFacts, group: TensorGroup, found: _Found) -> None:
    assert found.arrival is not None
    arrived = found.arrival.result()
    count, exact = found.count, len(found.rows)
    weights = arrived[:count]
    gradients = np.full(count, np.nan)
    if found.gradients is not None:
        gradients[found.gradients.rows] = arrived[count + exact :]
        facts.layers.append(_layers(facts, group, "grad_norm", gradients))
    facts.layers.append(_layers(facts, group, "weight_norm", weights))
    facts.scalars["weight_norm"] = _length(weights)
    if found.old is None or found.new is None:
        return
    old, new = found.old.result(), found.new.result()
    with np.errstate(all="ignore"):  # parameters that are not finite
        updates = np.sqrt(((new.sketches - old.sketches) ** 2).sum(axis=1))
        updates[found.rows] = arrived[count : count + exact]
        facts.layers.append(_layers(facts, group, "update_ratio", updates / weights))
    total = _length(updates)
    facts.scalars["update_norm"] = total
    if facts.scalars["weight_norm"]:
        facts.scalars["update_ratio"] = total / facts.scalars["weight_norm"]
    pushed = ~np.isnan(gradients) & (gradients != 0)
    facts.scalars["tensors_unchanged"] = int(((old.digests == new.digests) & pushed).sum())


def _length(norms: Float64) -> float:
    with np.errstate(all="ignore"):
        return float(np.sqrt((norms**2).sum()))


def _layers(facts: StepFacts, group: TensorGroup, metric: str, values: Float64) -> Layers:
    return Layers(step=facts.step, table=group.table, metric=metric, values=values)
