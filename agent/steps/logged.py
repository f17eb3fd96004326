"""What the user has logged by name: nothing that is recorded by itself takes its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Of this number of steps it is known: the one in progress and those before, of which a device may
# still owe its values.
_STEPS = 4
# What is recorded by itself -> its name beside what the user logs in its place: the two may not be
# of the same answers.
_BESIDE = {"accuracy": "accuracy_counted"}


class LoggedNames:
    """Names of the scalars that the user has logged, of the last few steps."""

    def __init__(self) -> None:
        self._names: dict[int, frozenset[str]] = {}
        self._beside: dict[str, str] = {}

    def add(self, step: int, names: Iterable[str]) -> None:
        """The user has logged these for a step."""
        known = self._names
        known[step] = known.get(step, frozenset()).union(names)
        self._beside.update({name: _BESIDE[name] for name in known[step] & _BESIDE.keys()})
        if len(known) > _STEPS:
            del known[next(iter(known))]

    def take_out(self, step: int, scalars: dict[str, Any]) -> None:
        """Leaves in a step's scalars only what the user has not logged for it, by its name."""
        for name, beside in self._beside.items():
            if name in scalars:
                scalars[beside] = scalars[name]
        if self._names:
            for name in self._names.get(step, ()):
                scalars.pop(name, None)
