"""Fingerprints of tensors in the memory of a device, without ever waiting for it.

On CUDA the kernels go onto the stream that the trainer uses at the moment, so they see what the
trainer's own next operation would see. The results travel on a stream of their own into pinned
memory. Nothing that is launched there needs the host to wait: no table is put on the device after
construction, and what is (the addresses of the tensors) comes from pinned memory.

A device other than CUDA has no such streams here; reading its results waits for it.
"""

from __future__ import annotations

import importlib.util
import subprocess
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from rankscope.agent.fingerprint.constants import BUCKETS
from rankscope.agent.fingerprint.device_torch import TorchKernels
from rankscope.agent.wire import Float64, UInt64

if TYPE_CHECKING:
    from rankscope.agent.fingerprint.device_triton import TritonKernels


class DeviceTensors:
    """Those tensors of a plan that are on one device, none of them empty.

    Attributes:
        rows: their positions in the plan.
    """

    def __init__(
        self, rows: list[int], tensors: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self.rows = rows
        self._places = np.array(rows, dtype=np.int64)
        self._device = device
        self._cuda = device.type == "cuda"
        self._slots: list[_Slot] = []
        self._triton: TritonKernels | None = None
        self._torch: TorchKernels | None = None
        self._computed: torch.cuda.Event | None = None
        if self._cuda:
            self._side = torch.cuda.Stream(device)
            self._home = torch.cuda.current_stream(device)
            mine = [tensors[row] for row in rows]
            self._triton = self._compiled(mine) if importlib.util.find_spec("triton") else None
        if self._triton is None:
            self._torch = TorchKernels([tensors[row] for row in rows], device)
        # Two, because a step may begin before the results of the one before were fetched.
        self._slots.extend([self._new_slot(), self._new_slot()])

    def begin(self, tensors: Sequence[torch.Tensor], *, sketches: bool) -> DeviceRun:
        """Launches everything and returns at once; `tensors` are all tensors of the plan."""
        mine = [tensors[row] for row in self.rows]
        slot = self._free_slot()
        wanted = slot.sketches if sketches else None
        if not self._cuda:
            self._kernels_of_torch(mine, slot.digests, wanted)
            return slot.taken_by(DeviceRun(slot, self._places))
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            if self._computed is not None:
                # The partial results are in one place: after a change of streams, one after
                # the other.
                current.wait_event(self._computed)
            if self._triton is not None:
                self._launch(self._triton, mine, slot, wanted)
            else:
                self._kernels_of_torch(mine, slot.digests, wanted)
            if current != self._home:
                # Were the plan dropped now, its memory could be the trainer's before it is written.
                for written in (
                    *slot.on_device(),
                    *(self._triton.partials if self._triton else ()),
                ):
                    written.record_stream(current)
            slot.computed.record(current)
            self._computed = slot.computed
            self._side.wait_event(slot.computed)
            with torch.cuda.stream(self._side):
                slot.host_digests.copy_(slot.digests, non_blocking=True)
                if sketches:
                    slot.host_sketches.copy_(slot.sketches, non_blocking=True)
                slot.copied.record(self._side)
        return slot.taken_by(DeviceRun(slot, self._places))

    def _kernels_of_torch(
        self, mine: list[torch.Tensor], digests: torch.Tensor, sketches: torch.Tensor | None
    ) -> None:
        assert self._torch is not None
        self._torch.launch(mine, digests, sketches)

    def _launch(
        self,
        kernels: TritonKernels,
        mine: list[torch.Tensor],
        slot: _Slot,
        sketches: torch.Tensor | None,
    ) -> None:
        readable = [kernels.readable(t) for t in mine]
        slot.host_addresses.numpy()[:] = [t.data_ptr() for t in readable]
        slot.addresses.copy_(slot.host_addresses, non_blocking=True)
        kernels.launch(slot.addresses, slot.digests, sketches)

    def _compiled(self, mine: list[torch.Tensor]) -> TritonKernels | None:
        """Triton's kernels, compiled now rather than in a step; None where that cannot be done."""
        try:
            from triton.errors import TritonError

            from rankscope.agent.fingerprint.device_triton import TritonKernels
        except ImportError:
            return None  # a version of Triton without what is used of it
        slot = self._new_slot()
        try:
            with torch.cuda.device(self._device):
                kernels = TritonKernels(mine, self._device)
                self._launch(kernels, mine, slot, slot.sketches)
        except (TritonError, OSError, RuntimeError, subprocess.SubprocessError):
            # It needs a C compiler where the training runs; torch's own operations do not.
            return None
        # The launch goes on; later ones on another stream must come after it.
        self._computed = slot.computed
        slot.computed.record(torch.cuda.current_stream(self._device))
        return kernels

    def _new_slot(self) -> _Slot:
        return _Slot(len(self.rows), self._device, self._side if self._cuda else None)

    def _free_slot(self) -> _Slot:
        for slot in self._slots:
            if slot.free():
                return slot
        self._slots.append(self._new_slot())
        return self._slots[-1]


class _Slot:
    """Room for the results of one run, on the device and on the host."""

    def __init__(self, count: int, device: torch.device, side: torch.cuda.Stream | None) -> None:
        self._owner: weakref.ref[DeviceRun] | None = None
        self.cuda = side is not None
        self.digests = torch.zeros(count, dtype=torch.int64, device=device)
        self.sketches = torch.zeros(count, BUCKETS, dtype=torch.float64, device=device)
        if side is None:
            return
        self.addresses = torch.zeros(count, dtype=torch.int64, device=device)
        for used_there in self.on_device():
            # So that a plan that is dropped gives the memory back after the copy, not before.
            used_there.record_stream(side)
        self.host_addresses = torch.zeros(count, dtype=torch.int64, pin_memory=True)
        self.host_digests = torch.zeros(count, dtype=torch.int64, pin_memory=True)
        self.host_sketches = torch.zeros(count, BUCKETS, dtype=torch.float64, pin_memory=True)
        self.computed = torch.cuda.Event()
        self.copied = torch.cuda.Event()

    def on_device(self) -> tuple[torch.Tensor, ...]:
        """The memory of a CUDA device that is used here."""
        return self.addresses, self.digests, self.sketches

    def taken_by(self, run: DeviceRun) -> DeviceRun:
        self._owner = weakref.ref(run)
        return run

    def free(self) -> bool:
        """Whether nobody will read it any more and nothing is under way that writes into it."""
        owner = self._owner() if self._owner is not None else None
        return (owner is None or owner.read) and (not self.cuda or self.copied.query())


class DeviceRun:
    """What was launched at one moment.

    Attributes:
        read: whether the results were fetched.
    """

    def __init__(self, slot: _Slot, places: npt.NDArray[np.int64]) -> None:
        self._slot = slot
        self._places = places
        self.read = False

    def ready(self) -> bool:
        """Whether the results have arrived; never waits."""
        return not self._slot.cuda or self._slot.copied.query()

    def write(self, digests: UInt64, sketches: Float64 | None) -> None:
        """Writes the results into the rows of the plan's; waits for them where it must."""
        slot = self._slot
        if slot.cuda:
            slot.copied.synchronize()
            host_digests, host_sketches = slot.host_digests, slot.host_sketches
        else:
            host_digests, host_sketches = slot.digests.cpu(), slot.sketches.cpu()
        digests[self._places] = host_digests.numpy().view(np.uint64)
        if sketches is not None:
            sketches[self._places] = host_sketches.numpy()
        self.read = True
