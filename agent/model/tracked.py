"""The parameters that training moves, found again when the trainer replaces, adds or unfreezes."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain
from operator import is_
from typing import Any

import torch

from rankscope.agent.model import facts
from rankscope.agent.model.facts import is_unsized, wrapped_in
from rankscope.agent.model.tensors import TensorGroup

_TABLE = "parameters"


class Role(enum.Enum):
    """What an optimizer of the process is to a monitor."""

    OWN = enum.auto()  # its steps are the steps of the run
    OTHER = enum.auto()  # moves parameters that are watched, in steps of its own
    STRANGER = enum.auto()


class Tracked:
    """The trainable parameters of a model and its optimizer, as they are now.

    Attributes:
        group: the parameters. Its table has a new name each time they have changed, so that
            fingerprints of before and after are never taken for the same tensors.
        frozen: names of those that the optimizer holds and training could change at first, and that
            require no gradient now. What an optimizer for another part of the model trains, and
            is switched off in between, is not among them.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self._model = model
        self._optimizer = optimizer
        self._version = 0
        self._declared: list[tuple[str, str]] = []
        self.frozen: tuple[str, ...] = ()
        self.group = self._found(_TABLE)
        self._at_first = {
            id(p): (name, p) for name, p in zip(self.group.names, self.group.tensors, strict=True)
        }

    def changed(self) -> bool:
        """Whether a parameter or module was replaced or added, a parameter frozen or unfrozen.

        Some 50 ns a parameter or module.
        """
        for parameter, trainable in self._trainable:
            if parameter.requires_grad is not trainable:
                return True
        if not all(map(is_unsized, self._unsized)):
            return True
        for place, known in self._places:
            if len(place) != len(known) or not all(map(is_, place.values(), known)):
                return True
        groups = self._optimizer.param_groups
        return len(groups) != len(self._groups) or any(
            len(group["params"]) != len(known) or not all(map(is_, group["params"], known))
            for group, known in zip(groups, self._groups, strict=True)
        )

    def renew(self) -> str:
        """Searches the parameters again; says in a sentence what has changed."""
        before = self.group
        self._version += 1
        self.group = self._found(f"{_TABLE}@{self._version}")
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        self.frozen = tuple(
            name for i, (name, p) in self._at_first.items() if i in held and not p.requires_grad
        )
        old = dict(zip(before.names, before.tensors, strict=True))
        new = dict(zip(self.group.names, self.group.tensors, strict=True))
        reported = [
            _listed("no longer trained", [n for n in old if n not in new]),
            _listed("trained from now on", [n for n in new if n not in old]),
            _listed(
                "replaced by another tensor", [n for n in new if old.get(n, new[n]) is not new[n]]
            ),
        ]
        text = "; ".join(t for t in reported if t)
        return f"the model's parameters have changed: {text or 'another order'}"

    def declare(self, key: str, pattern: str) -> None:
        """Which part of the model the tensors of a pattern are; what is declared last counts."""
        self._declared.append((pattern, key))
        self.group = self._found(self.group.table)

    def role_of(self, optimizer: torch.optim.Optimizer) -> Role:
        """What an optimizer is to this monitor.

        One that shares parameters with the attached one is the one inside it, or around it.
        """
        moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        if optimizer is self._optimizer or moved & own:
            return Role.OWN
        return Role.OTHER if any(id(p) in moved for p in self.group.tensors) else Role.STRANGER

    def _found(self, table: str) -> TensorGroup:
        names, parameters = facts.trainable_parameters(self._model, self._optimizer)
        places: list[dict[str, Any]] = []
        for module in self._model.modules():
            places += [p for p in (module._parameters, module._modules) if p]
        self._places = [(place, tuple(place.values())) for place in places]
        self._groups = [tuple(group["params"]) for group in self._optimizer.param_groups]
        seen = dict.fromkeys((*self._model.parameters(), *chain.from_iterable(self._groups)))
        self._trainable = [(parameter, parameter.requires_grad) for parameter in seen]
        self._unsized = [p for p in seen if is_unsized(p)]
        return TensorGroup(table, names, parameters, parts=self.parts_of(names))

    def parts_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """Which part of the model each tensor is, as it was declared; empty: nothing was."""
        parts = []
        for name in names:
            keys = [key for pattern, key in self._declared if fnmatchcase(name, pattern)]
            parts.append(keys[-1] if keys else "")
        return tuple(parts)


def is_inside(optimizer: torch.optim.Optimizer, outer: Any) -> bool:
    """Whether `outer` is a wrapper around an optimizer: it shares its settings, or holds it.

    What is neither has been built in its place, for the same parameters.
    """
    mine, others = optimizer.param_groups, outer.param_groups
    if mine and others and mine[0] is others[0]:
        return True
    return any(
        value is optimizer
        for wrapper in wrapped_in(outer)
        for value in getattr(wrapper, "__dict__", {}).values()
    )


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{what}: {shown}"
