"""How long the training thread had work to do and no processor to do it on."""

from __future__ import annotations

from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.process.processor_time import ProcessorTime

# Less is what every thread loses now and then.
_LEAST = 5e-4


class RunQueueDelay(Probe):
    """`queued_seconds`: how long this rank's training thread waited for a processor in a step.

    Costs a reading of a counter a step, one microsecond (tier `basic`), where the step before or
    after is sampled, too. Posted where it is half a millisecond or more, and with it
    `processor_seconds`, for which the thread had one. What is left of the step it waited for
    something else.

    The Linux kernel counts for each thread for how long it was ready to run while others were
    running (`/proc/thread-self/schedstat`, in nanoseconds). Where ranks share a machine that has
    more to do than it can, now this one loses its processor and now that one, and the others wait
    for it: its step is long although it does no more than they do.
    """

    name = "queued"
    in_pairs = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._time = ProcessorTime()
        self._before = (0, 0)
        self._step = -2

    def after_step(self, facts: StepFacts) -> None:
        """Closes the step."""
        if self.context.alone:
            return  # nothing to compare with
        second = self._step == facts.step - 1
        counted, goes_on = self._time.read()
        if counted is None:
            return
        seconds = (counted[1] - self._before[1]) * 1e-9
        if goes_on and second and seconds >= _LEAST:
            facts.scalars["queued_seconds"] = seconds
            facts.scalars["processor_seconds"] = (counted[0] - self._before[0]) * 1e-9
        self._before, self._step = counted, facts.step

    def close(self) -> None:
        """Closes the counters."""
        self._time.close()
