"""Brings numbers from the device to the host without making the training thread wait.

The one place of the agent where a tensor becomes a Python number. On a CPU that is a read. On CUDA
the numbers are stacked on the device, copied into pinned memory on a stream of our own, and read
when the event after the copy has passed, a step or two later: never a synchronisation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from rankscope.agent.probes.base import Pending

# How long the end of a run waits for a device that still computes, in seconds.
_LONGEST_WAIT = 2.0


class _Copy:
    """Numbers on their way to the host."""

    __slots__ = ("_event", "_host")

    def __init__(self, host: torch.Tensor, event: torch.cuda.Event) -> None:
        self._host = host
        self._event = event

    def ready(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> list[float]:
        if not self.ready():
            self._event.synchronize()
        values: list[float] = self._host.tolist()
        return values


class Readout:
    """Delivers what devices compute, in order, as soon as it is available.

    Attributes:
        waiting: what is still under way, with what is to be done then.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[Pending, Callable[[], None]]] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def push(self, values: Sequence[torch.Tensor], deliver: Callable[[list[float]], None]) -> None:
        """Reads tensors of one element each and calls `deliver` with their values.

        For tensors on a CPU `deliver` is called at once, else by a later `poll`.
        """
        known = [float(v.detach()) if v.device.type == "cpu" else None for v in values]
        distant = [v for v in values if v.device.type != "cpu"]
        if not distant:
            deliver(known)  # type: ignore[arg-type]
        elif distant[0].device.type != "cuda":
            # No streams to copy on: these devices wait. Named in the documentation.
            deliver(_merged(known, [float(v.detach().to("cpu")) for v in distant]))
        else:
            copy = self._copy(distant, distant[0].device)
            self.waiting.append((copy, lambda: deliver(_merged(known, copy.wait()))))

    def when_ready(self, pending: Pending, deliver: Callable[[], None]) -> None:
        """Calls `deliver` by a later `poll`, when `pending` is ready and its turn has come."""
        self.waiting.append((pending, deliver))

    def after_all(self, deliver: Callable[[], None]) -> None:
        """Calls `deliver` after everything before it: at once where nothing waits."""
        if self.waiting:
            self.waiting.append((_NOTHING, deliver))
        else:
            deliver()

    def poll(self) -> None:
        """Delivers what has arrived since."""
        while self.waiting:
            pending, deliver = self.waiting[0]
            try:
                if not pending.ready():
                    return
            except BaseException:
                # It would fail again, and everything after it would wait for ever.
                self.waiting.popleft()
                raise
            self.waiting.popleft()
            deliver()

    def finish(self, seconds: float = _LONGEST_WAIT) -> None:
        """Waits for what is still under way, so long; for the end of the run only."""
        until = time.monotonic() + seconds
        self.poll()
        while self.waiting and time.monotonic() < until:
            time.sleep(0.001)
            self.poll()

    @torch.no_grad()
    def _copy(self, values: Sequence[torch.Tensor], device: torch.device) -> _Copy:
        with torch.cuda.device(device):
            stacked = torch.stack(
                [
                    v.detach().reshape(()).to(device, torch.float64, non_blocking=True)
                    for v in values
                ]
            )
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                host = torch.empty(len(stacked), dtype=torch.float64, pin_memory=True)
                host.copy_(stacked, non_blocking=True)
                # The allocator must not hand the memory on before our stream has read it.
                stacked.record_stream(stream)
                event = torch.cuda.Event()
                event.record(stream)
        return _Copy(host, event)


def _merged(known: Sequence[float | None], arrived: Sequence[float]) -> list[float]:
    rest = iter(arrived)
    return [next(rest) if value is None else value for value in known]


class _Nothing:
    def ready(self) -> bool:
        return True


_NOTHING = _Nothing()
