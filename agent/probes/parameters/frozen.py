"""Parameters that no optimizer is to move: frozen weights, teachers inside the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rankscope.agent.fingerprint import FingerprintValues
from rankscope.agent.model.facts import held, is_unsized, plain_name
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.numbers_in_transit import Together
from rankscope.agent.probes.tables import readable
from rankscope.agent.tripwires import SAMPLES
from rankscope.agent.wire import UInt64

STAGE = "frozen"
EVENT = "parameters.written"
# The parts are read in turns. A step reads all parameters twice at least, forward and backward: an
# eighth of them, read once, is a sixteenth of the memory that it reads anyway.
PARTS = SAMPLES // 2
# What is read in one part in any case: 40 microseconds' worth on one core.
_AT_ONCE = 2**20
# Readings that found the same bits before a change is worth an event: what moves at every step (an
# average of the weights) was never still.
_STILL = 8
# Changes of one tensor that are reported: the second shows that it is written now and then.
_MOST_REPORTED = 2
_MOST_NAMES = 20

_version = attrgetter("_version")
PartsOf = Callable[[Sequence[str]], tuple[str, ...]]
_Counts = npt.NDArray[np.int64]


class FrozenParameters(Probe):
    """Digests of the parameters that require no gradient, part by part (tier `full`).

    All of them at attach, with sketches. At sampled steps one of up to 8 parts, of 1 MiB at least
    and half as large as the trained parameters: one pass over it, digests alone, and a second one
    for sketches where a digest has changed since the part was read before. Which part it is follows
    from the number of the step, so that ranks read the same one at each step that they share, and
    any 16 consecutive samples of a rank read all parts.

    Posts the event `parameters.written` where a tensor has changed that 8 readings had found
    unchanged, unless its bits are those of a trained parameter (a target network that was brought
    up to date). Torch counts how often a tensor is written in place: where such a count has moved,
    the next 16 steps are sampled, so that all parts are read.
    """

    name = "frozen"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._of: TensorGroup | None = None
        self._parts: list[_Part] = []
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._number = 0
        self._parts_of: PartsOf = _no_parts

    def start(self, facts: StepFacts) -> None:
        """What they are at attach."""
        self._find()
        for part in self._parts:
            self._read(facts, part, sketches=True)

    def after_step(self, facts: StepFacts) -> None:
        """Reads the part whose turn it is."""
        if not self.context.full:
            return
        if self.context.parameters is not self._of:
            # Some were frozen, replaced or are trained from now on: a beginning for all of them.
            with facts.charged("full"):
                self.start(facts)
            return
        if not self._parts:
            return
        with facts.charged("full"):
            self._ask_where_written(facts.step)
            part = self._parts[turn(facts.step, len(self._parts))]
            self._read(facts, part, sketches=part.moves or part.unsketched)

    def declare(self, parts_of: PartsOf) -> None:
        """Which part of the model each tensor is has been declared.

        Args:
            parts_of: names of tensors -> their parts.
        """
        self._parts_of = parts_of
        for part in self._parts:
            of = part.group
            part.group = TensorGroup(of.table, of.names, of.tensors, parts=parts_of(of.names))
            self.context.announce(part.group)

    def _find(self) -> None:
        context = self.context
        self._of = context.parameters
        trained = {id(p) for p in context.parameters.tensors}
        names: list[str] = []
        found: list[torch.Tensor] = []
        for name, parameter in _every(context):
            # What is swapped out to nowhere or of an unknown form has no bits to be read.
            if id(parameter) not in trained and not is_unsized(parameter):
                if readable(parameter) and _size(parameter):
                    names.append(name)
                    found.append(parameter)
        beside = f"@{self._number}" if self._number else ""
        self._number += 1
        self._tensors, self._versions = found, list(map(_version, found))
        self._parts = []
        for place, rows in enumerate(_dealt(found, context.parameters.tensors)):
            of = [names[r] for r in rows]
            table, tensors = f"{STAGE}/{place}{beside}", [found[r] for r in rows]
            group = TensorGroup(table, of, tensors, parts=self._parts_of(of))
            context.announce(group)
            self._parts.append(_Part(group))

    def _ask_where_written(self, step: int) -> None:
        """Something has written in place: which bits have changed is seen when all are read."""
        versions = list(map(_version, self._tensors))
        if versions != self._versions:
            before, self._versions = self._versions, versions
            moved = {
                id(t) for t, v, w in zip(self._tensors, before, versions, strict=True) if v != w
            }
            if any(part.is_still(moved) for part in self._parts):
                self.context.schedule.ask_dense(step + SAMPLES)

    def _read(self, facts: StepFacts, part: _Part, *, sketches: bool) -> None:
        group = part.group
        tensors = group.held()
        plan = group.plan(tensors)
        pending = plan.begin(tensors, sketches=sketches)
        if not sketches and plan.on_host and part.differs(pending.result().digests):
            # Now, while it is what it was: a sketch tells how much of it has changed.
            sketches, pending = True, plan.begin(tensors, sketches=True)
        trained = [facts.shared.get(name) for name in ("parameters_before", "parameters")]

        def deliver() -> None:
            values = pending.result()
            facts.fingerprints.append(group.fingerprints(facts.step, STAGE, values))
            changed, since = part.take(facts.step, values)
            if changed.any():
                known = [made.result().digests for made in trained if made is not None]
                copied = np.isin(values.digests, np.concatenate(known)) if known else False
                self._report(facts.step, part, changed & ~np.asarray(copied), since)

        there = Together(pending, *(made for made in trained if made is not None))
        facts.when_ready(there, deliver)

    def _report(self, step: int, part: _Part, rows: npt.NDArray[np.bool_], since: int) -> None:
        names = [part.group.names[row] for row in np.flatnonzero(rows)]
        if names:
            text = f"{len(names)} parameters that require no gradient have changed: "
            text += ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            data = {"tensors": names[:_MOST_NAMES], "count": len(names), "unchanged_until": since}
            self.context.event(step, EVENT, text, data)
            self.context.schedule.ask_dense(step + SAMPLES)


@dataclass(slots=True)
class _Part:
    """Some of the tensors, and what was read of them last.

    Attributes:
        moves: whether the last reading found a change: sketches are taken along with the next one.
        unsketched: whether the server has no sketch of what was read last.
    """

    group: TensorGroup
    moves: bool = False
    unsketched: bool = False
    _known: UInt64 | None = None
    _step: int = -1
    _still: _Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    _reported: _Counts = field(default_factory=lambda: np.zeros(0, np.int64))

    def differs(self, digests: UInt64) -> bool:
        """Whether these are not those of the last reading."""
        return self._known is None or not np.array_equal(digests, self._known)

    def is_still(self, ids: set[int]) -> bool:
        """Whether any of some tensors belongs to this part and has been still so far."""
        rows = [row for row, t in enumerate(self.group.tensors) if id(t) in ids]
        return bool(rows) and bool((self._still[rows] >= _STILL).any())

    def take(self, step: int, values: FingerprintValues) -> tuple[npt.NDArray[np.bool_], int]:
        """Takes a reading; rows that are to be reported as having have changed, and since when.

        Returns:
            bool [T], and the step of the reading before.
        """
        known, before = self._known, self._step
        digests, sketches = values.digests, values.sketches
        self._known, self._step = digests, step
        if known is None:
            self._still = np.zeros(len(digests), np.int64)
            self._reported = np.zeros(len(digests), np.int64)
            return np.zeros(len(digests), np.bool_), before
        changed = digests != known
        self.moves = bool(changed.any())
        self.unsketched = sketches is None and (self.moves or self.unsketched)
        # One that was reported is reported once more, however soon it changes again.
        is_due = (self._still >= _STILL) | (self._reported > 0)
        report = changed & is_due & (self._reported < _MOST_REPORTED)
        self._reported += report
        self._still = np.where(changed, 0, self._still + 1)
        return report, before


def _no_parts(names: Sequence[str]) -> tuple[str, ...]:
    return ("",) * len(names)


def turn(step: int, parts: int) -> int:
    """Which of some parts is read at a step.

    The odd part of the step's number counts them. So those who sample the multiples of any power of
    two read all parts, at every other of their samples one after the other.
    """
    if step <= 0:
        return 0
    odd = step // (step & -step)
    return (odd >> 1) % parts


def _every(context: Context) -> list[tuple[str, torch.Tensor]]:
    """All parameters under their names: those of the model, then those that optimizers hold."""
    found: dict[int, tuple[str, torch.Tensor]] = {
        id(p): (plain_name(name), p) for name, p in context.model.named_parameters()
    }
    groups: Any = getattr(context.optimizer, "param_groups", ())
    for place, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            found.setdefault(id(parameter), (f"optimizer.{place}.{position}", parameter))
    return list(found.values())


def _dealt(tensors: list[torch.Tensor], trained: tuple[torch.Tensor, ...]) -> list[list[int]]:
    """Places of the tensors of each part: of about the same size, in the model's order."""
    sizes = [_size(t) for t in tensors]
    whole, beside = sum(sizes), sum(map(_size, trained))
    most = max(_AT_ONCE, beside // 2, -(-whole // PARTS))
    count = max(-(-whole // most), 1)
    parts: list[list[int]] = [[] for _ in range(min(count, len(tensors)))]
    begun = 0
    for place, size in enumerate(sizes):
        # By where its middle lies in all of them.
        parts[min(int((begun + size / 2) / whole * len(parts)), len(parts) - 1)].append(place)
        begun += size
    return [part for part in parts if part]


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor: of a distributed one those of all ranks, which is the same on each."""
    # What ZeRO 3 has dealt out is empty, with parts of one size beside it.
    return (tensor.numel() or held(tensor).numel()) * tensor.element_size()
