"""What of the agent listens to torch's process-wide hooks."""

import gc

from rankscope.agent.probes.gradients import clipping
from rankscope.agent.probes.loss import sources as loss_sources
from rankscope.agent.probes.optimizer import amp, scheduler
from rankscope.agent.steps import hooks, uneven_inputs


def end_all() -> None:
    """Ends whatever listens still; torch is as it was.

    What listens is held weakly, but the cycles of a failure hold it until they are collected.
    """
    gc.collect()
    for watching in hooks._steppers:
        watching.end()
    loss_sources._keep(lambda reference: False)
    for module in (amp, clipping, uneven_inputs, scheduler):
        module._listeners.remove_all()
