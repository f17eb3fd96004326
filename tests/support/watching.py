"""A training in this process, watched whole, and what of it arrives at a real collector."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rankscope import agent
from rankscope.agent.fingerprint import FingerprintPlan
from tests.support.servers.collector import Collector

ALWAYS = 10**9
FEATURES, CLASSES = 6, 3


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def fix_plan(monitor, every, beyond=None):
    """From now on a monitor samples one step in `every`, whatever that costs.

    Args:
        every: a power of two.
        beyond: likewise, of all that is beyond losses and rates; `every` if not given.
    """
    schedule = monitor._schedule
    # On a busy machine steps take many times as long as those before them.
    monitor._tripwires.take = lambda *_: None
    schedule.allowance.lasts = False
    schedule._adapt = lambda: None
    schedule._requests, schedule._requested_until = [], -1
    schedule._dense_end = schedule._dense_basic_end = schedule._dense_signals_end = -1
    schedule._exponents = dict.fromkeys(schedule._exponents, (beyond or every).bit_length() - 1)
    schedule._exponents["basic"] = every.bit_length() - 1
    schedule._masks = schedule._as_masks()


class Watching:
    """Monitors that sample everything at every step, and their collector.

    What has arrived is asked for by run; asking closes the monitors.

    Attributes:
        collector: takes what they post.
        monitors: in the order of their attach.
    """

    def __init__(self, folder):
        self.collector = Collector()
        self.monitors = []
        self._options = {"server": self.collector.url, "run": "run", "spool": folder}

    def __enter__(self):
        self.collector.start()
        return self

    def __exit__(self, *error):
        self.close()
        self.collector.stop()

    def attach(self, model, optimizer, **options):
        return self._dense(agent.attach(model, optimizer, **(self._options | options)))

    def start(self, **options):
        return self._dense(agent.start(**(self._options | options)))

    def _dense(self, monitor):
        monitor._schedule.ask_dense(ALWAYS)
        self.monitors.append(monitor)
        return monitor

    def close(self):
        for monitor in self.monitors:
            monitor.close()

    def batches(self, run="run", rank=None):
        self.close()
        every = self.collector.batches
        return [b for b in every if b.run == run and rank in (None, b.rank)]

    def points(self, metric, run="run", rank=None):
        """Step -> value; fails where a step was reported twice."""
        return self._reported(run, rank, lambda batch: batch.columns.get(metric))

    def model_digests(self, stage, run="run", rank=None):
        """Step -> digest of the whole."""
        return self._reported(run, rank, lambda batch: batch.words.get(stage))

    def _reported(self, run, rank, column_of):
        found = {}
        for batch in self.batches(run, rank):
            column = column_of(batch)
            if column is not None:
                for step, value in zip(column.steps.tolist(), column.values.tolist(), strict=True):
                    assert step not in found, f"step {step} was reported twice"
                    found[step] = value
        return found

    def digests(self, stage, run="run", rank=None):
        """Step -> name of tensor -> digest."""
        tables, found = self.tables(run, rank), {}
        for batch in self.batches(run, rank):
            for one in batch.prints:
                if one.stage == stage:
                    known = found.setdefault(one.step, {})
                    names = tables[one.table].names
                    assert known.keys().isdisjoint(names), f"step {one.step} was reported twice"
                    known |= dict(zip(names, one.digests.tolist(), strict=True))
        return found

    def tables(self, run="run", rank=None):
        """Name -> table, as they were announced."""
        hellos = [b.hello for b in self.batches(run, rank) if b.hello is not None]
        return {name: table for hello in hellos for name, table in hello.tables.items()}

    def events(self, kind, run="run", rank=None):
        """(step, text) of each event of a kind."""
        events = [e for b in self.batches(run, rank) for e in b.events]
        return [(e.step, e.text) for e in events if e.kind == kind]

    def runs(self):
        self.close()
        return sorted({b.run for b in self.collector.batches})


def digests_of(named):
    """Name -> digest of tensors as they are now."""
    names, tensors = tuple(named), [t.detach() for t in named.values()]
    plan = FingerprintPlan(names, tensors)
    digests = plan.begin(tensors, sketches=False).result().digests
    return dict(zip(names, digests.tolist(), strict=True))


def grad_norm(parameters):
    """L2 norm of all gradients as one vector, in double precision."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    dense = [g.to_dense() if g.is_sparse else g for g in gradients]
    return float(torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in dense])))


class Diary:
    """What a trainer writes down by itself after each of its optimizer steps.

    Attributes:
        losses, norms, parameters: one entry a step; the digests of the parameters by name.
    """

    def __init__(self, model, parameters=None):
        self.losses, self.norms, self.parameters = [], [], []
        self._model = model
        self._moved = parameters

    def step(self, *losses):
        """An optimizer step was taken with the mean of these losses."""
        values = [float(loss.detach()) for loss in losses]
        self.losses.append(sum(values) / len(values))
        trained = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        self.norms.append(grad_norm(trained.values() if self._moved is None else self._moved))
        self.parameters.append(digests_of(trained))

    def check(self, watching, run="run", first=0, rel=1e-6):
        """Exactly these steps have arrived, and exactly these values."""
        steps = range(first, first + len(self.losses))
        expected = dict(zip(steps, self.losses, strict=True))
        assert watching.points("loss", run) == pytest.approx(expected, rel=rel)
        expected = dict(zip(steps, self.norms, strict=True))
        assert watching.points("grad_norm", run) == pytest.approx(expected, rel=rel)
        expected = dict(zip(steps, self.parameters, strict=True))
        assert watching.digests("parameters", run) == expected
        assert list(watching.model_digests("parameters", run)) == list(steps)
        assert watching.events("agent.fault", run) == []
        last = watching.batches(run)[-1]
        assert (last.state, last.through_step) == ("finished", steps[-1])
