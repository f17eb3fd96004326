"""The monitor of one rank: drives the probes through each step and hands their facts over."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from rankscope.agent import hooks, last_words
from rankscope.agent.guard import Guard, Moments, contained
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from rankscope.agent.probes import PROBES, Context, Probe, StepFacts
from rankscope.agent.probes.loss import Loss
from rankscope.agent.probes.parameters import Parameters
from rankscope.agent.probes.timing import Timing
from rankscope.agent.readout import Readout
from rankscope.agent.records import Records
from rankscope.agent.schedule import Schedule
from rankscope.agent.sender import Sender
from rankscope.agent.tensors import TensorGroup
from rankscope.agent.tracked import Role, Tracked
from rankscope.agent.whereabouts import phase_of
from rankscope.agent.wire import Event

# Steps between two posts of what the agent measures of itself.
_REPORT_INTERVAL = 32
# What cannot be measured without costing more, in seconds: the optimizer's hooks at every step,
# and the root hook and the loss probe inside the trainer's calls where a step is looked at.
_UNSEEN = 5e-6
_UNSEEN_BASIC = 20e-6
# Types of scalars that need no reading.
_PLAIN = frozenset((float, int, bool))

# Number of graph nodes that this thread has made.
_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Monitor:
    """What `attach` returns: records by itself, takes further scalars, and can be closed.

    Attributes:
        run: id of the run, the same on every rank.
        rank: rank of this process.
        url: address of the run's page.
        closed: nothing is recorded any more.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        options: Options,
        identity: Identity,
        records: Records,
        sender: Sender,
        announce: Callable[[TensorGroup], None],
        step: int,
    ) -> None:
        self.run = identity.run
        self.rank = identity.rank
        self.url = f"{options.server}/runs/{identity.run}"
        self._records = records
        self._sender = sender
        self._announce = announce
        self._readout = Readout()
        self._guard = Guard(self._report)
        self._schedule = Schedule(overhead=options.overhead, first_step=step)
        self._model = model
        self._optimizer = optimizer
        self._step = step  # the step in progress
        self._forward_begun = False
        self._facts = StepFacts(step)
        self._sequence = _sequence_number()
        self._reported = step
        self._stepping: Any = None  # the outermost optimizer that steps now
        self._spent = 0.0
        self._thread = threading.get_ident()
        self.closed = False
        self.on_close: Callable[[], None] = lambda: None

        self._tracked = Tracked(model, optimizer)
        self._context = Context(
            model=model,
            optimizer=optimizer,
            schedule=self._schedule,
            parameters=self._tracked.group,
            guarded=self._guarded,
            announce=announce,
            note=self._note,
            step=step,
        )
        self._announce(self._tracked.group)
        self._roles: weakref.WeakKeyDictionary[Any, Role] = weakref.WeakKeyDictionary()
        # A value that cannot be recorded is no reason to stop recording the others.
        self._bookkeeping = self._guard.probe("records", tolerance=1000)
        self._probes = tuple(probe(self._context) for probe in PROBES)
        self._loss = next(p for p in self._probes if isinstance(p, Loss))
        self._timing = next(p for p in self._probes if isinstance(p, Timing))
        self._parameters = next(p for p in self._probes if isinstance(p, Parameters))
        self._forward = self._moments(self._probes, "forward")
        self._before = self._moments(self._probes, "before_step")
        self._after = self._moments(self._probes, "after_step")
        every_step = tuple(p for p in self._probes if not p.sampled)
        self._after_plain = self._moments(every_step, "after_step")
        self._next_look = step  # the first step at which something may be due
        self._watched = True  # whether anything is due at the step in progress
        self._sampled = True  # whether the sampled probes are asked at the step in progress
        self._moments(self._probes, "start")(self._facts)
        self._hand_over(self._facts)
        self._facts = StepFacts(step)
        self._root_handle = model.register_forward_pre_hook(hooks.RootHook(self), with_kwargs=True)
        hooks.watch_steps(self)
        sender.start()
        last_words.add(self._speak)

    # ------------------------------------------------------------------------- what the user calls

    def log(self, **scalars: float | torch.Tensor) -> None:
        """Records further scalars.

        They belong to the step in progress; after `optimizer.step()` and before the next forward
        pass, to the step just done. What is logged under the name of an automatic metric replaces
        it.

        Args:
            **scalars: numbers, or tensors of one element, which are read without waiting for the
                device.
        """
        with self._bookkeeping:
            # A graph has grown since the last step ended: the next one is in progress.
            begun = self._forward_begun or _sequence_number() != self._sequence
            step = self._step if begun else max(self._step - 1, 0)
            # What needs no reading is sorted out where it is sent.
            if _PLAIN.issuperset(map(type, scalars.values())):
                self._records.scalars(step, scalars)
            else:
                self._scalars(step, scalars)

    @property
    def phase(self) -> str:
        """What the training thread is doing: `forward`, `backward`, `collective`, `data`, ..."""
        phase = phase_of(self._thread)
        return "evaluation" if phase == "forward" and not self._model.training else phase

    def close(self) -> None:
        """Ends the monitor: sends what is left (within 5 s) and takes every hook back."""
        last_words.remove(self._speak)
        self._speak("finished", "")

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            last_words.remove(self._speak)
            self._speak("failed", f"{type(error).__name__}: {error}"[:2000])

    # ---------------------------------------------------------------------- what the hooks call

    @contained
    def root_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The model is called, for training or for evaluation, at a step that is looked at."""
        if module.training and not self._forward_begun and torch.is_grad_enabled():
            self._forward_begun = True
            self._training_goes_on()
        self._forward(module, args, kwargs)

    @contained
    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the process (perhaps the one inside a wrapper) is about to step."""
        outermost = self._stepping
        # A step that raised was never told to have ended: when its optimizer steps again, that
        # one is over.
        if outermost is not None and outermost is not optimizer:
            return
        if optimizer is not self._optimizer and self._role(optimizer) is not Role.OWN:
            return
        self._stepping = optimizer
        if self._sampled:
            began = time.perf_counter()
            self._look_for_parameters()
            self._before(self._facts)
            self._spent += time.perf_counter() - began

    @contained
    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""
        if optimizer is not self._stepping:
            # Inside the step of a wrapper, or none of ours; if it moves parameters that are
            # watched, what changed is no work of ours to judge.
            if self._stepping is None and self._role(optimizer) is Role.OTHER:
                self._parameters.disturbed()
            return
        self._stepping = None
        if self._watched:
            self._end_watched_step()
        self._step = step = self._step + 1
        self._sequence = _sequence_number()
        if step < self._next_look:
            self._context.step = step
        else:
            self._look_ahead(step)

    # ------------------------------------------------------------------------------------- inside

    def _role(self, optimizer: torch.optim.Optimizer) -> Role:
        role = self._roles.get(optimizer)
        if role is None:
            role = self._roles[optimizer] = self._tracked.role_of(optimizer)
        return role

    def _moments(self, probes: Iterable[Probe], moment: str) -> Moments:
        overridden = [p for p in probes if getattr(type(p), moment) is not getattr(Probe, moment)]
        return Moments([(getattr(p, moment), self._guard.probe(p.name)) for p in overridden])

    def _training_goes_on(self) -> None:
        self._end_evaluation()
        # Nothing can be added to the step before any more.
        done = self._step - 1
        if self._readout.waiting:
            self._readout.after_all(lambda: self._records.complete(done))
        else:
            self._records.complete(done)

    def _end_evaluation(self) -> None:
        means = self._loss.evaluation()
        if means:
            self._timing.interrupted()
            self._scalars(max(self._step - 1, 0), means)

    def _look_for_parameters(self) -> None:
        # At sampled steps: ranks that sample at different intervals have all looked where they
        # share a step.
        if self._tracked.changed():
            self._note(self._tracked.renew())
            self._context.parameters = self._tracked.group
            self._announce(self._tracked.group)
            self._roles.clear()

    def _end_watched_step(self) -> None:
        began = time.perf_counter()
        facts = self._facts
        if not self._forward_begun:
            # The root module's forward was not seen (another module is called, or a compiled one).
            self._training_goes_on()
        self._forward_begun = False
        if self._sampled:
            self._after(facts)
            self._hand_over(facts)
        else:
            self._after_plain(facts)
            # Nothing but scalars was put into the facts.
            if _PLAIN.issuperset(map(type, facts.scalars.values())):
                self._records.scalars(facts.step, facts.scalars)
            else:
                self._scalars(facts.step, facts.scalars)
        self._account(facts, began)

    def _look_ahead(self, step: int) -> None:
        """Finds out what is due at the step that begins, and where something is due again."""
        context = self._context
        again = context.word  # what was sampled now is looked at once more, one step later
        context.enter(step)
        self._sampled = again or context.signals or context.state
        watched = self._sampled or context.basic
        if watched:
            self._facts = StepFacts(step)
        if watched is not self._watched:
            self._watch(watched)
        # Until then no tier is due, and nothing has to be asked.
        self._next_look = step + 1 if watched else self._schedule.next_due(step)

    def _watch(self, watched: bool) -> None:
        """Where steps are too short to look at all of them: takes the root hook off in between."""
        self._watched = watched
        if watched:
            self._root_handle = self._model.register_forward_pre_hook(
                hooks.RootHook(self), with_kwargs=True
            )
        else:
            self._root_handle.remove()

    def _hand_over(self, facts: StepFacts) -> None:
        readout, scalars = self._readout, facts.scalars
        if readout.waiting:
            readout.poll()
        self._scalars(facts.step, scalars)
        self._hand_over_prints(facts)
        for pending, deliver in facts.later:
            readout.when_ready(pending, deliver)
        if facts.later:
            # What is delivered late is in the facts by then.
            facts.words, facts.prints, facts.layers = {}, [], []
            readout.when_ready(facts.later[-1][0], lambda: self._hand_over_prints(facts))

    def _hand_over_prints(self, facts: StepFacts) -> None:
        for stage, word in facts.words.items():
            self._records.word(facts.step, stage, word)
        for fingerprint in facts.prints:
            self._records.fingerprint(fingerprint)
        for layers in facts.layers:
            self._records.layers(layers)

    def _scalars(self, step: int, scalars: Mapping[str, float | torch.Tensor]) -> None:
        plain: dict[str, float] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, value in scalars.items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            else:
                plain[name] = float(value)
        if tensors:
            names = tuple(tensors)
            self._readout.push(
                tuple(tensors.values()),
                lambda values: self._records.scalars(step, dict(zip(names, values, strict=True))),
            )
        if plain:
            self._records.scalars(step, plain)

    def _account(self, facts: StepFacts, began: float) -> None:
        tiers, scalars = facts.tiers, facts.scalars
        spent, self._spent = self._spent + time.perf_counter() - began, 0.0
        if "step_seconds" in scalars:
            tiers["basic"] = _UNSEEN_BASIC + max(spent - sum(tiers.values()), 0.0)
            self._schedule.note(
                facts.step,
                step_seconds=float(scalars["step_seconds"]),
                base=_UNSEEN,
                tiers=tiers,
            )
        until = self._sender.dense_until
        if until is not None and until >= facts.step:
            self._schedule.ask_dense(until)
        if facts.step - self._reported >= _REPORT_INTERVAL:
            self._reported = facts.step
            exponents = self._schedule.exponents
            self._records.scalars(
                facts.step,
                {
                    "rankscope/overhead": self._schedule.share(),
                    **{f"rankscope/interval/{t}": float(1 << k) for t, k in exponents.items()},
                },
            )

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return self._guard.probe(name)(call)

    def _report(self, probe: str, text: str) -> None:
        self._records.event(Event(step=self._step, kind="agent.fault", text=f"{probe}: {text}"))

    def _note(self, text: str) -> None:
        self._records.event(Event(step=self._step, kind="agent.note", text=text))

    def _speak(self, state: str, error: str) -> None:
        if self.closed:
            return
        self.closed = True
        self._watched = self._sampled = False
        hooks.unwatch_steps(self)
        self._root_handle.remove()
        self._moments(self._probes, "close")()
        with self._bookkeeping:
            self._end_evaluation()
            if state == "finished":
                # A failing process may be stuck on its device: what is still there is given up.
                self._readout.finish()
            self._readout.poll()
            self._records.complete(self._step - 1)
        self._sender.close(state=state, error=error)
        self.on_close()


class NullMonitor:
    """The monitor of `mode="disabled"`: takes everything, does nothing."""

    def __init__(self, run: str, rank: int) -> None:
        self.run = run
        self.rank = rank
        self.url = ""
        self.closed = False

    def log(self, **scalars: float | torch.Tensor) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing more than to be closed."""
        self.closed = True

    def __enter__(self) -> NullMonitor:
        return self

    def __exit__(self, *error: Any) -> None:
        return None
