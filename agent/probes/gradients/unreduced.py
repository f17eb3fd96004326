"""Gradients that are computed and that the optimizer does not see: left unreduced by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rankscope.agent.probes.base import Context, Probe, StepFacts


class UnreducedGradients(Probe):
    """`gradients_unreduced`: parameters with a gradient that no reduction has taken, before a step.

    Of models that `fully_shard` has wrapped: what a pass without gradient synchronisation
    (`set_requires_gradient_sync(False)`) computes is kept beside the parameters until one with it
    reduces both. What is still there when the optimizer steps is missing from the step, and goes
    into a later one. Tier `word`; one look at an attribute for each parameter.
    """

    name = "unreduced"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._group: Any = None
        self._held: list[Any] = []

    def before_step(self, facts: StepFacts) -> None:
        """Counts them."""
        if not self.context.word:
            return
        with facts.charged("word"):
            if self.context.parameters is not self._group:
                self._group = self.context.parameters
                self._held = list(_sharded(self.context))
            if self._held:
                facts.scalars["gradients_unreduced"] = float(sum(map(_is_left, self._held)))


def _sharded(context: Context) -> Iterator[Any]:
    """What FSDP2 keeps of each parameter, as far as this version of torch shows it."""
    for module in context.model.modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        state = state_of() if callable(state_of) else None
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # older versions have one; of several this name would raise
            groups = (getattr(state, "_fsdp_param_group", None),)
        for group in groups:
            yield from getattr(group, "fsdp_params", None) or ()


def _is_left(held: Any) -> bool:
    whole = getattr(held, "_unsharded_param", None)
    return (
        getattr(whole, "grad", None) is not None
        or getattr(held, "unsharded_accumulated_grad", None) is not None
    )
