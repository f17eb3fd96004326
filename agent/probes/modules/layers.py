"""Layer by layer: norms of gradients and weights, and how far a step moves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.norms import gathered, norms_of, small_enough, tensor_norms
from rankscope.agent.probes.numbers_in_transit import Arrival, Together
from rankscope.agent.wire import Float64, Layers


class LayerNorms(Probe):
    """`grad_norm`, `weight_norm`, `update_ratio` of each parameter, and of the whole model.

    Tier `full`. Costs about 18 microseconds a parameter and three passes over the small ones; the
    norms and the sketches are those that other probes have taken (on devices, the norms of the
    parameters are a pass).

    The update is what the step added: update_norm = |new - old|, update_ratio = |new - old| / |new|
    (NaN where both are zero). Of tensors up to 65,536 elements it is exact, for which copies of up
    to 16 MiB are kept; of larger ones it is estimated from the difference of the sketches before
    and after, with a standard error of 9 %.
    `tensors_unchanged` is the number of tensors whose bits the step left as they were although
    their gradient is not zero.

    `tensors_without_gradient`, tier `signals`: the number of tensors that got no gradient, or one
    of zeros; they are counted by the norms that are there.
    """

    name = "layers"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._copies: _Copies | None = None
        self._copied = False

    def before_step(self, facts: StepFacts) -> None:
        """Copies the small tensors."""
        self._copied = self.context.full
        if not self._copied:
            return
        with facts.charged("full"), torch.no_grad():
            group = self.context.parameters
            tensors = group.held()
            copies = self._copies
            if copies is None or copies.group is not group or not copies.fit(tensors):
                copies = self._copies = _Copies(group, tensors)
            copies.take(tensors)

    def after_step(self, facts: StepFacts) -> None:
        """Measures what the step did."""
        self._without_gradient(facts)
        copies, copied = self._copies, self._copied
        self._copied = False
        group = self.context.parameters
        if not copied or copies is None or copies.group is not group or not self.context.full:
            return
        with facts.charged("full"), torch.no_grad():
            tensors = group.held()
            found = _Found(
                rows=copies.rows,
                gradients=facts.shared.get("gradient_norms"),
                old=facts.shared.get("parameters_before"),
                new=facts.shared.get("parameters"),
                count=len(tensors),
            )
            differences = copies.differences(tensors)
            squares = None if found.new is None else found.new.squares
            if squares is None:
                numbers = gathered(tensor_norms(tensors + differences))
            else:
                numbers = torch.cat([norms_of(squares), *_stacked(tensor_norms(differences))])
            found.weights = Arrival(numbers)
            if found.gradients is not None:
                found.pushes = Arrival(found.gradients.norms)

            def deliver() -> None:
                _deliver(facts, group, found)

            facts.when_ready(Together(found.weights, found.pushes, found.old, found.new), deliver)

    def _without_gradient(self, facts: StepFacts) -> None:
        made = facts.shared.get("gradient_norms")
        if made is not None:
            with facts.charged("signals"):
                count = len(self.context.parameters.tensors)
                facts.scalars["tensors_without_gradient"] = count - made.nonzero()


def _stacked(norms: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.stack(norms)] if norms else []


class _Copies:
    """The small parameters as they were before a step.

    The memory is kept: to ask for it anew costs four times the copying.

    Attributes:
        group: of which they are.
        rows: positions of the small ones in the group.
    """

    def __init__(self, group: TensorGroup, tensors: list[torch.Tensor]) -> None:
        self.group = group
        # 8-bit numbers have no difference.
        self.rows = [row for row in small_enough(tensors) if tensors[row].element_size() > 1]
        self._kept = [torch.empty_like(tensors[row]) for row in self.rows]

    def fit(self, tensors: list[torch.Tensor]) -> bool:
        """Whether the tensors are of the shapes, types and places of the copies."""
        return all(
            k.shape == tensors[row].shape
            and k.dtype == tensors[row].dtype
            and k.device == tensors[row].device
            for row, k in zip(self.rows, self._kept, strict=True)
        )

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Copies them as they are now."""
        if self.rows:
            torch._foreach_copy_(self._kept, [tensors[row] for row in self.rows])

    def differences(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies less what the tensors are now, in the memory of the copies."""
        if self.rows:
            torch._foreach_sub_(self._kept, [tensors[row] for row in self.rows])
        return self._kept


@dataclass(slots=True)
class _Found:
    """What was read off one step.

    Attributes:
        rows: positions of the small tensors.
        gradients: `GradientNorms`, where there are any.
        old, new: fingerprints of the parameters.
        count: of tensors.
        weights: norms of the parameters and of the small ones' updates.
        pushes: norms of the gradients.
    """

    rows: list[int]
    gradients: Any
    old: Any
    new: Any
    count: int
    weights: Arrival | None = None
    pushes: Arrival | None = None


def _deliver(facts: StepFacts, group: TensorGroup, found: _Found) -> None:
    assert found.weights is not None
    count = found.count
    weights, small_updates = np.split(found.weights.result(), [count])
    gradients = np.full(count, np.nan)
    if found.pushes is not None:
        gradients[found.gradients.rows] = found.pushes.result()
        facts.layers.append(_layers(facts, group, "grad_norm", gradients))
    facts.layers.append(_layers(facts, group, "weight_norm", weights))
    facts.scalars["weight_norm"] = _length(weights)
    if found.old is None or found.new is None:
        return
    old, new = found.old.result(), found.new.result()
    with np.errstate(all="ignore"):  # parameters that are not finite
        updates = np.sqrt(((new.sketches - old.sketches) ** 2).sum(axis=1))
        updates[found.rows] = small_updates
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
