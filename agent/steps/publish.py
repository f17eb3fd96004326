"""Publishes what the probes found to the records: at once what is known, the rest as it arrives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rankscope.agent.delivery.records import Records
from rankscope.agent.model.tensors import number
from rankscope.agent.monitor import PLAIN
from rankscope.agent.probes import StepFacts
from rankscope.agent.steps.readout import Readout


class Publisher:
    """Of a torch trainer's facts.

    Attributes:
        not_finite: called with a step and the names of its scalars that are not finite.
        leave_to_user: takes out of the scalars of a step what the user has logged, where they come
            from a device after it has ended.
    """

    def __init__(
        self,
        records: Records,
        readout: Readout,
        bookkeeping: Any,
        arrival: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        """Makes one.

        Args:
            records: take what is known.
            readout: brings the rest from the device.
            bookkeeping: a context that keeps what fails in it to itself and reports it.
            arrival: given the scalars of a step that are known now, numbers all of them.
        """
        self.not_finite: Callable[[int, list[str]], None] = lambda step, names: None
        self.leave_to_user: Callable[[int, dict[str, Any]], None] = lambda step, scalars: None
        self._records = records
        self._readout = readout
        self._bookkeeping = bookkeeping
        self._arrival = arrival

    def everything(self, facts: StepFacts) -> None:
        """All facts of a step."""
        readout = self._readout
        if readout.waiting:
            with self._bookkeeping:
                readout.poll()
        self._known(facts)
        for pending, deliver in facts.later:
            readout.when_ready(pending, deliver)
        if facts.later:
            # What is delivered late is in the facts by then.
            facts.scalars, facts.digests, facts.fingerprints, facts.layers = {}, {}, [], []
            facts.shared = {}
            readout.when_ready(facts.later[-1][0], lambda: self._late(facts))

    def scalars_alone(self, facts: StepFacts) -> None:
        """The facts of a step into which nothing but known scalars and digests were put.

        What a device still times is put into them later.
        """
        if facts.later:
            self.everything(facts)
            return
        if self._readout.waiting:
            self._readout.poll()
        if PLAIN.issuperset(map(type, facts.scalars.values())):
            self._arrived(facts.step, facts.scalars)
        else:
            self.scalars(facts.step, facts.scalars)
        if facts.digests:
            self._records.digests(facts.step, facts.digests)

    def scalars(self, step: int, scalars: Mapping[str, float | torch.Tensor]) -> None:
        """Scalars of a step, of which some have to be read."""
        plain: dict[str, float] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, value in scalars.items():
            # What is on the host arrives together: what is not finite is reported all at once.
            known = number(value) if isinstance(value, torch.Tensor) else value
            if isinstance(known, torch.Tensor):
                tensors[name] = known
            else:
                plain[name] = float(known)
        if tensors:
            names = tuple(tensors)
            self._readout.push(
                tuple(tensors.values()),
                lambda values: self._arrived(step, dict(zip(names, values, strict=True))),
            )
        if plain:
            self._arrived(step, plain)

    def _late(self, facts: StepFacts) -> None:
        self.leave_to_user(facts.step, facts.scalars)
        self._known(facts)

    def _known(self, facts: StepFacts) -> None:
        self.scalars(facts.step, facts.scalars)
        if facts.digests:
            self._records.digests(facts.step, facts.digests)
        for fingerprint in facts.fingerprints:
            self._records.fingerprint(fingerprint)
        for layers in facts.layers:
            self._records.layers(layers)

    def _arrived(self, step: int, values: dict[str, Any]) -> None:
        if math.isnan(values.get("accuracy", 0.0)):
            del values["accuracy"]  # no target of the batch was to be judged
        self._records.scalars(step, values)
        self._arrival(step, values)
        # One sum in place of a question for each: it is not finite if one of them is not.
        if not math.isfinite(sum(values.values())):
            self.not_finite(step, [n for n, v in values.items() if not math.isfinite(v)])
