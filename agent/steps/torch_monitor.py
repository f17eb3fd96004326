"""The monitor of a torch trainer: drives the probes through each step, hands their facts over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any

import torch

from rankscope.agent.delivery.session import Session
from rankscope.agent.guard import contained
from rankscope.agent.model.parts import part_of
from rankscope.agent.model.tracked import Tracked
from rankscope.agent.monitor import NOTHING, Monitor
from rankscope.agent.probes import Context, StepFacts
from rankscope.agent.probes.loss import sources as loss_sources
from rankscope.agent.probes.loss.training import Loss
from rankscope.agent.probes.machine.timing import Timing
from rankscope.agent.probes.parameters.frozen import FrozenParameters
from rankscope.agent.probes.parameters.trained import Parameters
from rankscope.agent.probes.parameters.watched import WatchedModules
from rankscope.agent.process.gpu_health import GpuHealth
from rankscope.agent.steps import hooks, uneven_inputs
from rankscope.agent.steps.autograd import made_of_earlier, nodes_made
from rankscope.agent.steps.cost_by_tier import Account
from rankscope.agent.steps.dynamo import (
    frames_traced,
    leave_agent_alone,
    leave_alone,
    outside_graph,
)
from rankscope.agent.steps.forward_hook import ForwardHook
from rankscope.agent.steps.logged import LoggedNames
from rankscope.agent.steps.mode import COUNTED, LIGHTWEIGHT, SAMPLED, StepMachine
from rankscope.agent.steps.named_pass import named_pass
from rankscope.agent.steps.own_time import Spent
from rankscope.agent.steps.passes import Passes
from rankscope.agent.steps.probe_calls import ProbeCalls
from rankscope.agent.steps.publish import Publisher
from rankscope.agent.steps.readout import Readout
from rankscope.agent.steps.run_optimizers import RunOptimizers
from rankscope.agent.wire import Event

# Names of frozen parameters that are reported.
_MOST_NAMES = 500

_TURNS = "another optimizer steps in turns with this one, on backward passes of its own"


class TorchMonitor(Monitor):
    """What `attach` returns: records by itself.

    What happens at a step is in three hands: the hooks say what the trainer does, `RunOptimizers`
    which of it are steps of the run, `StepMachine` how closely each is followed.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, *, connection: Session, step: int
    ) -> None:
        super().__init__(connection, step=step)
        self._readout = Readout()
        arguments = self._records, self._readout, self._bookkeeping, self._watch_values
        self._publisher = Publisher(*arguments)
        self._by_user = LoggedNames()
        self._publisher.leave_to_user = self._by_user.take_out
        self._model = model
        self._traced = frames_traced()
        self._unseen_reported = False
        self._unseen_at = -1  # the step in progress when one was found that nobody will see

        self._gpu, self._gpu_probe = GpuHealth(), self._guard.probe("gpu health")
        self._tracked = Tracked(model, optimizer)
        self._spent = Spent(self._tracked.group.tensors)
        self._context = Context(
            model=model,
            optimizer=optimizer,
            schedule=self._schedule,
            parameters=self._tracked.group,
            guarded=self._guarded,
            announce=self._announce,
            note=self._note,
            count=self._count,
            event=self._event,
            late=self._publisher.scalars,
            under_way=self._readout.waiting,
        )
        self._announce(self._tracked.group)
        self._machine = StepMachine(self._context)
        self._passes = Passes(self._context)
        self._account = Account(self._context)
        self._optimizers = RunOptimizers(
            optimizer,
            self._tracked,
            self._count,
            changed=self._owner_changed,
            disturbed=self._disturbed,
            in_turn=self._other_stepped,
        )
        self._calls = ProbeCalls(self._guard, self._context, self._guarded)
        self._publisher.not_finite = self._calls.not_finite
        self._loss = self._calls.found(Loss)
        self._watched_modules = self._calls.found(WatchedModules)
        self._frozen = self._calls.found(FrozenParameters)
        self._timing = self._calls.found(Timing)
        self._parameters = self._calls.found(Parameters)
        start = StepFacts(step)
        self._calls.start(start)
        with self._bookkeeping:
            self._publisher.everything(start)
        self._calls.prepare(self._machine.facts)
        self._forward_hook = ForwardHook(model, self, self._guarded)
        self._count.nodes = nodes_made()
        self._watching = hooks.Watching(self)
        uneven_inputs.listen(self)
        leave_agent_alone()
        self._begin()

    @property
    def phase(self) -> str:
        """What the training thread is doing: `forward`, `backward`, `collective`, `data`, ..."""
        phase = super().phase
        self._report_gpu()
        evaluates = phase == "forward" and not self._context.trains(self._model)
        return "evaluation" if evaluates else phase

    def _report_gpu(self) -> None:
        """Records how the GPU is, now and then; called in the sender's thread."""
        tensors = self._context.parameters.tensors
        with self._gpu_probe:
            if found := self._gpu.read(tensors[0].device) if tensors and not self.closed else {}:
                self._records.scalars(self._count.step, found)

    def watches_class_of(self, model: torch.nn.Module) -> bool:
        """Whether the model that is watched is of the same class as another."""
        return not self.closed and type(self._model) is type(model)

    def watch(self, module: torch.nn.Module, name: str) -> None:
        """Also compares another module between the ranks: an average of the weights, a teacher.

        Its parameters and buffers are fingerprinted as often as the optimizer's state.

        Args:
            module: must hold the same on every rank.
            name: for its tensors, which are called `<name>.<tensor>`.
        """
        with self._guard.probe(WatchedModules.name):
            if self._watched_modules is not None:
                self._watched_modules.add(name, module)

    def replicas(self, key: str | None, tensors: str = "*") -> None:
        """Declares which ranks hold replicas, where it cannot be read off the tensors.

        Ranks that give the same key for a tensor must agree on it; ranks that give different keys
        hold different parts and are not compared. To be called right after `attach`, on every
        rank: for example `monitor.replicas(f"stage {pipeline_rank}")`.

        `monitor.replicas(None, "embedding.*")` says that each rank trains a copy of its own of
        these tensors, which are averaged now and then, or never: they are compared with nothing.
        For all else the ranks are replicas, each with batches of its own.

        Args:
            key: the same on all replicas and on no other rank; None for a copy of this rank's own.
            tensors: names of the tensors it holds for, with `*` and `?` as in file names; of
                several that fit, the one declared last counts.
        """
        with self._bookkeeping:
            self._tracked.declare(part_of(key, self.rank), tensors)
            self._context.parameters = self._tracked.group
            self._announce(self._tracked.group)
            if self._frozen is not None:
                self._frozen.declare(self._tracked.parts_of)

    def evaluating(self, name: str) -> AbstractContextManager[None]:
        """Names a pass of an evaluation: its losses are of one data set and one model.

            with monitor.evaluating("val"):
                validate(model, val_loader)

        Their mean, weighted by batch sizes, is `eval/val/loss`, the share of right answers
        `eval/val/accuracy`: at the step just done, once the block is left. What is computed inside
        is an evaluation whatever the model's mode, unless `backward` follows.
        """
        loss = None if self.closed else self._loss
        return named_pass(loss, name, self._guard.probe(Loss.name), self._publish)

    def accumulation(self, *, divided_by: int = 0, summed: bool = False) -> None:
        """Says by what the trainer divides the losses of micro-batches, or that they add up."""
        with self._guard.probe(Loss.name):
            if self._loss is not None:
                self._loss.divided_by = float(divided_by) if divided_by > 1 else 0.0
                self._loss.summed = summed

    # ---------------------------------------------------------------------- what the hooks call

    @contained
    def root_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The model is called, for training or for evaluation."""
        self._forward_hook.calls += 1
        mode = self._machine.mode
        if mode is COUNTED or self._passes.is_repeated(module):
            return
        if self._passes.begin_training(module) and (self._evaluates() or mode is not LIGHTWEIGHT):
            self._training_goes_on()
        if mode is SAMPLED:
            self._calls.forward(module, args, kwargs)
        else:
            self._calls.forward_plain(module, args, kwargs)

    @contained
    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the process (perhaps the one inside a wrapper) is about to step."""
        mode = self._machine.mode
        # Where its beginning is not asked for, another monitor wants to know of it.
        if mode is COUNTED or mode is LIGHTWEIGHT or not self._optimizers.begins(optimizer):
            return
        facts = self._machine.facts
        if mode is SAMPLED:
            self._spent.begin()
            with self._bookkeeping:
                self._find_parameters()
            self._calls.before_step(facts)
            self._spent.end()
        else:
            self._calls.before_plain(facts)

    @contained
    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""
        mode = self._machine.mode
        if mode is COUNTED or mode is LIGHTWEIGHT:
            is_end = self._optimizers.ends_unannounced(optimizer)
        else:
            is_end = self._optimizers.ends(optimizer)
        if not is_end:
            return
        if mode is not COUNTED:
            # The steps must be counted on, or this rank's would no longer be those of the others.
            self._end_step(optimizer)
        nodes = nodes_made()
        step = self._count.ended(nodes)
        if self._optimizers.take_turns(step, nodes):
            self._context.event(step - 1, "optimizers.turns", _TURNS, {})
        self._traced = frames_traced()
        if step >= self._count.until:
            self._next_step()

    @property
    def step_in_progress(self) -> int:
        """Its number."""
        return self._count.step

    def trains_in(self, module: torch.nn.Module) -> bool:
        """Whether the model is the module, holds it or is held by it."""
        model = self._model
        return any(m is model for m in module.modules()) or any(
            m is module for m in model.modules()
        )

    @contained
    def missed(self, steps: int) -> None:
        """The others have taken so many steps since this rank's inputs ended (`Join`)."""
        for _ in range(steps):
            if self._count.ended(nodes_made()) >= self._count.until:
                self._next_step()
        if self._timing is not None:
            self._timing.interrupted()
        text = f"this rank's inputs ended {steps} steps before those of others (Join)"
        self._event(self._count.step, "steps.missed", text, {"steps": steps})

    @contained
    def step_unseen(self) -> None:
        """An optimizer's step is compiled into a graph from which nothing is called."""
        self._report_unseen("compiled into one graph (fullgraph=True)")

    def step_recorded(self) -> None:
        """An optimizer's step is recorded into a CUDA graph, and replayed from there."""
        # Not `contained`, which does nothing during a recording; this asks nothing of the device.
        with self._bookkeeping:
            self._report_unseen("recorded into a CUDA graph")

    # ------------------------------------------------------------------------------------- inside

    def _step_of_log(self, scalars: Mapping[str, Any] = NOTHING) -> int:
        count = self._count
        if self._passes.begun:
            return count.step
        # A graph that has grown since the last step ended: the next one is in progress.
        # Tracing makes graphs, too: where it is what comes after a compiled step, none is.
        made = nodes_made()
        if made != count.nodes and frames_traced() == self._traced:
            # What is logged may have made them itself, out of the loss of the step just done.
            if made_of_earlier(scalars.values(), count.nodes) != made - count.nodes:
                return count.step
            count.nodes = made
        return max(count.step - 1, 0)

    def _report_unseen(self, where: str) -> None:
        self._unseen_at = self._count.step
        if not self._unseen_reported:
            self._unseen_reported = True
            self._note(
                f"an optimizer's step is {where}, where nobody can look on: such steps are not "
                "seen and not counted"
            )

    def _report_stalled(self, phase: str) -> None:
        # Where steps are unseen the one in progress does not end, and nothing stands.
        if self._unseen_at != self._count.step:
            super()._report_stalled(phase)

    def _passes_without_step(self) -> tuple[int, int]:
        # What is compiled into one graph steps unseen.
        return (0, 0) if self._loss is None or self._unseen_reported else self._loss.passes_so_far()

    def _forward_passes(self, *, asked: bool) -> int:
        if asked and not self.closed:
            self._forward_hook.count_from_now()
        return self._forward_hook.calls if self._context.trains(self._model) else self._passes_seen

    def _owner_changed(self, optimizer: Any, first: bool) -> None:
        """The settings and the state of another optimizer are the step's."""
        with self._bookkeeping:
            if first:
                self._note(
                    f"another optimizer steps in place of the one that was attached: a "
                    f"{type(optimizer).__name__}; its settings and state are recorded from now on"
                )
            self._context.optimizer = optimizer

    def _disturbed(self) -> None:
        if self._parameters is not None:
            self._parameters.disturbed()

    def _other_stepped(self, rows: frozenset[int]) -> None:
        if self._machine.mode is SAMPLED and not self.closed:
            self._calls.other_step(self._machine.facts, rows)

    @contained
    def _training_goes_on(self) -> None:
        if self._evaluates():
            self._end_evaluation()
        self._complete(self._count.step - 1)

    def _evaluates(self) -> bool:
        return self._loss is not None and self._loss.phase.seen

    def _complete(self, done: int) -> None:
        """Nothing can be added to the steps up to this one any more."""
        if self._readout.waiting:
            self._readout.after_all(lambda: self._records.complete(done))
        else:
            self._records.complete(done)

    def _end_evaluation(self, *, goes_on: bool = True) -> None:
        self._publish(self._calls.evaluated(goes_on))

    def _publish(self, means: Mapping[str, Any] | None) -> None:
        step = max(self._count.step - 1, 0)
        if means:
            means = dict(means)
            self._by_user.take_out(step, means)
            if self._timing is not None:
                self._timing.interrupted()
            self._publisher.scalars(step, means)

    def _find_parameters(self) -> None:
        # At sampled steps: ranks that sample at different intervals have all read it where they
        # share a step.
        if self._tracked.changed():
            frozen = self._tracked.frozen
            self._note(self._tracked.renew())
            if (names := self._tracked.frozen) != frozen:
                text = f"{len(names)} of the optimizer's parameters are trained no longer"
                data = {"names": list(names[:_MOST_NAMES]), "count": len(names)}
                self._event(self._count.step, "parameters.frozen", text, data)
            self._context.parameters = self._tracked.group
            self._announce(self._tracked.group)
            self._spent.of(self._tracked.group.tensors)
            self._optimizers.parameters_changed()

    @contained
    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step that was followed has ended: takes what the probes have found of it."""
        machine, context = self._machine, self._context
        mode, facts = machine.mode, machine.facts
        began = self._spent.begin(exact=mode is SAMPLED)
        self._optimizers.belongs_to(optimizer)
        if facts.step != self._count.step:
            return  # what is due was not found out, because something failed
        self._settle()
        if not self._passes.begun and (self._evaluates() or mode is not LIGHTWEIGHT):
            self._training_goes_on()
        self._passes.end_step(self._model)
        self._thread = get_ident()  # it may be another one than that of `attach`
        if mode is SAMPLED:
            context.not_applied = self._optimizers.not_applied()
            self._calls.after_step(facts)
            self._sampled_steps += context.full
        elif mode is LIGHTWEIGHT:
            self._calls.after_passing(facts)
        else:
            self._calls.after_plain(facts)
        self._by_user.take_out(facts.step, facts.scalars)
        if mode is SAMPLED:
            self._publisher.everything(facts)
            with self._guard.probe("entry"):
                self._forward_hook.step_ended()
        else:
            self._publisher.scalars_alone(facts)
        self._spent.end()
        spent, context.aside = self._spent.total(facts.tiers, context.aside), 0.0
        if mode is LIGHTWEIGHT:
            self._account.put_off(facts, began, spent)
        else:
            self._account.charge(facts, began, spent)
            self._report_sampling(facts.step)

    def _settle(self) -> None:
        """Does what was put off at the last lightweight sample."""
        if self._account.is_open:
            step = self._account.settle()
            self._report_sampling(self._count.step - 1)
            if step is not None:
                self._complete(step)

    def _next_step(self) -> None:
        """A step begins at which something may be due: prepares what its mode asks for."""
        machine, context, optimizers = self._machine, self._context, self._optimizers
        if machine.mode is COUNTED:
            self._settle()
        before = context.basic, context.targets
        # Which passes are a closure's is seen by when the step began.
        closures = self._loss is None or self._loss.in_closures
        mode = machine.next(with_beginnings=closures or optimizers.has_unknown)
        if mode is SAMPLED:
            self._spent.begin()
            self._calls.prepare(machine.facts)
            self._spent.end()
        if before != (context.basic, context.targets):
            loss_sources.requests_changed()
        optimizers.next_step()
        self._listen(
            root=mode is not COUNTED, beginnings=mode is not COUNTED and mode is not LIGHTWEIGHT
        )
        # Until then no tier is due, and nothing has to be asked.
        step, count = context.step, self._count
        is_idle = mode is COUNTED and not self._account.is_open
        count.until = self._schedule.next_due(step) if is_idle else step + 1

    def _listen(self, *, root: bool, beginnings: bool) -> None:
        """Where steps are too short to sample all of them: takes hooks off in between."""
        watching = self._watching
        if beginnings is not (watching.count is None):
            watching.only_count(None if beginnings else self._count)
        self._forward_hook.want(root)

    def _scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._publisher.scalars(step, scalars)

    def _is_prolonged(self) -> bool:
        return self._machine.mode is SAMPLED

    def _logged(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._by_user.add(step, scalars)

    def _event(self, step: int, kind: str, text: str, data: dict[str, Any]) -> None:
        self._records.event(Event(step=step, kind=kind, text=text, data=data))

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        made = leave_alone(self._guard.probe(name)(call))
        # As the hook of a tensor: torch warns whoever pickles the tensor that it is left out.
        made.__torch_unserializable__ = True  # type: ignore[attr-defined]
        return made

    def _end(self, state: str) -> None:
        self._machine.close()
        with self._bookkeeping:
            self._watching.end()
        with self._bookkeeping:
            uneven_inputs.unlisten(self)
        with self._bookkeeping:
            self._forward_hook.remove()
        with self._bookkeeping:
            self._end_evaluation(goes_on=False)
        with self._bookkeeping:
            self._calls.close()
        with self._bookkeeping:
            if state == "finished":
                # A failing process may be stuck on its device: what is still there is given up.
                self._readout.finish()
            self._readout.poll()


# Called in the middle of a compiled train step, say.
for _method in (Monitor.log, Monitor.mark, Monitor.close, Monitor._leave):
    outside_graph(_method)
