"""How an NVIDIA GPU is: temperature, clock, throttling, memory errors, as its driver has them.

Read through NVML, where `nvidia-ml-py` is installed, from the agent's own thread. NVML asks the
driver and waits for nothing that the device computes.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch

# Seconds between two readings: temperatures and clocks move slower, and each asks the
# driver, which is shared by all ranks of a machine.
_INTERVAL = 10.0
_GPU_TEMPERATURE, _SM_CLOCK = 0, 1
_CORRECTED, _UNCORRECTED, _SINCE_BOOT = 0, 1, 0


class GpuHealth:
    """Of the GPU that a rank's parameters are on.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = float("-inf")
        self._device: torch.device | None = None
        self._questions: dict[str, Callable[[], Any]] = {}
        self._refused: type[Exception] = RuntimeError

    def read(self, device: torch.device) -> dict[str, float]:
        """Name of a series -> value; empty where it is too early, and where nothing is known.

        What a GPU or its driver refuses is asked once and never again: memory without ECC, a
        container without the driver's rights, a slice of a GPU (MIG).
        """
        now = self._clock()
        if device.type != "cuda" or now < self._next:
            return {}
        self._next = now + _INTERVAL
        if device != self._device:
            self._device = device
            self._questions = {}
            # Not installed; a module of that name that is something else; no torch that knows it.
            with contextlib.suppress(ImportError, AttributeError):
                self._find(device, importlib.import_module("pynvml"))
        found: dict[str, float] = {}
        for name, ask in tuple(self._questions.items()):
            try:
                found[name] = float(ask())
            except self._refused:
                del self._questions[name]
        return found

    def _find(self, device: torch.device, nvml: Any) -> None:
        """Finds the GPU, and out what can be asked of it."""
        self._refused = nvml.NVMLError
        # By its identity: NVML counts all GPUs of the machine, torch those that it may see.
        identity = torch.cuda.get_device_properties(device).uuid
        with contextlib.suppress(self._refused):  # no driver, no rights
            nvml.nvmlInit()
            gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity}")
            self._questions = _questions(nvml, gpu)


def _questions(nvml: Any, gpu: Any) -> dict[str, Callable[[], Any]]:
    """Series -> what asks for it."""
    # Since driver 535 it is called events, for not all of them throttle.
    reasons = getattr(
        nvml,
        "nvmlDeviceGetCurrentClocksEventReasons",
        getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None),
    )
    errors = nvml.nvmlDeviceGetTotalEccErrors
    asked: dict[str, Callable[[], Any]] = {
        "gpu_temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(gpu, _GPU_TEMPERATURE),
        "gpu_sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, _SM_CLOCK),
        "gpu_ecc_corrected": lambda: errors(gpu, _CORRECTED, _SINCE_BOOT),
        "gpu_ecc_uncorrected": lambda: errors(gpu, _UNCORRECTED, _SINCE_BOOT),
    }
    if reasons is not None:
        asked["gpu_throttle_reasons"] = lambda: reasons(gpu)
    return asked
