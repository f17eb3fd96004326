"""Fingerprints of tensors in the memory of a device, without ever waiting for it.

On CUDA the kernels go onto the stream that the trainer uses at the moment, so they see what the
trainer's own next operation would see. The results travel on a stream of their own into pinned
memory. Nothing that is launched there needs the host to wait: no table is put on the device after
construction, and what is (the addresses of the tensors) comes from pinned memory.

A device other than CUDA has no such streams here; reading its results waits for it.
"""

from __future__ import annotations

import contextlib
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
from rankscope.agent.fingerprint.results import Results
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
        if self._cuda:
            self._side = torch.cuda.Stream(device)
            self._last = torch.cuda.current_stream(device)
            mine = [tensors[row] for row in rows]
            self._triton = self._compiled(mine) if importlib.util.find_spec("triton") else None
        if self._triton is None:
            self._torch = TorchKernels([tensors[row] for row in rows], device)
        # Two, because a step may begin before the results of the one before were fetched.
        self._slots.extend([self._new_slot(), self._new_slot()])

    def begin(
        self, tensors: Sequence[torch.Tensor], *, sketches: bool, digests: bool = True
    ) -> DeviceRun:
        """Launches everything and returns at once; `tensors` are all tensors of the plan.

        Args:
            sketches: whether sketches and sums of squares are wanted.
            digests: whether digests are.
        """
        mine = [tensors[row] for row in self.rows]
        slot = self._free_slot()
        run = slot.taken_by(DeviceRun(slot, self._places, sketches=sketches, digests=digests))
        if not self._cuda:
            self._kernels_of_torch(mine, slot, sketches=sketches, digests=digests)
            return run
        with torch.cuda.device(self._device):
            self._join_stream()
            if self._triton is not None:
                self._launch(self._triton, mine, slot, sketches=sketches, digests=digests)
            else:
                self._kernels_of_torch(mine, slot, sketches=sketches, digests=digests)
            slot.send(self._side, sketches=sketches, digests=digests)
        return run

    def open(self) -> OpenRun:
        """Sketches and sums of squares of the tensors one by one, as they come.

        Nothing else is begun before it is closed: the partial results are in one place.
        """
        slot = self._free_slot()
        run = slot.taken_by(DeviceRun(slot, self._places, sketches=True, digests=False))
        with torch.cuda.device(self._device) if self._cuda else contextlib.nullcontext():
            if self._cuda:
                self._join_stream()
            slot.values.zero_()
            if self._triton is not None:
                self._triton.begin_one_by_one()
        return OpenRun(self, slot, run)

    def _one(self, place: int, tensor: torch.Tensor, slot: _Slot) -> None:
        """Launches what there is to do for one tensor of an open run."""
        with torch.cuda.device(self._device) if self._cuda else contextlib.nullcontext():
            if self._cuda:
                self._join_stream()
            if self._triton is None:
                assert self._torch is not None
                self._torch.launch_one(place, tensor, slot.results)
                return
            readable = self._triton.readable(tensor)
            self._triton.launch_one(place, readable.data_ptr())

    def _sent(self, slot: _Slot) -> None:
        """An open run is complete."""
        if self._cuda:
            with torch.cuda.device(self._device):
                self._join_stream()
                if self._triton is not None:
                    self._triton.end_one_by_one(slot.results)
                slot.send(self._side, sketches=True, digests=False)

    def _join_stream(self) -> None:
        """What is launched on the current stream comes after what was launched before."""
        current = torch.cuda.current_stream()
        if current == self._last:
            return
        # The partial results are in one place: after a change of streams, one after the other.
        current.wait_stream(self._last)
        self._last = current
        # Were the plan dropped now, its memory could be the trainer's before it is written.
        slots = (memory for slot in self._slots for memory in slot.on_device())
        for written in (*slots, *(self._triton.partials if self._triton else ())):
            written.record_stream(current)

    def _kernels_of_torch(
        self, mine: list[torch.Tensor], slot: _Slot, *, sketches: bool, digests: bool
    ) -> None:
        assert self._torch is not None
        self._torch.launch(mine, slot.results, sketches=sketches, digests=digests)

    def _launch(
        self,
        kernels: TritonKernels,
        mine: list[torch.Tensor],
        slot: _Slot,
        *,
        sketches: bool,
        digests: bool,
    ) -> None:
        # `readable` lives until the kernels are launched: then the stream itself keeps their order.
        readable, addresses = kernels.all_readable(mine)
        slot.host_addresses.numpy()[:] = addresses
        slot.addresses.copy_(slot.host_addresses, non_blocking=True)
        kernels.launch(
            slot.addresses,
            slot.results,
            aligned=not (addresses % 16).any(),
            digests=digests,
            sketches=sketches,
        )

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
                # Whatever will be asked of them: the first time takes most of a second.
                for sketches, digests in ((True, True), (True, False), (False, True)):
                    self._launch(kernels, mine, slot, sketches=sketches, digests=digests)
                kernels.begin_one_by_one()
                for place in kernels.first_of_each_type:
                    readable = kernels.readable(mine[place])
                    kernels.launch_one(place, readable.data_ptr())
        except (TritonError, OSError, RuntimeError, subprocess.SubprocessError):
            # It needs a C compiler where the training runs; torch's own operations do not.
            return None
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
    """Room for the results of one run, on the device and on the host.

    Attributes:
        values: all results side by side, float64 [(BUCKETS + 2) * n]: sketches, sums of squares,
            and the bits of digests. What is wanted of them travels in one piece.
        results: the same, as they are written.
    """

    def __init__(self, count: int, device: torch.device, side: torch.cuda.Stream | None) -> None:
        self._owner: weakref.ref[DeviceRun] | None = None
        self._count = count
        self.cuda = side is not None
        self.values = torch.zeros((BUCKETS + 2) * count, dtype=torch.float64, device=device)
        self.results = _parts(self.values, count)
        if side is None:
            return
        self.addresses = torch.zeros(count, dtype=torch.int64, device=device)
        for used_there in self.on_device():
            # So that a plan that is dropped gives the memory back after the copy, not before.
            used_there.record_stream(side)
        self.host_addresses = torch.zeros(count, dtype=torch.int64, pin_memory=True)
        self._host_values = torch.zeros(len(self.values), dtype=torch.float64, pin_memory=True)
        self._computed = torch.cuda.Event()
        self.copied = torch.cuda.Event()

    def on_device(self) -> tuple[torch.Tensor, ...]:
        """The memory of a CUDA device that is used here."""
        return self.addresses, self.values

    def send(self, side: torch.cuda.Stream, *, sketches: bool, digests: bool) -> None:
        """What the current stream has been given will be on the host, and `copied` passed then."""
        self._computed.record()
        side.wait_event(self._computed)
        first = 0 if sketches else (BUCKETS + 1) * self._count
        last = len(self.values) if digests else (BUCKETS + 1) * self._count
        with torch.cuda.stream(side):
            self._host_values[first:last].copy_(self.values[first:last], non_blocking=True)
            self.copied.record(side)

    def arrived(self) -> Results:
        """The results on the host; waits for them where it must."""
        if not self.cuda:
            return _parts(self.values.cpu(), self._count)
        if not self.copied.query():
            self.copied.synchronize()
        return _parts(self._host_values, self._count)

    def taken_by(self, run: DeviceRun) -> DeviceRun:
        self._owner = weakref.ref(run)
        return run

    def free(self) -> bool:
        """Whether nobody will read it any more and nothing is under way that writes into it."""
        owner = self._owner() if self._owner is not None else None
        return (owner is None or owner.read) and (not self.cuda or self.copied.query())


