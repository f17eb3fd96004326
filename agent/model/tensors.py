"""A list of tensors that are fingerprinted together, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rankscope.agent.fingerprint import FingerprintPlan, FingerprintValues
from rankscope.agent.model import facts
from rankscope.agent.wire import RANK_LOCAL, Fingerprint, TensorTable


class TensorGroup:
    """Tensors under fixed names, with the table that their fingerprints refer to.

    Attributes:
        table: name of the table.
        names: one a tensor.
        parts: what the user declared the tensors to be parts of; empty: nothing.
        tensors: the tensors as they were given; a distributed one is not reduced to its part.
        is_sharded: whether this rank holds a part alone of any of them.
        foremost: place of the tensor that stands for all of them: the first one of which each rank
            trains a copy of its own, or the first of all.
    """

    def __init__(
        self,
        table: str,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        *,
        parts: Sequence[str] = (),
    ) -> None:
        self.table = table
        self._parts = tuple(parts)
        self.names = tuple(names)
        self.tensors = tuple(tensors)
        own = (place for place, part in enumerate(self._parts) if str(part).startswith(RANK_LOCAL))
        self.foremost = next(own, 0)
        self.is_sharded = any(map(facts.shard, self.tensors))
        self._plan: FingerprintPlan | None = None

    def described(self) -> TensorTable:
        """The table as it is sent to the server."""
        table = facts.tensor_table(self.names, self.tensors)
        if not any(self._parts):
            return table
        shards = [f"{p} {s}".strip() for p, s in zip(self._parts, table.shards, strict=True)]
        return replace(table, shards=tuple(shards))

    def held(self) -> list[torch.Tensor]:
        """What this rank holds of each tensor."""
        return facts.all_held(self.tensors)

    def fingerprints(self, step: int, stage: str, fingerprints: FingerprintValues) -> Fingerprint:
        """Fingerprints as they are sent."""
        return Fingerprint(
            step=step,
            stage=stage,
            table=self.table,
            digests=fingerprints.digests,
            sketches=fingerprints.sketches,
        )

    def plan(self, tensors: Sequence[torch.Tensor]) -> FingerprintPlan:
        """A plan for tensors of these names: kept as long as sizes and dtypes stay."""
        if self._plan is None or not self._plan.fits(tensors):
            self._plan = FingerprintPlan(self.names, tensors)
        return self._plan


def number(tensor: torch.Tensor) -> float | torch.Tensor:
    """The number in a tensor of one element on a CPU; on a device, the tensor as it is.

    Where it is on a device, to read it would wait: it is handed on, and read when it has arrived.
    """
    if not tensor.is_cpu:
        return tensor.detach()
    value: float = tensor.item()
    return value
