"""Detectors of other packages: what they declare under the entry point group of this name."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rankscope.server.detectors.base import Detector
from rankscope.server.detectors.policy import thresholds
from rankscope.server.detectors.registry import KINDS

GROUP = "rankscope.detectors"

# As long as a kind may be where alerts are kept.
_LONGEST = 64
_KIND = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Installed:
    """The detectors of this process.

    Attributes:
        detectors: our own, then those of other packages by their names.
        origins: kind -> distribution and version; of other packages' kinds.
        failures: entry point -> why its detector is not there.
    """

    detectors: tuple[type[Detector[Any]], ...]
    origins: Mapping[str, str]
    failures: Mapping[str, str]

    @property
    def kinds(self) -> tuple[str, ...]:
        """All that can be found: ours in their order, then those of other packages."""
        return (*KINDS, *self.origins)


def load(own: Sequence[type[Detector[Any]]]) -> Installed:
    """Our own detectors and those that installed packages bring.

    A package that cannot be used is left out, and that is said: it must not end the server.
    """
    found = [*own]
    origins: dict[str, str] = {}
    failures: dict[str, str] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda p: (p.name, p.value)):
        origin = _origin(point)
        try:
            detector = _loaded(point, {*KINDS, *origins})
        # Anything may happen in a module of somebody else's.
        except Exception as error:
            failures[point.name[:_LONGEST]] = f"{point.value} of {origin}: {error!r}"
            _logger.exception("the detector %s of %s is left out", point.value, origin)
            continue
        found.append(detector)
        origins |= dict.fromkeys(detector.kinds, origin)
    return Installed(tuple(found), origins, failures)


def _loaded(point: EntryPoint, taken: set[str]) -> type[Detector[Any]]:
    detector = point.load()
    if not (isinstance(detector, type) and issubclass(detector, Detector)):
        raise TypeError("it is no subclass of rankscope.server.detectors.base.Detector")
    if not detector.kinds:
        raise ValueError("it declares no kind")
    for kind in detector.kinds:
        if not _KIND.fullmatch(kind) or len(kind) > _LONGEST:
            raise ValueError(f"its kind {kind!r} is no name like group.what")
        if kind in taken:
            raise ValueError(f"its kind {kind} is taken")
    thresholds(detector.policies)
    # It has to take the thresholds that a project sets.
    detector(detector.policies())
    return detector


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
