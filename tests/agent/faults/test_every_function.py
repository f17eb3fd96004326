"""Every function of the agent that the training thread enters fails once, in turn.

Which ones these are is found by watching a training; so a new function is tested from the day it is
there. The fault is raised at the function's entry, as if its first line had failed. As a probe that
failed is switched off, several trainings are needed to get through all of its functions; in each of
them nearly every probe fails.
"""

from __future__ import annotations

import logging

import pytest
import torch

from rankscope import agent
from tests.support import saboteur

pytestmark = pytest.mark.contained

# Nothing can guard its own first line: where a guard stands, and what it is made of.
DOORS = {
    # What the user calls.
    "monitor.py:Monitor.mark",
    "monitor.py:Monitor.close",
    "monitor.py:Monitor.__exit__",
    "monitor.py:Monitor._leave",
    "monitor.py:Monitor._speak",
    "steps/torch_monitor.py:TorchMonitor.watch",
    # What torch calls, which does no more than to call what is guarded.
    "steps/hooks.py:RootHook.__call__",
    "steps/hooks.py:_before_step",
    "steps/hooks.py:_after_step",
    "steps/hooks.py:_notify_before",
    "steps/hooks.py:_notify_after",
    "probes/optimizer/amp.py:_wrapped.<locals>.step",
    "probes/gradients/clipping.py:_noting_kind.<locals>.total_norm",
    "probes/gradients/clipping.py:_notifying.<locals>.clip",
    "probes/gradients/clipping.py:_notifying_of_values.<locals>.clip",
    "probes/loss/evaluation.py:OutputHook.__call__",
    "probes/optimizer/scheduler.py:_notifying.<locals>.step",
    "probes/modules/module_hook.py:CallHook.__call__",
    # Goes through the user's own iterator: what fails there is the user's.
    "probes/gradients/clipping.py:_listed",
    # How a fault is reported. See `test_monitor_faults.py` for what happens when that fails.
    "monitor.py:Monitor._report",
    "delivery/records.py:Records.event",
    "delivery/records.py:Records._publish",
    "delivery/records.py:Records._make_room",
}
MOST_TRAININGS = 80


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def guarded(name):
    return not (name in DOORS or name.startswith("guard.py:"))


@pytest.mark.parametrize("parallel", [False, True], ids=["plain", "parallel"])
def test_each_fails_once_and_the_training_is_the_same(
    house, collector, caplog, monkeypatch, one_rank, parallel
):
    alone = saboteur.train(parallel=parallel).digest

    def trained(tracer, run):
        def attach(model, optimizer):
            monitor = house.attach(model, optimizer)
            tracer.__enter__()  # what `attach` itself does is another test's
            return monitor

        house.options = {"run": run}
        caplog.clear()
        contained = []
        note = lambda probe, fault: contained.append(probe)  # noqa: E731
        agent.guard.observers.append(note)
        try:
            with caplog.at_level(logging.WARNING):
                outcome = saboteur.train(attach, parallel=parallel)
        except saboteur.Sabotage as fault:
            pytest.fail(f"a fault in {fault} of the agent reached the trainer")
        finally:
            tracer.__exit__()
            agent.guard.observers.remove(note)
        assert outcome.digest == alone, tracer.failed
        # As at the end of the process, where closing itself has failed.
        house.monitors[-1]._connection.sender.close()
        events = [e.text for b in collector.batches if b.run == run for e in b.events]
        texts = [text for text in events if "Sabotage" in text]
        # What fails when all has been said is logged; what the sender reports is logged as well.
        logged = [r.getMessage() for r in caplog.records if "Sabotage" in r.getMessage()]
        texts += [line for line in logged if not any(text in line for text in texts)]
        for probe in contained:
            reported = [t for t in texts if f" {probe}: Sabotage" in f" {t}"]
            assert len(reported) == 1, (probe, reported, tracer.failed)
        assert len(texts) == len(set(contained)), (texts, contained)

    # Some are entered by chance: where the sender lags, a fact makes room for itself.
    calm = saboteur.Tracer()
    trained(calm, "calm")
    again = saboteur.Tracer()
    trained(again, "calm-again")
    always = {name for name in calm.entered.keys() & again.entered.keys() if guarded(name)}
    waiting = {name for name in calm.entered.keys() | again.entered.keys() if guarded(name)}
    assert len(always) > 200
    for training in range(MOST_TRAININGS):
        tracer = saboteur.Tracer(waiting)
        trained(tracer, f"run{training}")
        waiting = tracer.pending
        if not tracer.failed:
            break
    # A few are entered only now and then, as memory is freed.
    waiting &= always
    assert len(waiting) < 5, waiting
