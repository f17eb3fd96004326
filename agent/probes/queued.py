"""How long the training thread had work to do and no processor to do it on."""

from __future__ import annotations

import contextlib
import os
import threading

from rankscope.agent.probes.base import Context, Probe, StepFacts

# Less is what every thread loses now and then.
_LEAST = 5e-4


class Queued(Probe):
    """`queued_seconds`: how long this rank's training thread waited for a processor in a step.

    Costs a reading of a counter a step, one microsecond (tier `basic`). Posted where it is half a
    millisecond or more, and with it `processor_seconds`, for which the thread had one. What is left
    of the step it waited for something else.

    The Linux kernel counts for each thread for how long it was ready to run while others were
    running (`/proc/thread-self/schedstat`, in nanoseconds). Where ranks share a machine that has
    more to do than it can, now this one loses its processor and now that one, and the others wait
    for it: its step is long although it does no more than they do.
    """

    name = "queued"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._file = -1
        self._thread = -1
        self._before = (0, 0)
        self._step = -2

    def after_step(self, facts: StepFacts) -> None:
        """Closes the step."""
        thread = threading.get_native_id()
        if thread != self._thread:
            # The first step, another thread that trains now, or a fork.
            self._open(thread)
        if self._file < 0:
            return
        ran, queued, _ = os.pread(self._file, 64, 0).split()
        counted = int(ran), int(queued)
        seconds = (counted[1] - self._before[1]) * 1e-9
        if self._step == facts.step - 1 and seconds >= _LEAST:
            facts.scalars["queued_seconds"] = seconds
            facts.scalars["processor_seconds"] = (counted[0] - self._before[0]) * 1e-9
        self._before, self._step = counted, facts.step

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._thread = -1

    def _open(self, thread: int) -> None:
        self.close()
        self._thread, self._step = thread, -2
        # Other systems have no such file.
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
