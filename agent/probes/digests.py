"""One digest of all tensors that are shown during a step, in their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rankscope.agent.fingerprint import FingerprintPlan
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import StepFacts
from rankscope.agent.probes.numbers_in_transit import Together

# Odd, so that the micro-batches of a step count in their order.
_TURN = 0x9E3779B97F4A7C15
# Micro-batches whose digests may be under way on a device.
_MAX_WAITING = 256

# Bytes that are digested where little time may be spent: 16 KiB in one piece take 2 microseconds.
FEW_BYTES = 16 * 1024
# Bytes of what lies scattered: each element costs a line of the cache.
_SCATTERED = 2 * 1024


class RunningDigest:
    """The digest of what a step is given, under one name.

    What it is given again counts once: an optimizer evaluates its closure as often as it takes,
    and the batch is the same one each time.

    Args:
        name: of the digest.

    Attributes:
        seen: number of calls of `add` since the last step.
    """

    def __init__(self, name: str) -> None:
        self.seen = 0
        self._name = name
        self._plans = TensorGroup(name, (), ())
        self._waiting: list[tuple[FingerprintPlan, Any, int]] = []
        # Digests of what was given, in order; as a set that keeps it.
        self._parts: dict[int, None] = {}

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes the next tensors, of plain bits; at once on a CPU, without waiting on a device."""
        self.seen += 1
        if len(self._waiting) >= _MAX_WAITING:
            return
        if len(self._plans.names) != len(tensors):
            self._plans = TensorGroup(self._name, [str(i) for i in range(len(tensors))], ())
        plan = self._plans.plan(tensors)
        # An empty end or padding with zeros is no change of the bits.
        size = sum(t.numel() for t in tensors)
        pending = plan.begin(tensors, sketches=False)
        if pending.ready() and not self._waiting:
            self._parts[_part(plan, pending, size)] = None
        else:
            self._waiting.append((plan, pending, size))

    def end(self, facts: StepFacts) -> None:
        """Puts the digest into the facts of the step, once it is known, and begins anew."""
        waiting, parts, seen = self._waiting, self._parts, self.seen
        self._waiting, self._parts, self.seen = [], {}, 0
        if not seen or len(waiting) >= _MAX_WAITING:
            return
        if not waiting:
            facts.digests[self._name] = _combined(parts)
            return

        def deliver() -> None:
            parts.update(dict.fromkeys(_part(*given) for given in waiting))
            facts.digests[self._name] = _combined(parts)

        facts.when_ready(Together(*(pending for _, pending, _ in waiting)), deliver)


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Of all of them together."""
    return sum(t.numel() * t.element_size() for t in tensors)


def few_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Elements from all over the tensors, as many as can be digested at every step.

    Of small ones all. Which ones they are depends on shapes and layouts alone.

    Returns:
        None where a tensor does not lie densely: to gather its elements would cost too much.
    """
    limit = FEW_BYTES // max(len(tensors), 1)
    found = []
    for tensor in tensors:
        count, size = tensor.numel(), tensor.element_size()
        if count * size > limit:
            if not is_dense(tensor):
                return None
            most = max(limit * _SCATTERED // FEW_BYTES // size, 1)
            # Odd: no column of an image again and again.
            step = -(-count // most) | 1
            tensor = tensor.detach().as_strided((-(-count // step),), (step,))
        found.append(tensor)
    return found


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order."""
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def _part(plan: FingerprintPlan, pending: Any, size: int) -> int:
    return plan.model_digest(pending.result().digests) + size + 1


def _combined(parts: Iterable[int]) -> int:
    digest = 0
    for part in parts:
        digest = (digest * _TURN + part) % 2**64
    return digest
