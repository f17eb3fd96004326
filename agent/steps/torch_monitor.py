"""The monitor of a torch trainer: drives the probes through each step, hands their facts over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, TypeVar

import torch

from rankscope.agent.delivery.session import Session
from rankscope.agent.guard import Moments, contained
from rankscope.agent.model.parts import part_of
from rankscope.agent.model.tracked import Role, Tracked, is_inside
from rankscope.agent.monitor import Monitor
from rankscope.agent.probes import PROBES, Context, Probe, StepFacts, loss_sources
from rankscope.agent.probes.loss import Loss
from rankscope.agent.probes.parameters import Parameters
from rankscope.agent.probes.timing import Timing
from rankscope.agent.probes.watched import WatchedModules
from rankscope.agent.steps import hooks
from rankscope.agent.steps.autograd import graph_task, nodes_made
from rankscope.agent.steps.dynamo import frames_traced, leave_alone, outside_graph
from rankscope.agent.steps.named_pass import named_pass
from rankscope.agent.steps.publish import HandOver
from rankscope.agent.steps.readout import Readout
from rankscope.agent.steps.repeated_ends import RepeatedEnds
from rankscope.agent.steps.spent import Spent
from rankscope.agent.steps.turns import Turns
from rankscope.agent.wire import Event

# What cannot be measured without costing more, in seconds: the optimizer's hooks at every step,
# and the root hook and the loss probe inside the trainer's calls where a step is looked at; with
# what the caches hold after a training step, not after another call of the same.
_UNSEEN = 8e-6
_UNSEEN_BASIC = 200e-6

# Of so many steps it is known what the user has logged: of the one in progress, or the one before.
_STEPS_LOGGED = 4
# Names of frozen parameters that are told.
_MOST_NAMES = 500

Kind = TypeVar("Kind", bound=Probe)

_TURNS = "another optimizer steps in turns with this one, on backward passes of its own"


class TorchMonitor(Monitor):
    """What `attach` returns: records by itself."""

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, *, connection: Session, step: int
    ) -> None:
        super().__init__(connection, step=step)
        self._readout = Readout()
        handed = self._records, self._readout, self._bookkeeping, self._watch_values
        self._hand_over = HandOver(*handed)
        self._model = model
        self._optimizer = optimizer
        self._forward_begun = False
        self._evaluation_mode_seen = False  # a pass in evaluation mode, with gradients
        self._bare_passes = 0  # forward passes of the step in progress without gradients
        # Step -> names that the user has logged, of the last few steps.
        self._by_user: dict[int, frozenset[str]] = {}
        self._facts = StepFacts(step)
        self._count.nodes = nodes_made()
        self._traced = frames_traced()
        self._stepping: Any = None  # the outermost optimizer that steps now
        self._told: Any = optimizer  # the last one that was told to begin a step of the run
        self._replaced: weakref.WeakSet[Any] = weakref.WeakSet()
        # Those that were seen to step inside another's step.
        self._inner: weakref.WeakSet[Any] = weakref.WeakSet()
        self._repeated = RepeatedEnds()
        self._turns = Turns()
        # Those that were seen to begin a step of the run, and whether another one has ended one
        # since: whether it does so inside another's step, and calls closures, is not known yet.
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_another = True
        self._ended: tuple[int, float] | None = None  # the last step that was looked at, and when
        self._unseen_told = False
        self._root_hook: hooks.SwitchedHook | None = None

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
            late=self._hand_over.scalars,
        )
        self._announce(self._tracked.group)
        self._roles: weakref.WeakKeyDictionary[Any, Role] = weakref.WeakKeyDictionary()
        self._probes = self._made()
        self._loss = self._found(Loss)
        self._watched_modules = self._found(WatchedModules)
        self._timing = self._found(Timing)
        self._parameters = self._found(Parameters)
        self._evaluated: Callable[[bool], Mapping[str, Any] | None] = lambda goes_on: None
        if self._loss is not None:
            self._evaluated = self._guarded(Loss.name, self._loss.evaluation)
        self._forward = self._moments(self._probes, "forward")
        self._prepare = self._moments(self._probes, "prepare")
        self._hand_over.not_finite = self._moments(self._probes, "not_finite")
        self._before = self._moments(self._probes, "before_step")
        self._after = self._moments(self._probes, "after_step")
        every_step = tuple(p for p in self._probes if not p.sampled)
        self._forward_plain = self._moments(every_step, "forward")
        self._before_plain = self._moments(every_step, "before_step")
        self._after_plain = self._moments(every_step, "after_step")
        passing = tuple(p for p in every_step if not p.in_pairs)
        self._after_passing = self._moments(passing, "after_step")
        self._watched = True  # whether anything is due at the step in progress
        self._sampled = True  # whether the sampled probes are asked at the step in progress
        # Whether the step in progress is looked at in passing: losses and rates are due, nothing
        # else is at this step nor anything at those beside it. Most looks are such where steps are
        # short, and they are to be felt as little as may be: the optimizer does not tell that it
        # begins to step, and what can wait is done at the end of the step after.
        self._passing = False
        # The last such look, when it ended, and the seconds spent on it.
        self._unsettled: tuple[StepFacts, float, float] | None = None
        self._hooked = True  # whether the root hook is on
        self._moments(self._probes, "start")(self._facts)
        with self._bookkeeping:
            self._hand_over.everything(self._facts)
        self._facts = StepFacts(step)
        self._prepare(self._facts)
        self._hook()
        self._watching = hooks.Watching(self)
        self._begin()

    @property
    def phase(self) -> str:
        """What the training thread is doing: `forward`, `backward`, `collective`, `data`, ..."""
        phase = super().phase
        evaluates = phase == "forward" and not self._context.trains(self._model)
        return "evaluation" if evaluates else phase

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
        if not self._watched:
            return
        with_gradients = torch.is_grad_enabled()
        if graph_task() != -1:
            # Activation checkpointing runs the model again. Of the older kind this is the first
            # pass with gradients; else all of it has been seen.
            if not self._bare_passes:
                return
            self._bare_passes -= 1
        elif not with_gradients and self._context.trains(module):
            self._bare_passes += 1
        if with_gradients and not self._forward_begun:
            if module.training or self._context.in_evaluation_mode:
                self._forward_begun = True
                if self._evaluates() or not self._passing:
                    self._training_goes_on()
            else:
                self._evaluation_mode_seen = True
        if self._sampled:
            self._forward(module, args, kwargs)
        else:
            self._forward_plain(module, args, kwargs)

    @contained
    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the process (perhaps the one inside a wrapper) is about to step."""
        if not self._watched or self._passing:
            return  # told because another monitor wants to be
        outermost = self._stepping
        # A step that raised was never told to have ended: when its optimizer steps again, that
        # one is over.
        if outermost is not None and outermost is not optimizer:
            self._inner.add(optimizer)
            return
        if optimizer is not self._optimizer and self._role(optimizer) is not Role.OWN:
            return
        if self._is_another or optimizer is not self._told:
            self._begun.add(optimizer)
            self._is_another = False
            with self._bookkeeping:
                self._told_by(optimizer)
        self._stepping = optimizer
        if self._sampled:
            self._spent.begin()
            with self._bookkeeping:
                self._look_for_parameters()
            self._before(self._facts)
            self._spent.end()
        else:
            self._before_plain(self._facts)

    @contained
    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""
        count = self._count
        watched = self._watched
        if watched and not self._passing:
            if optimizer is not self._stepping:
                if self._stepping is None and optimizer is self._told:
                    self._repeated.seen(optimizer)
                else:
                    self._other_stepped(optimizer)
                return
            self._stepping = None
            count.optimizer = self._repeated.ended(optimizer)
        elif optimizer is not count.optimizer and not self._counts(optimizer):
            return
        if watched:
            # The steps must be counted on, or this rank's would no longer be those of the others.
            self._end_watched_step(optimizer)
        count.step = step = count.step + 1
        count.nodes = nodes = nodes_made()
        if self._turns.met >= 0 and self._turns.own(step, nodes):
            self._context.event(step - 1, "optimizers.turns", _TURNS, {})
        self._traced = frames_traced()
        if step >= count.until:
            self._look_ahead(step)

    @contained
    def step_unseen(self) -> None:
        """An optimizer's step is compiled into a graph from which nothing is called."""
        if not self._unseen_told:
            self._unseen_told = True
            self._note(
                "an optimizer's step is compiled into one graph (fullgraph=True), where nobody can "
                "look on: such steps are not seen and not counted"
            )

    # ------------------------------------------------------------------------------------- inside

    def _step_of_log(self) -> int:
        # A graph that has grown since the last step ended: the next one is in progress.
        # Tracing makes graphs, too: where it is what comes after a compiled step, none is.
        count = self._count
        begun = self._forward_begun or (
            nodes_made() != count.nodes and frames_traced() == self._traced
        )
        return count.step if begun else max(count.step - 1, 0)

    def _made(self) -> tuple[Probe, ...]:
        made: list[Probe] = []
        for probe in PROBES:
            with self._guard.probe(probe.name):
                made.append(probe(self._context))
        return tuple(made)

    def _found(self, kind: type[Kind]) -> Kind | None:
        """The probe of a kind; None where it could not be made."""
        return next((p for p in self._probes if isinstance(p, kind)), None)

    def _role(self, optimizer: torch.optim.Optimizer) -> Role:
        role = self._roles.get(optimizer)
        if role is None:
            role = self._roles[optimizer] = self._tracked.role_of(optimizer)
        return role

    def _other_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._role(optimizer) is not Role.OWN:
            self._turns.other(nodes_made(), self._count.nodes)
        # Inside the step of a wrapper, or none of ours; if it moves parameters that are watched,
        # what changed is no work of ours to judge.
        if self._stepping is None and self._role(optimizer) is Role.OTHER:
            if self._parameters is not None:
                self._parameters.disturbed()

    def _told_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Another optimizer than at the step before: whose settings and state are the step's."""
        self._told = optimizer
        owner = self._optimizer
        if optimizer is not owner and not is_inside(optimizer, owner):
            owner = optimizer
            if optimizer not in self._replaced:
                self._replaced.add(optimizer)
                self._note(
                    f"another optimizer steps in place of the one that was attached: a "
                    f"{type(optimizer).__name__}; its settings and state are told from now on"
                )
        self._context.optimizer = owner

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Where beginnings of steps are not told: whether this end of one is another's than usual.

        What steps inside another's step was seen to do so when that was looked at.
        """
        if self._is_not_counted(optimizer):
            self._other_stepped(optimizer)
            return False
        if self._repeated.is_one(optimizer):
            return False
        if optimizer not in self._begun:
            self._is_another = True
        self._count.optimizer = self._repeated.ended(optimizer)
        return True

    def _is_not_counted(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._inner or (
            optimizer is not self._optimizer and self._role(optimizer) is not Role.OWN
        )

    def _moments(self, probes: Iterable[Probe], moment: str) -> Moments:
        overridden = [p for p in probes if getattr(type(p), moment) is not getattr(Probe, moment)]
        return Moments([(getattr(p, moment), self._guard.probe(p.name)) for p in overridden])

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
        self._publish(self._evaluated(goes_on))

    def _publish(self, means: Mapping[str, Any] | None) -> None:
        step = max(self._count.step - 1, 0)
        if means:
            means = dict(means)
            self._leave_to_user(step, means)
            if self._timing is not None:
                self._timing.interrupted()
            self._hand_over.scalars(step, means)

    def _look_for_parameters(self) -> None:
        # At sampled steps: ranks that sample at different intervals have all looked where they
        # share a step.
        if self._tracked.changed():
            frozen = self._tracked.frozen
            self._note(self._tracked.renew())
            if self._tracked.frozen != frozen:
                self._tell_frozen(self._tracked.frozen)
            self._context.parameters = self._tracked.group
            self._announce(self._tracked.group)
            self._spent.of(self._tracked.group.tensors)
            self._roles.clear()

    def _tell_frozen(self, names: tuple[str, ...]) -> None:
        text = f"{len(names)} of the parameters that the optimizer holds are trained no longer"
        data = {"names": list(names[:_MOST_NAMES]), "count": len(names)}
        self._event(self._count.step, "parameters.frozen", text, data)

    @contained
    def _end_watched_step(self, optimizer: torch.optim.Optimizer) -> None:
        began = self._spent.begin(exact=self._sampled)
        if optimizer is not self._told:
            self._told_by(optimizer)
        facts, context = self._facts, self._context
        if facts.step != self._count.step:
            return  # what is due was not found out, because something failed
        if self._unsettled is not None:
            self._settle()
        if not self._forward_begun:
            # The root module's forward was not seen (another module is called, or a compiled one).
            if self._evaluates() or not self._passing:
                self._training_goes_on()
            # Or it is trained in evaluation mode.
            context.in_evaluation_mode = self._evaluation_mode_seen
        elif context.in_evaluation_mode:
            context.in_evaluation_mode = not self._model.training
        self._forward_begun = self._evaluation_mode_seen = False
        self._bare_passes = 0
        self._thread = get_ident()  # it may be another one than that of `attach`
        if self._sampled:
            self._after(facts)
            self._sampled_steps += context.full
        elif self._passing:
            self._after_passing(facts)
        else:
            self._after_plain(facts)
        if self._by_user:
            self._leave_to_user(facts.step, facts.scalars)
        if self._sampled:
            self._hand_over.everything(facts)
        else:
            self._hand_over.scalars_alone(facts)
        self._spent.end()
        spent, context.aside = self._spent.total(facts.tiers, context.aside), 0.0
        if self._passing:
            self._unsettled = facts, began, spent
        else:
            self._account(facts, began, spent)
            self._report_sampling(facts.step)

    def _settle(self) -> None:
        """Does what has waited since the last look in passing."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:
            facts, began, spent = unsettled
            self._account(facts, began, spent, passing=True)
            self._report_sampling(self._count.step - 1)
            self._complete(facts.step)

    def _look_ahead(self, step: int) -> None:
        """Finds out what is due at the step that begins, and where something is due again."""
        if self._unsettled is not None and not self._watched:
            self._settle()
        context = self._context
        again = context.word  # what was sampled now is looked at once more, one step later
        before = context.basic, context.targets
        context.enter(step)
        self._sampled = again or context.signals or context.state
        watched = self._sampled or context.basic
        next_due = self._schedule.next_due(step)
        passing = False
        if watched:
            self._facts = StepFacts(step)
            # What was sampled is looked at once more.
            context.alone = not (self._watched or context.word or next_due == step + 1)
            # Which passes are a closure's is told by when the step began.
            passing = context.alone and not (
                self._sampled or self._is_another or self._loss is None or self._loss.in_closures
            )
        if self._sampled:
            self._spent.begin()
            self._prepare(self._facts)
            self._spent.end()
        if before != (context.basic, context.targets):
            loss_sources.wishes_changed()
        self._watched, self._passing, self._stepping = watched, passing, None
        self._listen(root=watched, beginnings=watched and not passing)
        # Until then no tier is due, and nothing has to be asked.
        self._count.until = next_due if not watched and self._unsettled is None else step + 1

    def _listen(self, *, root: bool, beginnings: bool) -> None:
        """Where steps are too short to look at all of them: takes hooks off in between."""
        watching = self._watching
        if beginnings is not (watching.count is None):
            watching.only_count(None if beginnings else self._count)
        if root is self._hooked:
            return
        self._hooked = root
        hook = self._root_hook
        if root:
            if hook is None or not hook.is_on:
                self._hook()
        elif hook is not None and hook.is_on and not frames_traced():
            # A compiled model would be compiled anew without it: there it stays, and does nothing.
            hook.take_off()

    def _hook(self) -> None:
        model, hook = self._model, self._root_hook
        # Some people take all hooks off a module by giving it an empty table of them.
        if hook is not None and hook.belongs_to(
            model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs
        ):
            hook.put_on()
        elif not isinstance(model, torch.jit.ScriptModule):  # which takes no hooks
            self._root_hook = hooks.SwitchedHook(
                model.register_forward_pre_hook(hooks.RootHook(self), with_kwargs=True)
            )

    def _scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._hand_over.scalars(step, scalars)

    def _logged(self, step: int, scalars: Mapping[str, Any]) -> None:
        known = self._by_user
        known[step] = known.get(step, frozenset()).union(scalars)
        if len(known) > _STEPS_LOGGED:
            del known[next(iter(known))]

    def _leave_to_user(self, step: int, scalars: dict[str, Any]) -> None:
        """Takes out what the user has logged for a step before it was known here."""
        for name in self._by_user.get(step, ()):
            scalars.pop(name, None)

    def _account(
        self, facts: StepFacts, began: float, spent: float, *, passing: bool = False
    ) -> None:
        tiers, context = facts.tiers, self._context
        ended = self._ended
        if (
            ended is not None
            and not tiers
            and (passing or context.basic)
            and not self._schedule.wants(facts.step, began - ended[1])
        ):
            return
        # By a clock of its own: evaluations are in it, now and then, and medians are taken.
        self._ended = facts.step, began
        if ended is not None:
            tiers["basic"] = _UNSEEN_BASIC + max(spent - sum(tiers.values()), 0.0)
            self._schedule.note(
                facts.step,
                step_seconds=(began - ended[1]) / (facts.step - ended[0]),
                since=began - ended[1],
                base=_UNSEEN,
                tiers=tiers,
                # After a look in passing the context is that of the step after.
                again=[tier for tier in tiers if not (passing or getattr(context, tier))],
            )

    def _event(self, step: int, kind: str, text: str, data: dict[str, Any]) -> None:
        self._records.event(Event(step=step, kind=kind, text=text, data=data))

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        made = leave_alone(self._guard.probe(name)(call))
        # As the hook of a tensor: torch warns whoever pickles the tensor that it is left out.
        made.__torch_unserializable__ = True  # type: ignore[attr-defined]
        return made

    def _end(self, state: str) -> None:
        self._watched = self._sampled = self._passing = False
        with self._bookkeeping:
            self._watching.end()
        with self._bookkeeping:
            if self._root_hook is not None:
                self._root_hook.remove()
        with self._bookkeeping:
            self._end_evaluation(goes_on=False)
        with self._bookkeeping:
            self._moments(self._probes, "close")()
        with self._bookkeeping:
            if state == "finished":
                # A failing process may be stuck on its device: what is still there is given up.
                self._readout.finish()
            self._readout.poll()


# Called in the middle of a compiled train step, say.
for _method in (Monitor.log, Monitor.mark, Monitor.close, Monitor._leave):
    outside_graph(_method)
