"""The detectors: those of the registry, checked when loaded, and those of other packages."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from rankscope.server.detectors.registry import KINDS, classes

if TYPE_CHECKING:
    from rankscope.server.detectors.base import Detector
    from rankscope.server.detectors.plugins import Installed
    from rankscope.server.detectors.settings import Effective

    DETECTORS: tuple[type[Detector[Any]], ...]

# What a user reads about a detector is its docstring; its first paragraph needs no heading.
SECTIONS = ("Statistic:", "Severity:", "Evidence:", "Source:")


@cache
def installed() -> Installed:
    """All detectors that this process has, ours and those of other packages."""
    from rankscope.server.detectors.plugins import load

    own = classes()
    validate(own)
    unknown = set(KINDS).difference(*(detector.kinds for detector in own))
    if unknown:
        raise ValueError(f"the registry has {sorted(unknown)}, which no class of it declares")
    return load(own)


def build(settings: Effective | None = None) -> list[Detector[Any]]:
    """One of each for one run: all with their own thresholds, or as settings have it."""
    found = installed().detectors
    if settings is None:
        return [detector() for detector in found]
    return [
        detector.of(settings.policy)
        for detector in found
        if not settings.off.issuperset(detector.kinds)
    ]


def validate(detectors: Iterable[type[Detector[Any]]]) -> None:
    """Refuses a list that would answer twice, or for something nobody knows.

    Raises:
        ValueError: a kind is unknown or declared twice, or a docstring lacks a section.
        TypeError: a threshold has no default or no meaning.
    """
    from rankscope.server.detectors.policy import thresholds

    owners: dict[str, str] = {}
    for detector in detectors:
        name = detector.__name__
        if not detector.kinds:
            raise ValueError(f"{name} declares no kind")
        for kind in detector.kinds:
            if kind not in KINDS:
                raise ValueError(f"{name} declares {kind}, which the registry does not have")
            if kind in owners:
                raise ValueError(f"{name} and {owners[kind]} both declare {kind}")
            owners[kind] = name
        described = [line.strip() for line in (detector.__doc__ or "").splitlines()]
        missing = [section for section in SECTIONS if section not in described]
        if missing:
            raise ValueError(f"the docstring of {name} lacks {', '.join(missing)}")
        thresholds(detector.policies)


def __getattr__(name: str) -> Any:
    # Only whoever asks for the classes pays for importing them all.
    if name == "DETECTORS":
        return classes()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
