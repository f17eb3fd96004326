"""Detectors and their settings.

Written by docs/client_models.py (`make docs`). Do not edit by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DetectorThreshold:
    """A number that a detector judges by, and between which values it may lie."""

    name: str
    default: float
    unit: str
    meaning: str
    least: float
    most: float


@dataclass(frozen=True)
class DetectorAbout:
    """A detector: what it finds, what it reads, what can be set of it."""

    kinds: list[str]
    summary: str
    origin: str
    needs: list[str]
    wants: list[str]
    min_ranks: int
    thresholds: list[DetectorThreshold]


@dataclass(frozen=True)
class ProfileAbout:
    """A sort of loss: kinds that do not apply to it, and those that are information at most."""

    name: str
    what: str
    without: dict[str, str]
    lenient: list[str]


@dataclass(frozen=True)
class Detectors:
    """All detectors of the server; `failures` are those of other packages that it cannot use."""

    items: list[DetectorAbout]
    profiles: list[ProfileAbout]
    failures: dict[str, str]


@dataclass(frozen=True)
class DetectorSettings:
    """Effective settings.

    `detectors` has all of them: `enabled` of each kind, and thresholds under the first kind of each
    detector. `sources` says of those that somebody set where that was. `profile` is null where
    nobody has declared one.
    """

    profile: str | None
    detectors: dict[str, dict[str, bool | int | float]]
    sources: dict[str, dict[str, str]]


@dataclass(frozen=True)
class ProjectDetectors(DetectorSettings):
    """What runs of a project that begin now are judged by; `overrides` was set by this route."""

    project: str
    overrides: dict[str, Any]
