"""What a monitor's own calls take of a step: processor time, with a bound by the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from rankscope.agent.probes.base import processor_time

# A sample that lasts this many times its processor time waits for something of its own (the
# interpreter's lock, memory that is swapped in): a share of the step that must not grow without
# bound. A thread that shares its core with two others lasts three times its processor time.
_MOST_WAITING = 4.0
# Where nothing waits for a device. On others a sample waits, and that is a cost like any other.
_NO_WAITING = frozenset(("cpu", "cuda", "meta"))


class Spent:
    """Adds up the calls of a step in progress.

    Args:
        tensors: what is sampled.
    """

    __slots__ = ("_busy", "_busy_began", "_began", "_exact", "_lasted", "_most")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._busy = self._lasted = self._began = self._busy_began = 0.0
        self._exact = False
        self.of(tensors)

    def of(self, tensors: Sequence[torch.Tensor]) -> None:
        """Other tensors are sampled from now on."""
        waits = any(t.device.type not in _NO_WAITING for t in tensors)
        self._most = 1.0 if waits else _MOST_WAITING

    def begin(self, *, exact: bool = True) -> float:
        """A call begins; says when, by the clock.

        Args:
            exact: whether it is worth asking for processor time: losses and rates alone take too
                little.
        """
        self._exact = exact
        self._began = time.perf_counter()
        self._busy_began = processor_time() if exact else self._began
        return self._began

    def end(self) -> None:
        """It ends."""
        now = time.perf_counter()
        self._busy += (processor_time() if self._exact else now) - self._busy_began
        self._lasted += now - self._began

    def total(self, tiers: dict[str, float], aside: float) -> float:
        """Seconds that the step has cost; the next one begins.

        Args:
            tiers: what was charged of it; raised in proportion where the clock is the bound.
            aside: seconds beside the calls that were added up.
        """
        busy, least = self._busy + aside, (self._lasted + aside) / self._most
        self._busy = self._lasted = 0.0
        if least <= busy:
            return busy
        for tier in tiers:
            tiers[tier] *= least / max(busy, 1e-9)
        return least
