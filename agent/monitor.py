"""The monitor of one rank: drives the probes through each step and hands their facts over."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rankscope.agent import hooks, last_words, model_facts
from rankscope.agent.guard import Guard
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from rankscope.agent.probes import PROBES, Context, Probe, StepFacts
from rankscope.agent.probes.loss import Loss
from rankscope.agent.readout import Readout
from rankscope.agent.records import Records
from rankscope.agent.schedule import Schedule
from rankscope.agent.sender import Sender
from rankscope.agent.wire import Event

# How often the agent posts what it measures of itself, in steps.
_SELF_REPORT_INTERVAL = 32


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
        step: int,
    ) -> None:
        self.run = identity.run
        self.rank = identity.rank
        self.url = f"{options.server}/runs/{identity.run}"
        self._records = records
        self._sender = sender
        self._readout = Readout()
        self._guard = Guard(self._report)
        self._schedule = Schedule(overhead=options.overhead, first_step=step)
        self._step = step  # the step in progress
        self._forward_begun = False
        self._facts = StepFacts(step)
        self._stepping: list[int] = []  # ids of the optimizers that step now, outermost first
        self._ended_at: float | None = None
        self._spent = 0.0
        self.phase = "start"
        self.closed = False
        self.on_close: Callable[[], None] = lambda: None

        names, parameters = model_facts.trainable_parameters(model, optimizer)
        context = Context(
            model=model,
            optimizer=optimizer,
            schedule=self._schedule,
            names=names,
            parameters=parameters,
            guarded=self._guarded,
            step=step,
        )
        self._context = context
        self._parameter_ids = {id(p) for p in parameters}
        self._owned: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._owned[optimizer] = True
        # A value that cannot be recorded is no reason to stop recording the others.
        self._bookkeeping = self._guard.probe("records", tolerance=1000)
        probes: tuple[Probe, ...] = tuple(probe(context) for probe in PROBES)
        self._probes = tuple((probe, self._guard.probe(probe.name)) for probe in probes)
        self._loss = next(p for p in probes if isinstance(p, Loss))
        self._each(lambda probe: probe.start(self._facts))
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
            self._scalars(self._logged_step(), scalars)

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

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer moves parameters of this monitor."""
        known = self._owned.get(optimizer)
        if known is None:
            known = any(
                id(p) in self._parameter_ids for g in optimizer.param_groups for p in g["params"]
            )
            self._owned[optimizer] = known
        return known

    def root_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The model is called, for training or for evaluation."""
        if self.closed:
            return
        began = time.perf_counter()
        with self._bookkeeping:
            self.phase = "forward" if module.training else "evaluation"
            if module.training and not self._forward_begun and torch.is_grad_enabled():
                self._forward_begun = True
                self._end_evaluation()
                # Nothing can be added to the step before any more.
                self._records.complete(self._step - 1)
        self._each(lambda probe: probe.forward(module, args, kwargs))
        self._spent += time.perf_counter() - began

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer (or a wrapper around it) is about to step."""
        # A step that raised was never told to have ended: when its optimizer steps again, that
        # one is over.
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]
        self._stepping.append(id(optimizer))
        if len(self._stepping) > 1 or self.closed:
            return
        began = time.perf_counter()
        self.phase = "step"
        self._each(lambda probe: probe.before_step(self._facts))
        self._spent += time.perf_counter() - began

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped."""
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]
        if self._stepping or self.closed:
            return
        began = time.perf_counter()
        facts, step = self._facts, self._step
        if not self._forward_begun:
            # The root module's forward was not seen (another module is called): the step before
            # is complete by now.
            with self._bookkeeping:
                self._records.complete(step - 1)
        self._each(lambda probe: probe.after_step(facts))
        with self._bookkeeping:
            self._hand_over(facts)
            self._account(facts, began)
        self._step = self._context.step = step + 1
        self._facts = StepFacts(step + 1)
        self._forward_begun = False
        self.phase = "idle"

    # ------------------------------------------------------------------------------------- inside

    def _logged_step(self) -> int:
        return self._step if self._forward_begun else max(self._step - 1, 0)

    def _hand_over(self, facts: StepFacts) -> None:
        self._readout.poll()
        self._scalars(facts.step, facts.scalars)
        for stage, word in facts.words.items():
            self._records.word(facts.step, stage, word)
        for fingerprint in facts.prints:
            self._records.fingerprint(fingerprint)

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

    def _end_evaluation(self) -> None:
        means = self._loss.evaluation()
        if means:
            self._scalars(max(self._step - 1, 0), means)

    def _account(self, facts: StepFacts, began: float) -> None:
        now = time.perf_counter()
        self._spent += now - began
        if self._ended_at is not None and "step_seconds" in facts.scalars:
            self._schedule.note(
                facts.step,
                step_seconds=now - self._ended_at,
                base=max(self._spent - sum(facts.tiers.values()), 0.0),
                tiers=facts.tiers,
            )
        self._ended_at = now
        self._spent = 0.0
        if (until := self._sender.dense_until) is not None:
            self._schedule.ask_dense(until)
        if facts.step % _SELF_REPORT_INTERVAL == _SELF_REPORT_INTERVAL - 1:
            exponents = self._schedule.exponents
            self._records.scalars(
                facts.step,
                {
                    "rankscope/overhead": self._schedule.share(),
                    **{f"rankscope/interval/{t}": float(1 << k) for t, k in exponents.items()},
                },
            )

    def _each(self, call: Callable[[Probe], None]) -> None:
        for probe, guard in self._probes:
            if guard.enabled:
                with guard:
                    call(probe)

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return self._guard.probe(name)(call)

    def _report(self, probe: str, text: str) -> None:
        self._records.event(Event(step=self._step, kind="agent.fault", text=f"{probe}: {text}"))

    def _speak(self, state: str, error: str) -> None:
        if self.closed:
            return
        self.closed = True
        hooks.unwatch_steps(self)
        self._root_handle.remove()
        self._each(lambda probe: probe.close())
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
