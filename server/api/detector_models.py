"""The public JSON of detectors and their settings."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rankscope.server.api.models import Items, Model, Number


class DetectorChanges(Model):
    """Settings to change: kind -> `enabled` and thresholds; null takes a setting back."""

    profile: str | None = None
    # Checked by `detectors.settings.read`, which says what there is instead.
    detectors: dict[str, Any] = {}


class DetectorThreshold(BaseModel):
    """A number that a detector judges by, and between which values it may lie."""

    name: str
    default: Number
    unit: str
    meaning: str
    least: Number
    most: Number


class DetectorAbout(BaseModel):
    """A detector: what it finds, what it reads, what can be set of it."""

    kinds: list[str]
    summary: str
    origin: str
    needs: list[str]
    wants: list[str]
    min_ranks: int
    thresholds: list[DetectorThreshold]


class ProfileAbout(BaseModel):
    """A sort of loss: kinds that do not apply to it, and those that are information at most."""

    name: str
    what: str
    without: dict[str, str]
    lenient: list[str]


class Detectors(Items[DetectorAbout]):
    """All detectors of the server; `failures` are those of other packages that it cannot use."""

    profiles: list[ProfileAbout]
    failures: dict[str, str]


class DetectorSettings(BaseModel):
    """Effective settings.

    `detectors` has all of them: `enabled` of each kind, and thresholds under the first kind of each
    detector. `sources` says of those that somebody set where that was. `profile` is null where
    nobody has declared one.
    """

    profile: str | None
    detectors: dict[str, dict[str, bool | int | float]]
    sources: dict[str, dict[str, str]]


class ProjectDetectors(DetectorSettings):
    """What runs of a project that begin now are judged by; `overrides` was set by this route."""

    project: str
    overrides: dict[str, Any]
