"""Parameters that something else than the optimizer writes, told at every step."""

from __future__ import annotations

import torch

from rankscope.agent.probes.base import Context, Probe, StepFacts


class Written(Probe):
    """`parameters_written`: 1 at steps before which something else has written parameters.

    Costs two readings of a counter a step (tier `basic`), where the step before or after is looked
    at, too.

    Torch counts how often a tensor is written in place. The first trainable parameter stands for
    all of them: averages of whole models, weights that are swapped in, pulls from a server; where
    the user has declared of which each rank trains a copy of its own, the first of these. What is
    written cannot be seen so, only that it is; nothing is posted at all other steps, nor at the
    first one after a step that was not looked at. With such a mark at every step it can be told
    which rank missed an average that was made good at the next one, between two looks.
    """

    name = "written"
    in_pairs = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._of: torch.Tensor | None = None
        self._version = 0
        self._step = -2

    def before_step(self, facts: StepFacts) -> None:
        """Whether the counter has moved since the end of the step before."""
        of = self._of
        if of is not None and self._step == facts.step - 1 and of._version != self._version:
            facts.scalars["parameters_written"] = 1.0

    def after_step(self, facts: StepFacts) -> None:
        """Where the optimizer has left the counter."""
        group = self.context.parameters
        self._of = of = group.tensors[group.foremost] if group.tensors else None
        if of is not None:
            self._version, self._step = of._version, facts.step
