"""Probes in a real training loop, without the monitor, the sender and the server."""

import math

from rankscope.agent.model.tracked import Tracked
from rankscope.agent.probes import PROBES, Context, StepFacts
from rankscope.agent.probes.loss.training import Loss
from rankscope.agent.schedule import Schedule
from rankscope.agent.steps import hooks
from rankscope.agent.steps.count import StepCount


class Harness:
    """Drives probes with the framework's own hooks and keeps what they say.

    Args:
        sampled: says of a step whether all tiers are due; as a `Schedule` has it if not given.

    Attributes:
        steps: facts of each step that has ended.
        start: facts of the moment of attach.
        announced: table name -> table.
        notes: what a person should read.
        events: (step, kind, text, data).
    """

    def __init__(
        self, model, optimizer, *, probes=PROBES, overhead=1.0, dense_steps=8, sampled=None
    ):
        schedule = Schedule(overhead=overhead, dense_steps=dense_steps)
        if sampled is not None:
            schedule.plan = lambda step: (True, *(sampled(step),) * 4)
        self.tracked = Tracked(model, optimizer)
        self.announced = {}
        self.notes = []
        self.events = []
        context = Context(
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            parameters=self.tracked.group,
            guarded=lambda name, call: call,
            announce=lambda group: self.announced.update({group.table: group.described()}),
            note=self.notes.append,
            count=StepCount(0),
            event=lambda *reported: self.events.append(reported),
        )
        self.context = context
        self.probes = [probe(context) for probe in probes]
        self.loss = next((p for p in self.probes if isinstance(p, Loss)), None)
        self.optimizer = optimizer
        self.steps = []
        self.facts = StepFacts(0)
        self.start = StepFacts(0)
        self.evaluations = []
        for probe in self.probes:
            probe.start(self.start)
        for probe in self.probes:
            probe.prepare(self.facts)
        self.handle = model.register_forward_pre_hook(hooks.RootHook(self), with_kwargs=True)
        self.watching = hooks.Watching(self)

    def root_forward(self, module, args, kwargs):
        for probe in self.probes:
            probe.forward(module, args, kwargs)

    def step_begins(self, optimizer):
        if optimizer is self.optimizer:
            for probe in self.probes:
                probe.before_step(self.facts)

    def step_ended(self, optimizer):
        if optimizer is not self.optimizer:
            return
        for probe in self.probes:
            probe.after_step(self.facts)
        facts = self.facts
        self.steps.append(facts)
        values = {n: float(v) for n, v in facts.scalars.items()}
        if bad := [n for n, v in values.items() if not math.isfinite(v)]:
            for probe in self.probes:
                probe.not_finite(facts.step, bad)
        self.facts = StepFacts(facts.step + 1)
        self.context.count.ended()
        self.context.enter()
        for probe in self.probes:
            probe.prepare(self.facts)

    def step_unseen(self):
        """A step that is compiled into one graph, which probes cannot see."""

    def value(self, name, step=-1):
        return float(self.steps[step].scalars[name])

    def close(self):
        self.watching.end()
        self.handle.remove()
        for probe in self.probes:
            probe.close()
