"""Brings numbers from the device to the host without making the training thread wait.

The one place of the agent where a tensor becomes a Python number. On a CPU that is a read. On CUDA
the numbers are stacked on the device, copied into pinned memory on a stream of our own, and read
when the event behind the copy has passed, a step or two later: never a synchronisation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class _Copy:
    host: torch.Tensor
    event: torch.cuda.Event
    deliver: Callable[[list[float]], None]


class Readout:
    """Hands over 0-dimensional tensors as floats, in order, as soon as they can be read."""

    def __init__(self) -> None:
        self._copies: deque[_Copy] = deque()
        self._stream: torch.cuda.Stream | None = None

    def push(self, values: Sequence[torch.Tensor], deliver: Callable[[list[float]], None]) -> None:
        """Reads tensors of one element each and calls `deliver` with their values.

        On a CPU `deliver` is called at once, else by a later `poll`.
        """
        device = next((v.device for v in values if v.device.type != "cpu"), None)
        if device is None or device.type != "cuda":
            deliver([float(v.detach()) for v in values])
            return
        with torch.no_grad(), torch.cuda.device(device):
            stacked = torch.stack(
                [
                    v.detach().reshape(()).to(device, torch.float64, non_blocking=True)
                    for v in values
                ]
            )
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                host = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
                host.copy_(stacked, non_blocking=True)
                # The allocator must not hand the memory on before our stream has read it.
                stacked.record_stream(self._stream)
                event = torch.cuda.Event()
                event.record(self._stream)
        self._copies.append(_Copy(host, event, deliver))

    def poll(self) -> None:
        """Delivers what has arrived since."""
        while self._copies and self._copies[0].event.query():
            copy = self._copies.popleft()
            copy.deliver(copy.host.tolist())

    def finish(self) -> None:
        """Waits for what is still under way; for the end of the run only."""
        while self._copies:
            copy = self._copies.popleft()
            copy.event.synchronize()
            copy.deliver(copy.host.tolist())