def _parts(values: torch.Tensor, count: int) -> Results:
    sketches, squares, digests = values.split((BUCKETS * count, count, count))
    return Results(sketches.view(count, BUCKETS), squares, digests.view(torch.int64))


class DeviceRun:
    """What was launched at one moment.

    Attributes:
        read: whether the results were fetched.
    """

    def __init__(
        self, slot: _Slot, places: npt.NDArray[np.int64], *, sketches: bool, digests: bool
    ) -> None:
        self._slot = slot
        self._places = places
        self._sketches, self._digests = sketches, digests
        self.read = False

    def ready(self) -> bool:
        """Whether the results have arrived; never waits."""
        return not self._slot.cuda or self._slot.copied.query()

    def write(
        self, digests: UInt64, sketches: Float64 | None, squares: Float64 | None = None
    ) -> None:
        """Writes the results into the rows of the plan's; waits for them where it must."""
        found = self._slot.arrived()
        if self._digests:
            digests[self._places] = found.digests.numpy().view(np.uint64)
        if self._sketches:
            if sketches is not None:
                sketches[self._places] = found.sketches.numpy()
            if squares is not None:
                squares[self._places] = found.squares.numpy()
        self.read = True


class OpenRun:
    """A run to which tensors are given one by one."""

    def __init__(self, owner: DeviceTensors, slot: _Slot, run: DeviceRun) -> None:
        self._owner, self._slot, self._run = owner, slot, run

    def add(self, place: int, tensor: torch.Tensor) -> None:
        """Launches what there is to do for one tensor, once; waits for nothing.

        Args:
            place: its position among those of the device.
        """
        self._owner._one(place, tensor, self._slot)

    def close(self) -> DeviceRun:
        """All have been given: the results are on their way. Those of others are zeros."""
        self._owner._sent(self._slot)
        return self._run
