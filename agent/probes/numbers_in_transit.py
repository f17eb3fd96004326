"""Numbers on their way from a device to the host, read by the probe that sent them."""

from __future__ import annotations

import numpy as np
import torch

from rankscope.agent.probes.base import Pending
from rankscope.agent.wire import Float64


class Arrival:
    """A few numbers; there at once on a CPU, after the work before them on CUDA.

    Args:
        numbers: real, any shape.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        numbers = numbers.detach()
        if numbers.device.type != "cuda":
            # Other devices than CUDA have no events to ask: they wait.
            self._host = numbers.to("cpu")
            return
        with torch.cuda.device(numbers.device):
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def ready(self) -> bool:
        """Whether `result` does not wait."""
        return self._event is None or self._event.query()

    def result(self) -> Float64:
        """The numbers, float64; waits where they have not arrived."""
        if not self.ready():
            assert self._event is not None
            self._event.synchronize()
        return self._host.numpy().astype(np.float64)


class Together:
    """Several things under way: ready when all of them are."""

    def __init__(self, *parts: Pending | None) -> None:
        self._parts = tuple(p for p in parts if p is not None)

    def ready(self) -> bool:
        """Whether all can be had without waiting."""
        return all(p.ready() for p in self._parts)
