"""Thresholds: what a user may set, each declared once, with its unit and what it means.

A detector's thresholds are the fields of a frozen dataclass. Name, default and unit are the field's
own; the meaning is its line under `Attributes` in the class's docstring, which a person who reads
the code needs as well:

    @dataclass(frozen=True, slots=True)
    class SpikePolicy(Policy):
        '''Thresholds of `loss.spike`.

Attributes:
            min_z: robust z on the logarithm from which a value is a spike.
        '''

        min_z: Sigmas = 8.0
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class Unit:
    """What a threshold is counted in, and between which values it makes sense (both included)."""

    name: str
    least: float = 0.0
    most: float = math.inf


Observations = Annotated[int, Unit("observations", least=1)]
# Of 10 observations.
Blocks = Annotated[int, Unit("blocks", least=1)]
Steps = Annotated[int, Unit("steps", least=1)]
Count = Annotated[int, Unit("", least=0)]
Seconds = Annotated[float, Unit("seconds")]
Share = Annotated[float, Unit("share", most=1.0)]
# How many times something else.
Times = Annotated[float, Unit("times")]
Sigmas = Annotated[float, Unit("standard deviations")]
Number = Annotated[float, Unit("")]
Bytes = Annotated[float, Unit("bytes")]
# A correlation, or a statistic that is negative where something falls.
Signed = Annotated[float, Unit("", least=-math.inf)]


@dataclass(frozen=True, slots=True)
class Threshold:
    """One number that a user may set.

    Attributes:
        default: an int where it counts something, else a float.
        unit: empty where it is a plain number.
        least, most: values that are taken, both included.
    """

    name: str
    default: float
    unit: str
    meaning: str
    least: float
    most: float

    def checked(self, value: object) -> float:
        """A value for it, of the type of its default.

        Raises:
            ValueError: it is no number, or none that makes sense; a sentence that goes on after
                the name.
        """
        counts = isinstance(self.default, int)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"must be a {'whole ' if counts else ''}number, not {value!r}")
        if counts and value != int(value if math.isfinite(value) else 0):
            raise ValueError(f"must be a whole number, not {value!r}")
        if not self.least <= value <= self.most or not math.isfinite(value):
            low = f" of at least {self.least:g}" if math.isfinite(self.least) else ""
            high = f" and at most {self.most:g}" if math.isfinite(self.most) else ""
            raise ValueError(f"must be a finite number{low}{high}, not {value!r}")
        return int(value) if counts else float(value)


@dataclass(frozen=True, slots=True)
class Policy:
    """Base of the thresholds of a detector; itself those of one that has none."""


@dataclass(frozen=True, slots=True)
class RisePolicy(Policy):
    """Thresholds of what is reported otherwise where the learning rate was raised before it.

    Attributes:
        rise: ratio of the learning rate to the earlier one, from which on it was raised.
        rise_before: observations before the fault within which such a rise is looked for.
    """

    rise: Times = 1.5
    rise_before: Observations = 100


def thresholds(policy: type[Policy]) -> tuple[Threshold, ...]:
    """What a user may set of a detector: its own fields in their order, then those it shares.

    Raises:
        TypeError: a field has no default or no meaning, or is no number.
    """
    if policy not in _declared:
        _declared[policy] = tuple(_thresholds(policy))
    return _declared[policy]


# By class: reading docstrings takes a while.
_declared: dict[type[Policy], tuple[Threshold, ...]] = {}


def _thresholds(policy: type[Policy]) -> Iterator[Threshold]:
    hints = get_type_hints(policy, include_extras=True)
    meanings = _meanings(policy)
    # A field that is declared anew keeps its place among those of the base.
    own = {name: place for place, name in enumerate(vars(policy).get("__annotations__", {}))}
    for field in sorted(dataclasses.fields(policy), key=lambda f: own.get(f.name, len(own))):
        kind, *extras = get_args(hints[field.name]) or (hints[field.name],)
        unit = next((extra for extra in extras if isinstance(extra, Unit)), Unit(""))
        if kind not in (int, float) or field.default is dataclasses.MISSING:
            raise TypeError(f"{policy.__name__}.{field.name} is no number with a default")
        if field.name not in meanings:
            raise TypeError(f"the docstring of {policy.__name__} does not say what {field.name} is")
        yield Threshold(
            field.name,
            kind(field.default),
            unit.name,
            meanings[field.name],
            unit.least,
            unit.most,
        )


def made(policy: type[Policy], values: Mapping[str, Any]) -> Policy:
    """The policy with some of its thresholds set.

    Raises:
        ValueError: there is no such threshold, or it cannot have that value; names both.
    """
    known = {threshold.name: threshold for threshold in thresholds(policy)}
    checked = {}
    for name, value in values.items():
        if name not in known:
            there = ", ".join(known) or "none: it can only be switched off"
            raise ValueError(f"{name} is no threshold of it; there are {there}")
        try:
            checked[name] = known[name].checked(value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return policy(**checked)


def _meanings(policy: type[Policy]) -> dict[str, str]:
    """Field -> meaning, out of the sections `Attributes` of the docstrings, its bases' too."""
    found: dict[str, str] = {}
    for known in reversed(policy.__mro__):
        text = inspect.cleandoc(known.__doc__ or "")
        _, _, section = text.partition("Attributes:\n")
        section = re.split(r"\n(?=\S)", section)[0]
        entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
        for names, meaning in entries:
            reported = re.sub(r"\s+", " ", meaning).strip().rstrip(".,")
            found |= {name.strip(): reported for name in names.split(",")}
    return found
