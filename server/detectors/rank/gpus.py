"""How the GPUs of ranks are, as evidence beside what is found of the ranks. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.wording import listing, number, ranks
from rankscope.server.window import Window

_TEMPERATURE, _CLOCK, _REASONS = (
    "gpu_temperature_celsius",
    "gpu_sm_clock_mhz",
    "gpu_throttle_reasons",
)
_ERRORS = "gpu_ecc_uncorrected"
NAMES = (_TEMPERATURE, _CLOCK, _REASONS, _ERRORS)
# Bits of NVML (nvmlClocksThrottleReasons, nvml.h) that make a GPU slower than it could be.
_THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake of the hardware",
}
# Readings that count: two to three minutes of them. It throttles where it did at more than half.
_READINGS = 16


@dataclass(slots=True)
class Gpus:
    """The last readings of each rank's GPU: series -> rank -> values."""

    readings: dict[str, dict[int, deque[float]]] = field(default_factory=dict)

    def take(self, window: Window) -> None:
        """Takes the readings of a window."""
        for name in NAMES:
            if (series := window.series.get(name)) is None:
                continue
            of_name = self.readings.setdefault(name, {})
            for row, column in np.argwhere(series.present).tolist():
                rank = int(window.ranks[row])
                known = of_name.setdefault(rank, deque(maxlen=_READINGS))
                known.append(float(series.values[row, column]))

    def throttles(self, rank: int) -> tuple[str, ...]:
        """Why a rank's GPU was slowed down at most readings."""
        known = [int(v) for v in self.readings.get(_REASONS, {}).get(rank, ()) if v >= 0]
        return tuple(
            reason
            for bit, reason in _THROTTLES.items()
            if sum(bool(value & bit) for value in known) * 2 > len(known)
        )

    def beside(self, finding: Finding) -> Finding:
        """A finding of ranks, with how their GPUs are."""
        evidence = {
            str(rank): readings for rank in finding.ranks if (readings := self._evidence(rank))
        }
        if not evidence:
            return finding
        said = " ".join(self._said(finding.ranks))
        return replace(
            finding,
            cause=f"{finding.cause} {said}" if said else finding.cause,
            evidence={**finding.evidence, "gpus": evidence},
        )

    def _said(self, who: Iterable[int]) -> Iterable[str]:
        for rank in who:
            if reasons := self.throttles(rank):
                others = self._others(who)
                alike = [other for other in others if set(reasons) <= set(self.throttles(other))]
                clock, usual = self._median(_CLOCK, [rank]), self._median(_CLOCK, others)
                text = f"The GPU of rank {rank} throttles ({listing(reasons, most=4)})"
                text += f", as {_those(len(alike))} {ranks(alike)}" if alike else ""
                if clock is not None and usual is not None:
                    text += f": {number(clock)} MHz, the others' {number(usual)} MHz"
                yield f"{text}."
            if errors := max(self.readings.get(_ERRORS, {}).get(rank, ()), default=0.0):
                yield (
                    f"The GPU of rank {rank} has counted {number(errors)} memory errors that ECC "
                    "could not correct."
                )

    def _others(self, who: Iterable[int]) -> list[int]:
        named = set(who)
        return sorted(rank for rank in self.readings.get(_REASONS, {}) if rank not in named)

    def _median(self, name: str, who: Iterable[int]) -> float | None:
        known = [v for rank in who for v in self.readings.get(name, {}).get(rank, ())]
        return median(known) if known else None

    def _evidence(self, rank: int) -> dict[str, object]:
        last = {
            name: of_name[rank][-1] for name, of_name in self.readings.items() if of_name.get(rank)
        }
        return {**last, "throttles": list(self.throttles(rank))} if last else {}


def _those(count: int) -> str:
    return "does that of" if count == 1 else "do those of"
