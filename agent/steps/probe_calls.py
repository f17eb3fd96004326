"""The probes of one monitor, and which of them are called at which moment of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rankscope.agent.guard import Guard, Moments
from rankscope.agent.probes import PROBES, Context, Probe
from rankscope.agent.probes.loss.training import Loss

Kind = TypeVar("Kind", bound=Probe)


class ProbeCalls:
    """Makes the probes; one that cannot be made, or fails, is left out from then on.

    Args:
        guard: keeps the faults of each probe its own.
        context: given to every probe.
        guarded: makes a function of a probe, by its name, one that never raises.

    Attributes:
        all: the probes that could be made.
        start, forward, prepare, not_finite, before_step, other_step, after_step, close: call that
            method of all of them.
        forward_plain, before_plain, after_plain: of those that look at every step.
        after_passing: of these, of those that do not need the beginning of a step with its end.
        evaluated: ends an evaluation: the means of what was seen, if anything.
    """

    def __init__(
        self,
        guard: Guard,
        context: Context,
        guarded: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._guard = guard
        made: list[Probe] = []
        for probe in PROBES:
            with guard.probe(probe.name):
                made.append(probe(context))
        self.all = tuple(made)
        self.start = self._moments(self.all, "start")
        self.forward = self._moments(self.all, "forward")
        self.prepare = self._moments(self.all, "prepare")
        self.not_finite = self._moments(self.all, "not_finite")
        self.before_step = self._moments(self.all, "before_step")
        self.other_step = self._moments(self.all, "other_step")
        self.after_step = self._moments(self.all, "after_step")
        self.close = self._moments(self.all, "close")
        every_step = tuple(p for p in self.all if not p.sampled)
        self.forward_plain = self._moments(every_step, "forward")
        self.before_plain = self._moments(every_step, "before_step")
        self.after_plain = self._moments(every_step, "after_step")
        passing = tuple(p for p in every_step if not p.in_pairs)
        self.after_passing = self._moments(passing, "after_step")
        self.evaluated: Callable[[bool], Mapping[str, Any] | None] = lambda goes_on: None
        loss = self.found(Loss)
        if loss is not None:
            self.evaluated = guarded(Loss.name, loss.evaluation)

    def found(self, kind: type[Kind]) -> Kind | None:
        """The probe of a kind; None where it could not be made."""
        return next((p for p in self.all if isinstance(p, kind)), None)

    def _moments(self, probes: Iterable[Probe], moment: str) -> Moments:
        overridden = [p for p in probes if getattr(type(p), moment) is not getattr(Probe, moment)]
        return Moments([(getattr(p, moment), self._guard.probe(p.name)) for p in overridden])
