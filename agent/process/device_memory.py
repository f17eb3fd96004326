"""How much memory of a CUDA device torch's allocator has given out: what it counts itself."""

from __future__ import annotations

from typing import Any

import torch


class DeviceMemory:
    """The allocator's counters of one device. No reading waits for the device, or asks it.

    Args:
        device: one of CUDA; nothing is known of others.
    """

    def __init__(self, device: torch.device | None) -> None:
        is_cuda = device is not None and device.type == "cuda"
        self._device = device if is_cuda else None

    def read(self) -> dict[str, float]:
        """Name of a series -> bytes; empty before CUDA is initialised, and where nothing counts."""
        if self._device is None or not torch.cuda.is_initialized():
            return {}
        try:
            # The flat form takes ten times as long.
            counted = torch.cuda.memory_stats_as_nested_dict(self._device)
        except RuntimeError:  # an allocator of the user's own need not count
            self._device = None
            return {}
        return series_of(counted)

    def limit(self) -> int:
        """Bytes that the device has; 0 where that is not known."""
        if self._device is None or not torch.cuda.is_initialized():
            return 0
        return int(torch.cuda.get_device_properties(self._device).total_memory)


def series_of(counted: dict[str, Any]) -> dict[str, float]:
    """What is posted of `torch.cuda.memory_stats_as_nested_dict`; empty where it has nothing."""
    allocated = counted.get("allocated_bytes", {}).get("all", {})
    reserved = counted.get("reserved_bytes", {}).get("all", {})
    found = {
        "cuda_memory_allocated_bytes": allocated.get("current"),
        "cuda_max_memory_allocated_bytes": allocated.get("peak"),
        "cuda_memory_reserved_bytes": reserved.get("current"),
    }
    return {name: float(value) for name, value in found.items() if value is not None}
