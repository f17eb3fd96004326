"""When a device comes to a place in the work it is given: events, read once they have passed.

The host runs ahead of a CUDA device: its clock says when work was given, not when it is done. An
event is work like any other: recorded on the stream that the trainer uses, it has its time when the
device comes to it. Nothing here waits for that.

`events` is the one place where they are made, and what a test without a device replaces.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import torch

from rankscope.agent.process.device_graph import is_recording

# Events at once, those to be used again included. A step has four at most, and the device is a few
# steps behind: one that has these many under way is not timed for a while.
_MOST = 256


class Mark(Protocol):
    """A place in a device's work."""

    def record(self) -> None:
        """The place is here: after what the device has been given so far. Instead of another."""

    def passed(self) -> bool:
        """Whether the device has come to it; never waits."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds of the device from one place to this one, both of which it has passed."""


class Events(Protocol):
    """Makes marks."""

    def measure(self, tensor: torch.Tensor) -> bool:
        """Whether work on a tensor can be timed so; where not, the host's clock says it."""

    def mark(self, tensor: torch.Tensor) -> Mark | None:
        """A mark, recorded now on the tensor's device; None where that cannot be done now."""


def events() -> Events:
    """Those of CUDA."""
    return CudaEvents()


class CudaEvents:
    """Of the current streams of CUDA devices.

    A mark costs the host one `cudaEventRecord`. The events are used again: their number is bounded.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._free: dict[torch.device, deque[torch.cuda.Event]] = {}
        self._left = most

    def measure(self, tensor: torch.Tensor) -> bool:
        """Whether it is on a CUDA device."""
        return tensor.is_cuda

    def mark(self, tensor: torch.Tensor) -> CudaMark | None:
        """Recorded on the current stream of its device; None where too many are under way."""
        # What is recorded of a graph under capture has no time of its own.
        if is_recording():
            return None
        device = tensor.device
        free = self._free.setdefault(device, deque())
        try:
            event = free.popleft()
        except IndexError:
            if self._left <= 0:
                return None
            self._left -= 1
            event = torch.cuda.Event(enable_timing=True)
        made = CudaMark(event, device, free)
        made.record()
        return made


class CudaMark:
    """A CUDA event, given back when nobody needs it any more."""

    __slots__ = ("_device", "_event", "_free")

    def __init__(
        self, event: torch.cuda.Event, device: torch.device, free: deque[torch.cuda.Event]
    ) -> None:
        self._event, self._device, self._free = event, device, free

    def record(self) -> None:
        """On the stream that is current in the calling thread."""
        if not is_recording():
            self._event.record(torch.cuda.current_stream(self._device))

    def passed(self) -> bool:
        """Whether the device has come to it."""
        return bool(self._event.query())

    def seconds_since(self, earlier: CudaMark) -> float:
        """In steps of half a microsecond."""
        return float(earlier._event.elapsed_time(self._event)) * 1e-3

    def __del__(self) -> None:
        self._free.append(self._event)


class AllPassed:
    """Several marks, as a probe waits for them: ready once the device has passed all of them."""

    def __init__(self, *marks: Mark) -> None:
        self._marks = marks

    def ready(self) -> bool:
        """Whether it has."""
        return all(mark.passed() for mark in self._marks)
