"""Optimizer state: what decides the next update besides the gradient."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rankscope.agent.fingerprint import FingerprintValues
from rankscope.agent.model.facts import all_held, held, plain_name, wrapped_in
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.tables import ChangingTable, readable
from rankscope.agent.wire import Fingerprint

_TABLE = "optimizer"
_STAGE = "optimizer_state"


class OptimizerState(Probe):
    """Fingerprints of the optimizer's state, a table for each key (`optimizer/exp_avg`, ...).

    Costs one pass over the state for digests and one for sketches (tier `state`), and about 0.5
    microseconds for each tensor of it. The digest of the stage covers everything that is a tensor
    or a whole number, step counters included. Of a sharded optimizer (ZeRO, FSDP) it is what this
    rank holds.

    Lists of tensors (the history of L-BFGS) are in the digest alone: their length changes from step
    to step. Plain floating-point numbers are left out: what optimizers keep as such are losses,
    which are each rank's own.
    """

    name = "optimizer_state"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._tables: dict[str, ChangingTable] = {}
        self._plans = TensorGroup(_TABLE, (), ())
        self._unread = False

    def after_step(self, facts: StepFacts) -> None:
        """What the step left."""
        if not self.context.state:
            return
        with facts.charged("state"):
            found = self._found()
            if found.names:
                self._take(facts, found)

    def _take(self, facts: StepFacts, found: _Found) -> None:
        parts: list[tuple[str, int, int, bool]] = []
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        for key, (of_key, given) in found.columns.items():
            table = self._tables.get(key)
            if table is None:
                table = self._tables[key] = ChangingTable(self.context, f"{_TABLE}/{key}")
            begin = len(names)
            names += [f"{key}/{name}" for name in of_key]
            tensors += all_held(given)
            # Counters have no distance worth 67 numbers each.
            sketched = any(t.numel() > 1 for t in tensors[begin:])
            parts.append((table.name(of_key, given), begin, len(names), sketched))
        names += found.loose_names
        tensors += found.loose
        # The plan goes by names alone; of the table no more than that is reported.
        if self._plans.names != tuple(names):
            self._plans = TensorGroup(_TABLE, names, ())
        plan = self._plans.plan(tensors)
        pending = plan.begin(tensors, sketches=any(part[3] for part in parts))

        def deliver() -> None:
            fingerprints = pending.result()
            facts.digests[_STAGE] = (
                plan.model_digest(fingerprints.digests) + found.numbers
            ) % 2**64
            facts.fingerprints += [_fingerprint(facts.step, fingerprints, *part) for part in parts]

        facts.when_ready(pending, deliver)

    def _found(self) -> _Found:
        found = _Found()
        # By the ids of its keys: to hash a tensor is a call of Python's.
        state = {id(key): own for key, own in state_of(self.context.optimizer).items()}
        for name, parameter in self._parameters():
            for key, value in state.get(id(parameter), _NOTHING).items():
                found.add(name, str(key), value)
        if found.unread and not self._unread:
            self._unread = True
            self.context.note(
                f"optimizer state {found.unread} is kept in a form that has no fingerprint (sparse "
                "or a tensor subclass): it is not compared"
            )
        return found

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the optimizers move, with the model's names, in the order of those."""
        group = self.context.parameters
        yield from zip(group.names, group.tensors, strict=True)
        seen = {id(t) for t in group.tensors}
        names: dict[int, str] = {}
        for inner in wrapped_in(self.context.optimizer):
            for index, settings in enumerate(inner.param_groups):
                for position, parameter in enumerate(settings["params"]):
                    if id(parameter) in seen:
                        continue
                    # Frozen since, or a flat buffer of a wrapper.
                    seen.add(id(parameter))
                    names = names or {
                        id(p): plain_name(n) for n, p in self.context.model.named_parameters()
                    }
                    label = f"optimizer.{index}.{position}"
                    yield names.get(id(parameter), label), parameter


@dataclass(slots=True)
class _Found:
    """The state, sorted.

    Attributes:
        columns: key -> names of parameters and their tensors.
        loose_names, loose: tensors in lists.
        numbers: hash of everything that is a whole number.
        unread: a key with tensors that cannot be read, empty where there is none.
    """

    columns: dict[str, tuple[list[str], list[torch.Tensor]]] = field(default_factory=dict)
    loose_names: list[str] = field(default_factory=list)
    loose: list[torch.Tensor] = field(default_factory=list)
    numbers: int = 0
    unread: str = ""

    @property
    def names(self) -> bool:
        """Whether there is anything."""
        return bool(self.columns or self.loose or self.numbers)

    def add(self, name: str, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if not readable(value):
                self.unread = key
                return
            column = self.columns.get(key)
            if column is None:
                column = self.columns[key] = ([], [])
            column[0].append(name)
            column[1].append(value)
        elif isinstance(value, int):
            text = f"{key}/{name}={int(value)}".encode()
            hashed = hashlib.blake2b(text, digest_size=8).digest()
            self.numbers = (self.numbers + int.from_bytes(hashed, "little")) % 2**64
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor) and readable(item):
                    self.loose_names.append(f"{key}.{index}/{name}")
                    self.loose.append(held(item))


_NOTHING: Mapping[str, Any] = {}


def state_of(optimizer: Any) -> Mapping[torch.Tensor, Mapping[str, Any]]:
    """The state of an optimizer, or of the innermost one that a wrapper holds.

    Of a wrapper that shards the state this is the part of this rank.
    """
    for inner in wrapped_in(optimizer):
        state = getattr(inner, "state", None)
        if isinstance(state, Mapping) and any(
            isinstance(key, torch.Tensor) and value for key, value in state.items()
        ):
            return state
    return {}


def _fingerprint(
    step: int, fingerprints: FingerprintValues, table: str, begin: int, end: int, sketched: bool
) -> Fingerprint:
    sketches = fingerprints.sketches
    return Fingerprint(
        step=step,
        stage=_STAGE,
        table=table,
        digests=fingerprints.digests[begin:end],
        sketches=sketches[begin:end] if sketched and sketches is not None else None,
    )
