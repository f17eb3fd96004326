"""How much memory the process and its device have in use."""

from __future__ import annotations

import torch

from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.process.device_memory import DeviceMemory
from rankscope.agent.process.resident_memory import ResidentMemory


class Memory(Probe):
    """`process_resident_memory_bytes`, and of CUDA what torch has allocated and reserved.

    Costs a system call (3 to 5 microseconds; where system calls are intercepted up to 20) and, on
    CUDA, one call of torch's allocator, which returns its counters and does not ask the device:
    some 20 microseconds (tier `signals`).

    `process_resident_memory_bytes` is the resident set of the trainer's process, without workers
    that load data (`/proc/self/status`; where there is no such file it is the largest so far, as
    `getrusage` has it). `process_mapped_file_bytes` is the part of it that are pages of files, such
    as a data set that is read through its mapping: the system takes them back where it needs room.
    `cuda_memory_allocated_bytes` is what tensors occupy after the step on the
    device of the first parameter, `cuda_memory_reserved_bytes` what the caching allocator holds of
    the device for it, and `cuda_max_memory_allocated_bytes` the largest that tensors have occupied
    so far, or since the trainer has reset that count: the agent never does.
    """

    name = "memory"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._resident = ResidentMemory()
        self._device: torch.device | None = None
        self._counters = DeviceMemory(None)

    def after_step(self, facts: StepFacts) -> None:
        """Reads what there is after the update."""
        if not self.context.signals:
            return
        with facts.charged("signals"):
            facts.scalars.update(self._resident.read())
            # A model may be moved to its device after `attach`.
            tensors = self.context.parameters.tensors
            if tensors and tensors[0].device != self._device:
                self._device = tensors[0].device
                self._counters = DeviceMemory(self._device)
            facts.scalars.update(self._counters.read())

    def close(self) -> None:
        """Closes the file."""
        self._resident.close()
