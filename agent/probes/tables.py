"""Tables of tensors that come, go and change: the name under which their fingerprints are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rankscope.agent.model import facts
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import Context

# What the other end takes; beyond it a table's name would cost the whole batch.
_LONGEST = 200
_ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))


class ChangingTable:
    """One table whose tensors the trainer may replace at any time.

    As long as names, shapes, dtypes and shards stay, so does its name; after a change it is
    announced under a new one. The tensors themselves are not kept alive.

    Args:
        context: of the monitor.
        base: the table's name, before its first change.
    """

    def __init__(self, context: Context, base: str) -> None:
        self._context = context
        self._base = base[:_LONGEST].replace("@", "_")
        self._known: tuple[Any, ...] = ()
        self._version = 0
        self._name = self._base

    def name(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> str:
        """The table's name for these tensors, announced before it is used."""
        described = (
            tuple(names),
            tuple([t.shape for t in tensors]),
            tuple([t.dtype for t in tensors]),
            # An ordinary tensor has no shard; to ask each one would cost more than the rest.
            tuple([facts.shard(t) for t in tensors if type(t) is not torch.Tensor]),
        )
        if described != self._known:
            if self._known:
                self._version += 1
                self._name = f"{self._base}@{self._version}"
            self._known = described
            self._context.announce(TensorGroup(self._name, names, tensors))
        return self._name


def readable(tensor: torch.Tensor) -> bool:
    """Whether what this rank holds of a tensor are plain bits that can be read.

    Not those of sparse tensors, of tensors of tensors and of tensors on no device, nor what
    subclasses (quantised state, say) keep in tensors of their own.
    """
    local = tensor if type(tensor) in _ORDINARY else facts.held(tensor)
    return (
        local.layout is torch.strided
        and not (local.is_meta or local.is_nested)
        and type(local) in _ORDINARY
    )
