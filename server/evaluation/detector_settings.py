"""Settings of the detectors: the file that a server is given, and what a project comes to."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from rankscope.server.detectors import installed
from rankscope.server.detectors.settings import (
    Effective,
    Overrides,
    SettingsError,
    effective,
    read,
)
from rankscope.server.storage.judgement import detector_settings

OF_THE_API = "set for the project"


@dataclass(frozen=True, slots=True)
class Given:
    """What a server was given at its start.

    Attributes:
        general: for all projects.
        projects: for some, by name.
    """

    general: Overrides = field(default_factory=Overrides)
    projects: Mapping[str, Overrides] = field(default_factory=dict)

    def layers(self, project: str) -> tuple[Overrides, ...]:
        """What holds for a project, the later before the earlier."""
        own = self.projects.get(project)
        return (self.general,) if own is None else (self.general, own)


def read_file(path: Path) -> Given:
    """Settings out of a TOML file: `profile`, `detectors`, and `projects.<name>` with the same.

    Raises:
        ValueError: with everything that is wrong with it.
        OSError: it cannot be read.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    projects = data.pop("projects", {})
    problems: list[str] = []

    def layer(part: Any, place: str, source: str) -> Overrides:
        try:
            return read(part, installed().detectors, source=source)
        except SettingsError as error:
            problems.extend(f"{place}{problem}" for problem in error.problems)
            return Overrides()

    general = layer(data, "", "the server's file")
    if not isinstance(projects, dict):
        problems.append("projects must be a map from projects to their settings")
        projects = {}
    own = {
        name: layer(part, f"projects.{name}: ", f"the server's file, for {name}")
        for name, part in projects.items()
    }
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return Given(general, own)


def project_overrides(connection: Connection, project: str) -> Overrides:
    """What was set for a project by the API; of that, what this server's detectors know."""
    stored = detector_settings.load_project(connection, project=project)
    return Overrides(OF_THE_API, stored.get("profile"), stored.get("detectors", {}))


def for_project(connection: Connection, given: Given, project: str) -> Effective:
    """What the runs of a project that begin now are judged by."""
    layers = (*given.layers(project), project_overrides(connection, project))
    return effective(layers, installed().detectors)
