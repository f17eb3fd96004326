"""The monitor of one rank: what every kind of trainer has in its hands."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rankscope.agent.actions import Actions
from rankscope.agent.alert_context import Surroundings
from rankscope.agent.delivery import process_exit
from rankscope.agent.delivery.address import address_of
from rankscope.agent.delivery.session import Session
from rankscope.agent.guard import Guard, contained_keywords, message_of
from rankscope.agent.null_monitor import NullMonitor, stand_in
from rankscope.agent.process.error_in_flight import error_in_flight
from rankscope.agent.process.flight_recorder import last_collectives
from rankscope.agent.process.thread_phase import phase_of, place_of, place_of_error, stacks_of
from rankscope.agent.schedule import Schedule
from rankscope.agent.steps.count import StepCount
from rankscope.agent.tripwires import SAMPLES, Trip, Tripwires
from rankscope.agent.verdict import Judgement, Verdict
from rankscope.agent.wire import Event

if TYPE_CHECKING:
    from rankscope.agent.checkpoint_digests import CheckpointReport
    from rankscope.agent.model.tensors import TensorGroup

_log = logging.getLogger("rankscope")

NOTHING: Mapping[str, Any] = MappingProxyType({})
# Types of scalars that need no reading.
PLAIN = frozenset((float, int, bool))

# How long `close` may take.
_CLOSE_SECONDS = 5.0
# A step that takes this long is reported, with the place where it is: half of what a collective's
# shortest usual time-out is, and longer than nearly all steps.
_STALLED_SECONDS = 10.0
# The phase of a rank whose forward passes go on and whose steps do not come.
GOES_ON = "passes"
# Backward passes without any step from which on that is worth a word: while more may be to come
# before a first step, and when none is.
_PASSES, _PASSES_AT_END = 32, 8
# Steps between two posts of what the agent measures of itself; and, where its plan is the same,
# steps and seconds: to measure takes medians, which is noticeable at a sample of a short step.
_REPORT_INTERVAL, _REPORT_UNCHANGED, _REPORT_SECONDS = 32, 256, 10.0
# Steps that are sampled densely where the server requests it.
_DENSE_STEPS = 64

# Run -> seconds of its allowance that monitors of this process have spent, those that are closed:
# whoever attaches anew at each epoch gets it once.
_allowances_spent: dict[str, float] = {}


class Monitor:
    """Takes what the trainer says of itself, and can be closed.

    Attributes:
        run: id of the run, the same on every rank.
        rank: rank of this process.
        url: address of the run's page.
        closed: nothing is recorded any more.
    """

    def __init__(self, connection: Session, *, step: int) -> None:
        self.run = connection.identity.run
        self.rank = connection.identity.rank
        self.url = connection.url
        self.closed = False
        self.on_close: Callable[[], None] = lambda: None
        self._ending = process_exit.Once(_CLOSE_SECONDS)
        self._connection = connection
        self._records = connection.records
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._count = StepCount(step)
        self._reported, self._reported_at = step, -math.inf
        self._reported_exponents: dict[str, int] = {}
        self._granted: int | None = None  # the server's last dense-sampling request
        self._stood = (step, time.monotonic())
        self._stalled_at = self._failed_at = ""
        # Forward passes of training so far, at the step's beginning and when last asked for; when
        # there last was another one, and how often one was found.
        self._passes_before = self._passes_seen = self._advances = 0
        self._advanced = -math.inf
        self._unstepped = 0  # passes of the step in progress, as last reported
        self._guard = Guard(self._report, everywhere=True)
        # A value that cannot be recorded is no reason to stop recording the others.
        self._bookkeeping = self._guard.probe("records", tolerance=1000)
        # Its form is not promised by torch: where it has another one, the stacks are posted alone.
        self._recorder = self._guard.probe("flight recorder")
        options = connection.options
        # What an earlier monitor of the run in this process has spent of it is gone.
        left = max(options.allowance - _allowances_spent.get(self.run, 0.0), 0.0)
        self._judgement = (
            Judgement(
                options.server,
                self.run,
                address_of(options.server, options.token),
                asking=self._guard.probe("judgement", tolerance=1000),
                callbacks=self._guard.probe("on_alert", tolerance=1000),
            )
            if options.mode == "online"
            else None
        )
        self._schedule = Schedule(overhead=options.overhead, first_step=step, allowance=left)
        self._first_step = step
        self._sampled_steps = 0  # those that were sampled in full
        self._tripwires = Tripwires(step)
        self._around = Surroundings(connection, self._count, self._guard.probe("surroundings"))
        connection.ask_phase_of(self)

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child, and the monitor that of its parent."""
        return self._pid != os.getpid()

    # ------------------------------------------------------------------------- what the user calls

    @contained_keywords
    def log(self, scalars: dict[str, Any]) -> None:
        """Records further scalars.

        They belong to the step in progress; after `optimizer.step()` and before the next forward
        pass, to the step just done. What is logged under the name of an automatic metric replaces
        it.

        Args:
            **scalars: numbers, or tensors of one element, which are read without waiting for the
                device.
        """
        step = self._step_of_log(scalars)
        self._logged(step, scalars)
        # What needs no reading is sorted out where it is sent.
        if PLAIN.issuperset(map(type, scalars.values())):
            self._records.scalars(step, scalars)
        else:
            self._scalars(step, scalars)

    def evaluating(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Names a pass of an evaluation, where losses are seen; here they are logged by hand."""
        return contextlib.nullcontext()

    def mark(self, text: str) -> None:
        """Marks the step in progress: a new phase, a changed data set, a checkpoint.

        Args:
            text: what a person reads beside the curves.
        """
        with self._bookkeeping:
            event = Event(step=self._step_of_log(), kind="mark", text=str(text)[:1000])
            self._records.event(event)

    def verdict(self) -> Verdict | None:
        """How the server judged the run when it last said so; never waits.

        The first call begins to ask, every 5 s in a thread of its own; the token needs the scope
        `read`. Ranks hear of it at different times: let them agree before they act on it.

        Returns:
            `verdict`, `so_far` (`pass`, `fail` or `pending`), `reasons`, and `at`, in seconds since
            1970; None as long as nothing is known, and where no server is asked (`mode`).
        """
        found = None
        with self._bookkeeping:
            if self._judgement is not None and not self.inherited:
                found = self._judgement.verdict()
        return found

    def on_alert(
        self, callback: Callable[[Mapping[str, Any]], object], *, severity: str = "warning"
    ) -> None:
        """Has a function called once for each alert that is open, within some seconds.

        It is called in a thread of the monitor's, beside the training: let it set a flag that the
        loop looks at. What it raises is reported on the run's page and goes no further.

        Args:
            callback: gets the alert as REST has it: `kind`, `severity`, `ranks`, `first_step`, ...
            severity: the least one: `info`, `warning` or `critical`.
        """
        with self._bookkeeping:
            if self._judgement is not None and not self.inherited:
                self._judgement.on_alert(callback, severity)

    def actions(self, agree: Callable[[int], int] | None = None, *, every: int = 1) -> Actions:
        """Ready callbacks for `on_alert`, of which all ranks do the same at the same step.

            actions = monitor.actions(largest_of_all_ranks)
            monitor.on_alert(actions.stop, severity="critical")
            monitor.on_alert(actions.save)

        Args:
            agree: called by `actions.due()` on all ranks at once with a small whole number, and
                returns the largest that any of them gave: an all-reduce. Without it, several ranks
                do nothing: one that acted alone would leave the others waiting for it.
            every: agree at every so many calls of `due` only.

        Returns:
            `stop`, `save` and `skip` (callbacks), and `due()`, to be called once a step on all
            ranks, before `optimizer.step()`: `"stop"`, `"save"`, `"skip"` or `""`.
        """
        alone = self._connection.identity.world_size == 1
        if agree is None and not alone:
            with self._bookkeeping:
                text = "monitor.actions() without `agree` does nothing: ranks act together only"
                self._note(text)
                _log.warning(text)
        return Actions(agree, every=every, alone=alone)

    def checkpoint(
        self, path: str | os.PathLike[str], state: Any, *, loaded: bool = False
    ) -> CheckpointReport | None:
        """Records the digests of what was saved, or compares what was loaded with them.

        Call it on each rank that has saved, right after, and on each rank that has loaded, before
        the next step, with what it holds then. `PATH.digests` is written beside the checkpoint. A
        tensor whose bits are others is the alert `checkpoint.mismatch`.

        Args:
            path: what was saved or loaded, a file or a folder.
            state: tensors in dicts and lists, named as when it was saved:
                `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`.
            loaded: it was loaded.

        Returns:
            `same`, `differing` (names), `unchecked` (name -> why), `tensors` (how many), `saved`
            (`run`, `step`, `rank`); None with `mode="disabled"`, and where it failed, which the
            run's page says.
        """
        found = None
        with self._bookkeeping:
            if not self.inherited and not self.closed:
                # Not before it is asked for: it needs torch.
                from rankscope.agent.checkpoint_digests import Place, checkpoint

                here = Place(
                    self.run, self._count.step, self.rank, self._connection.identity.world_size
                )
                found = checkpoint(os.fspath(path), state, here, loaded=loaded)
                step, data = self._step_of_log(), found.data()
                self._records.event(Event(step=step, kind="checkpoint", text=str(found), data=data))
        return found

    def close(self) -> None:
        """Ends the monitor: sends what is left (within 5 s) and takes every hook back."""
        self.__exit__(None, self._bookkeeping(error_in_flight)(), None)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if error is None:
            self._leave("finished", "")
        else:
            self._failed_at = place_of_error(error.__traceback__)
            self._leave("failed", message_of(error)[:2000])

    @property
    def phase(self) -> str:
        """What the training thread is doing, read off its stack."""
        phase = phase_of(self._thread)
        self._report_stalled(phase)
        return phase

    def _report_stalled(self, phase: str) -> None:
        """Reports where the training thread is, once for each place, when a step does not end.

        Of one that computes batch after batch (its steps are skipped, say) it reports that instead.
        """
        step, since = self._stood
        now = time.monotonic()
        if step != self._count.step:
            self._stood, self._stalled_at = (self._count.step, now), ""
            self._passes_before = self._passes_seen = self._forward_passes(asked=False)
            self._advances, self._unstepped = 0, 0
            return
        passes = self._forward_passes(asked=now - since >= _STALLED_SECONDS / 2)
        if passes != self._passes_seen:
            self._passes_seen, self._advanced = passes, now
            self._advances += 1
        if now - since < _STALLED_SECONDS or self.closed:
            return
        self._report_unstepped(_PASSES, now - since)
        # The first one found may be the only one of this step, in which it now stands.
        goes_on = self._advances > 1 and now - self._advanced < _STALLED_SECONDS
        place = "" if goes_on else place_of(self._thread)
        known = place or phase if not goes_on else GOES_ON
        if known == self._stalled_at:
            return
        self._stalled_at = known
        if self._advances > 1 and not goes_on:
            since = self._advanced
        data: dict[str, Any] = {"phase": GOES_ON if goes_on else phase, "step": step}
        data["seconds"] = round(now - since, 1)
        if not goes_on:
            data["stacks"] = stacks_of(self._thread)
            with self._recorder:
                data["collectives"] = last_collectives()
        # Of a step that is complete on all ranks: the server goes no further meanwhile.
        before = max(step - 2, 0)
        self._around.report()
        self._records.event(Event(step=before, kind="stalled", text=place, data=data))

    def _report_unstepped(self, least: int, seconds: float) -> None:
        """Reports a step of many passes, `least` or more, that does not come.

        Args:
            seconds: since the step before.
        """
        passes, thrown_away = self._passes_without_step()
        forwards = self._passes_seen - self._passes_before
        if max(passes, forwards) >= max(least, 2 * self._unstepped):
            self._unstepped = max(passes, forwards)
            text = f"{passes} backward passes and no step of the optimizer"
            data = {"passes": passes, "discarded": thrown_away, "forwards": forwards}
            data |= {"seconds": round(seconds), "steps": self._count.step - self._first_step}
            data["at_end"] = int(least == _PASSES_AT_END)
            self._records.event(
                Event(step=self._count.step, kind="unstepped", text=text, data=data)
            )

    def _forward_passes(self, *, asked: bool) -> int:
        """Forward passes of training, as far as they are counted.

        Called from another thread than the training's.

        Args:
            asked: they are to be counted from now on, until the step in progress ends.
        """
        return 0

    def _passes_without_step(self) -> tuple[int, int]:
        """Backward passes since the last step, and those whose gradients were thrown away."""
        return 0, 0

    # Of a trainer, or a module, that has its monitor as an attribute.
    def __copy__(self) -> NullMonitor:
        return NullMonitor(self.run, self.rank)

    def __deepcopy__(self, memo: dict[int, Any]) -> NullMonitor:
        return NullMonitor(self.run, self.rank)

    def __reduce__(self) -> tuple[Any, ...]:
        return stand_in(self.run, self.rank)

    # -------------------------------------------------------------------- for the kinds of monitor

    def _step_of_log(self, scalars: Mapping[str, Any] = NOTHING) -> int:
        """The step that something logged now belongs to."""
        return self._count.step

    def _logged(self, step: int, scalars: Mapping[str, Any]) -> None:
        """The user has logged these: nothing recorded by itself may take their place."""

    def _is_prolonged(self) -> bool:
        """Whether samples make the step in progress longer."""
        return False

    def _scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Publishes scalars of which some have to be read."""
        values = {name: float(value) for name, value in scalars.items()}
        self._records.scalars(step, values)
        self._watch_values(step, values)

    def _end(self, state: str) -> None:
        """Takes hooks back and publishes what is left."""

    def _begin(self) -> None:
        self._connection.sender.start()
        with self._bookkeeping:
            process_exit.add(self._speak)
        with self._bookkeeping:
            self._around.begin(self._judgement)

    def _announce(self, group: TensorGroup) -> None:
        self._connection.announce(group.table, group.described())

    def _watch_values(self, step: int, values: Mapping[str, float]) -> None:
        """Makes the next steps full samples where a value of a step is far from those before it."""
        if "step_seconds" in values and self._is_prolonged():
            # That says nothing of the training.
            values = {name: v for name, v in values.items() if name != "step_seconds"}
        trip = self._tripwires.take(step, values)
        if trip is not None:
            self._tripped(trip)

    def _tripped(self, trip: Trip) -> None:
        now = self._count.step
        self._schedule.ask_dense(now + SAMPLES, now + 1)
        data: dict[str, Any] = {"metric": trip.metric, "until": now + SAMPLES}
        if math.isfinite(trip.value):
            data["value"] = trip.value
        if trip.usual is not None:
            data["usual"] = trip.usual
        # The server passes it on to the other ranks.
        self._around.report()
        self._records.event(Event(step=trip.step, kind="tripwire", text=str(trip), data=data))

    def _report_sampling(self, step: int) -> None:
        """Takes the server's dense-sampling request; posts what the agent costs, now and then."""
        until = self._connection.sender.dense_until
        if until is not None and until != self._granted:
            # Ranks hear of it with the answers to their posts, a fast one hundreds of steps before
            # the others, or too late: each samples densely at once, and all together at its end.
            self._granted = until
            self._schedule.ask_dense(step + _DENSE_STEPS, step + 1)
            self._schedule.ask_dense(until, until - _DENSE_STEPS + 1)
        since = step - self._reported
        if since < _REPORT_INTERVAL:
            return
        exponents, now = self._schedule.exponents, time.monotonic()
        unchanged = since >= _REPORT_UNCHANGED and now - self._reported_at >= _REPORT_SECONDS
        if unchanged or exponents != self._reported_exponents:
            self._report_cost(step, exponents, now)

    def _report_cost(self, step: int, exponents: dict[str, int], now: float) -> None:
        self._reported, self._reported_at = step, now
        self._reported_exponents = exponents
        steps = max(step + 1 - self._first_step, 1)
        self._records.scalars(
            step,
            {
                "rankscope/overhead": self._schedule.share(),
                "rankscope/sampled": min(self._sampled_steps / steps, 1.0),
                **{f"rankscope/interval/{t}": float(1 << k) for t, k in exponents.items()},
            },
        )

    def _report(self, probe: str, text: str) -> None:
        if self._records.stopped:
            _log.warning("a part of the agent failed at its end: %s: %s", probe, text)
            return
        message = f"{probe}: {text}"
        self._records.event(Event(step=self._count.step, kind="agent.fault", text=message))

    def _note(self, text: str) -> None:
        self._records.event(Event(step=self._count.step, kind="agent.note", text=text))

    def _speak(self, state: str, error: str) -> None:
        first = True
        with self._bookkeeping:
            first = self._ending.begins()
        if self.closed or not first:
            return
        self.closed = True
        with self._bookkeeping:
            spent = _allowances_spent.get(self.run, 0.0) + self._schedule.allowance.spent
            _allowances_spent[self.run] = spent
        # One by one: what fails must not keep the others from being done.
        began = time.monotonic()
        with self._bookkeeping:
            if self._judgement is not None:
                self._judgement.stop()
            if state == "failed":
                self._around.report()
            self._around.end()
        with self._bookkeeping:
            self._end(state)
        with self._bookkeeping:
            # Of a process that fails it is why there was no step.
            if state == "finished":
                stood = time.monotonic() - self._stood[1]
                self._report_unstepped(_PASSES_AT_END, stood)
        last = self._count.step - 1
        with self._bookkeeping:
            if last > self._reported and self._schedule.is_made:
                # The plan that it came to: a short run has reported another one, or none.
                self._report_cost(last, self._schedule.exponents, began)
        with self._bookkeeping:
            if state == "failed":
                # Where: what it failed of goes with the last batch.
                place = (self._failed_at or process_exit.place())[:200]
                self._records.event(Event(step=self._count.step, kind="failed", text=place))
        with self._bookkeeping:
            self._records.complete(last)
        with self._bookkeeping:
            left = _CLOSE_SECONDS - (time.monotonic() - began)
            self._connection.sender.close(state=state, error=error, timeout=max(left, 1.0))
        with self._bookkeeping:
            self.on_close()
        with self._bookkeeping:
            self._ending.is_over()
        self._guard.retire()

    def _leave(self, state: str, error: str) -> None:
        try:
            with self._bookkeeping:
                process_exit.begin_to_leave()
            self._speak(state, error)
        finally:  # an impatient user's Ctrl-C, too, must not leave the process deaf to SIGTERM
            with self._bookkeeping:
                process_exit.leave(self._speak)
