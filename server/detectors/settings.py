"""What a user wants judged otherwise: which detectors are off, which thresholds are other ones.

Settings come in layers, the later before the earlier: what detectors declare, a file for the whole
server, the same file for a project, and what was set for the project by the API. `Effective` is
what they come to. It is kept with the run that was judged by it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rankscope.agent.wire import PROFILES
from rankscope.server.detectors.base import Detector
from rankscope.server.detectors.policy import Policy, made, thresholds

Detectors = Sequence[type[Detector[Any]]]
# Kind -> threshold -> value; `enabled` is one of the names.
Values = Mapping[str, Mapping[str, float]]

ENABLED = "enabled"
_MEMBERS = ("profile", "detectors")


class SettingsError(ValueError):
    """Settings that name what there is not, or set what cannot be.

    Attributes:
        problems: a sentence each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Overrides:
    """One layer: what it sets, and nothing else.

    Attributes:
        source: where it comes from, in words.
    """

    source: str = ""
    profile: str | None = None
    values: Values = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What `read` takes."""
        profile = {} if self.profile is None else {"profile": self.profile}
        return {**profile, "detectors": {kind: dict(v) for kind, v in self.values.items()}}


@dataclass(frozen=True, slots=True)
class Effective:
    """What one run is judged by.

    Attributes:
        profile: what the project's losses are, where that was said.
        values: of every kind `enabled`, and under the first kind of each detector its thresholds.
        sources: kind -> name -> which layer set it; of what was set at all.
    """

    profile: str | None
    values: Values
    sources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def off(self) -> frozenset[str]:
        """Kinds that are switched off."""
        return frozenset(kind for kind, v in self.values.items() if not v.get(ENABLED, True))

    def policy(self, detector: type[Detector[Any]]) -> Policy:
        """The thresholds of a detector.

        What another version kept and this one would not take is as this one declares it.
        """
        values = self.values.get(detector.kinds[0], {})
        taken: dict[str, float] = {}
        for threshold in thresholds(detector.policies):
            with suppress(ValueError):
                given = values.get(threshold.name, threshold.default)
                taken[threshold.name] = threshold.checked(given)
        return made(detector.policies, taken)

    def to_json(self) -> dict[str, Any]:
        """For the row that is kept with the run."""
        return {
            "profile": self.profile,
            "detectors": {kind: dict(values) for kind, values in self.values.items()},
            "sources": {kind: dict(sources) for kind, sources in self.sources.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Effective:
        """What `to_json` gave."""
        return cls(data["profile"], data["detectors"], data["sources"])


def read(data: object, detectors: Detectors, *, source: str) -> Overrides:
    """A layer, out of JSON or TOML: `{"profile": ..., "detectors": {kind: {name: value}}}`.

    In the place of a detector's map, `false` and `true` switch it off and on.

    Raises:
        SettingsError: with everything that is wrong with it.
    """
    if not isinstance(data, Mapping):
        raise SettingsError([f"settings must be a map of {' and '.join(_MEMBERS)}"])
    problems = [
        f"{name!r} is none of {', '.join(_MEMBERS)}" for name in data if name not in _MEMBERS
    ]
    profile = data.get("profile")
    if profile is not None and profile not in PROFILES:
        problems.append(f"profile {profile!r} is none of {', '.join(PROFILES)}")
    given = data.get("detectors", {})
    if not isinstance(given, Mapping):
        raise SettingsError([*problems, "detectors must be a map from kinds to their settings"])
    owners = {kind: detector for detector in detectors for kind in detector.kinds}
    values: dict[str, dict[str, float]] = {}
    for kind, wanted in _by_kind(given, owners):
        try:
            values[kind] = _read_one(kind, wanted, owners)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError(problems)
    return Overrides(source, profile, values)


def effective(layers: Iterable[Overrides], detectors: Detectors) -> Effective:
    """What layers come to, the later before the earlier."""
    profile: str | None = None
    values = defaults(detectors)
    sources: dict[str, dict[str, str]] = {}
    for layer in layers:
        profile = layer.profile or profile
        for kind, given in layer.values.items():
            # What the layer was checked for may have been another server's detectors.
            known = {name: v for name, v in given.items() if name in values.get(kind, {})}
            if known:
                values[kind] |= known
                sources.setdefault(kind, {}).update(dict.fromkeys(known, layer.source))
    return Effective(profile, values, sources)


def defaults(detectors: Detectors) -> dict[str, dict[str, float]]:
    """What holds where nobody says anything."""
    found: dict[str, dict[str, float]] = {}
    for detector in detectors:
        for kind in detector.kinds:
            found[kind] = {ENABLED: True}
        for threshold in thresholds(detector.policies):
            found[detector.kinds[0]][threshold.name] = threshold.default
    return found


def _by_kind(
    given: Mapping[str, object], owners: Collection[str], before: str = ""
) -> Iterator[tuple[str, object]]:
    """Kinds and what is wanted of them; `[detectors.loss.spike]` is two maps, one in the other."""
    for name, wanted in given.items():
        kind = f"{before}{name}"
        inner = any(owner.startswith(f"{kind}.") for owner in owners)
        if inner and kind not in owners and isinstance(wanted, Mapping):
            yield from _by_kind(wanted, owners, f"{kind}.")
        else:
            yield kind, wanted


def _read_one(
    kind: str, wanted: object, owners: Mapping[str, type[Detector[Any]]]
) -> dict[str, float]:
    owner = owners.get(kind)
    if owner is None:
        close = difflib.get_close_matches(kind, owners, n=1)
        hint = f": did you mean {close[0]}?" if close else "."
        raise ValueError(f"there is no detector {kind!r}{hint} There are {', '.join(owners)}")
    if isinstance(wanted, bool):
        return {ENABLED: wanted}
    if not isinstance(wanted, Mapping):
        raise ValueError(f"{kind} must be true, false, or a map of its settings, not {wanted!r}")
    switch = {name: value for name, value in wanted.items() if name == ENABLED}
    for value in switch.values():
        if not isinstance(value, bool):
            raise ValueError(f"{kind}: {ENABLED} must be true or false, not {value!r}")
    rest = {name: value for name, value in wanted.items() if name != ENABLED}
    first = owner.kinds[0]
    if rest and kind != first:
        raise ValueError(
            f"{kind} is judged together with {first}; write {', '.join(rest)} under {first}"
        )
    try:
        policy = made(owner.policies, rest)
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from None
    return {**switch, **{name: getattr(policy, name) for name in rest}}
