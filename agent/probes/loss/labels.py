"""The targets of a step's losses: what random augmentation of the inputs leaves as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rankscope.agent.model.facts import held
from rankscope.agent.probes.base import Context, StepFacts
from rankscope.agent.probes.digests import FEW_BYTES, RunningDigest, bytes_of, few_of
from rankscope.agent.probes.tables import readable
from rankscope.agent.wire import LABELS


class Labels:
    """The digest `labels`, of the targets of all losses that a step computes in training.

    Of targets that are whole numbers, where there are any: others may be another model's outputs,
    and no property of the data. Of more than 16 KiB elements from all over them. On a device they
    are read where the tier `signals` is due. Losses inside a compiled graph are not seen.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._whole, self._real = RunningDigest(LABELS), RunningDigest(LABELS)

    def add(self, name: str, given: Mapping[str, Any]) -> None:
        """Takes the target of a loss function that was called with `given`."""
        target = given.get("target")
        if not isinstance(target, torch.Tensor) or target.requires_grad or not target.numel():
            return
        if not torch.is_grad_enabled() or not readable(target):
            return
        values = held(target)
        if not (values.is_cpu or self._context.signals):
            return
        if bytes_of([values]) > FEW_BYTES:
            few = few_of([values])
            if few is None:
                return
            (values,) = few
        real = values.dtype.is_floating_point or values.dtype.is_complex
        (self._real if real else self._whole).add([values])

    def end(self, facts: StepFacts) -> None:
        """Reports the digest."""
        whole, real = self._whole, self._real
        if whole.seen:
            whole.end(facts)
            real.end(StepFacts(facts.step))
        elif real.seen:
            real.end(facts)
