"""Detectors: which there are, what a project sets of them, what a run was judged by."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from sqlalchemy import Connection, Engine

from rankscope.server import detectors
from rankscope.server.api import detector_models
from rankscope.server.api.deps import By, Database, RunId, known_run
from rankscope.server.api.problems import Problem
from rankscope.server.detectors.base import Detector
from rankscope.server.detectors.policy import thresholds
from rankscope.server.detectors.profiles import PROFILES
from rankscope.server.detectors.settings import SettingsError, read
from rankscope.server.evaluation.detector_settings import (
    OF_THE_API,
    Given,
    for_project,
    project_overrides,
)
from rankscope.server.storage.access import audit
from rankscope.server.storage.access.audit import Actor
from rankscope.server.storage.access.visibility import visible
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.judgement import detector_settings

router = APIRouter(tags=["detectors"])

# As long as the column is.
Project = Annotated[str, Path(description="project", min_length=1, max_length=250)]


def _given(request: Request) -> Given:
    given: Given = request.app.state.given
    return given


FromFile = Annotated[Given, Depends(_given)]


@router.get("/detectors")
def list_detectors() -> detector_models.Detectors:
    """All detectors of this server with their thresholds, and the profiles of losses."""
    there = detectors.installed()
    return detector_models.Detectors(
        items=[
            _about(detector, there.origins.get(detector.kinds[0], "rankscope"))
            for detector in there.detectors
        ],
        profiles=[
            detector_models.ProfileAbout(
                name=name,
                what=profile.what,
                without=dict(profile.without),
                lenient=sorted(profile.lenient),
            )
            for name, profile in PROFILES.items()
        ],
        failures=dict(there.failures),
    )


@router.get("/projects/{project:path}/detectors")
def get_project(
    engine: Database, given: FromFile, project: Project
) -> detector_models.ProjectDetectors:
    """What runs of a project that begin now are judged by."""
    _may_see(project)
    with reading(engine) as connection:
        return _of_project(connection, given, project)


@router.put("/projects/{project:path}/detectors")
def put_project(
    engine: Database,
    given: FromFile,
    project: Project,
    wanted: detector_models.DetectorChanges,
    by: By,
) -> detector_models.ProjectDetectors:
    """Sets what differs for a project, in the place of what was set before by this route."""
    return _save(engine, given, project, by, _merged({}, _plain(wanted)), replace=True)


@router.patch("/projects/{project:path}/detectors")
def patch_project(
    engine: Database,
    given: FromFile,
    project: Project,
    wanted: detector_models.DetectorChanges,
    by: By,
) -> detector_models.ProjectDetectors:
    """Changes some settings of a project; null takes back what was set."""
    return _save(engine, given, project, by, _plain(wanted), replace=False)


@router.get("/runs/{run}/detectors")
def get_run_settings(engine: Database, run: RunId) -> detector_models.DetectorSettings:
    """What a run is judged by, from its first step to its last and whenever it is replayed."""
    with reading(engine) as connection:
        row = known_run(connection, run)
        judged_by = detector_settings.load_run(connection, run=row.key)
    if judged_by is None:
        raise Problem(404, f"run {run!r} has not been examined yet; ask again in a second")
    declared = row.config.get("profile")
    return detector_models.DetectorSettings.model_validate(
        judged_by | {"profile": declared or judged_by["profile"]}
    )


def _may_see(project: str) -> None:
    if not visible(project):
        raise Problem(404, f"there is no project {project!r}")


def _save(
    engine: Engine,
    given: Given,
    project: str,
    by: Actor,
    changes: Mapping[str, Any],
    *,
    replace: bool,
) -> detector_models.ProjectDetectors:
    _may_see(project)
    with writing(engine) as connection:
        before = (
            {}
            if replace
            else detector_settings.load_project(connection, project=project, to_change=True)
        )
        after = _merged(before, changes)
        try:
            checked = read(after, detectors.installed().detectors, source=OF_THE_API)
        except SettingsError as error:
            raise Problem(422, str(error), problems=list(error.problems)) from error
        detector_settings.save_project(
            connection, project=project, settings=checked.to_json(), now=time.time()
        )
        audit.record(connection, by, "project.detectors", project, checked.to_json())
        return _of_project(connection, given, project)


def _of_project(
    connection: Connection, given: Given, project: str
) -> detector_models.ProjectDetectors:
    return detector_models.ProjectDetectors.model_validate(
        {
            "project": project,
            "overrides": project_overrides(connection, project).to_json(),
            **for_project(connection, given, project).to_json(),
        }
    )


def _plain(wanted: detector_models.DetectorChanges) -> dict[str, Any]:
    """What the client sent, and nothing that it did not."""
    return wanted.model_dump(exclude_unset=True)


def _merged(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7396: maps are merged, null takes away."""
    merged = dict(before)
    for name, value in changes.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            old = merged.get(name)
            merged[name] = _merged(old if isinstance(old, Mapping) else {}, value)
        elif isinstance(value, bool) and isinstance(merged.get(name), Mapping):
            # `"loss.spike": false` says nothing of its thresholds.
            merged[name] = {**merged[name], "enabled": value}
        else:
            merged[name] = value
    return merged


def _about(detector: type[Detector[Any]], origin: str) -> detector_models.DetectorAbout:
    # Its own: it would inherit that of all detectors.
    described = inspect.cleandoc(detector.__doc__ or "")
    return detector_models.DetectorAbout(
        kinds=list(detector.kinds),
        summary=" ".join(described.split("\n\n")[0].split()),
        origin=origin,
        needs=list(detector.needs),
        wants=list(detector.wants),
        min_ranks=detector.min_ranks,
        thresholds=[
            detector_models.DetectorThreshold(
                name=t.name,
                default=t.default,
                unit=t.unit,
                meaning=t.meaning,
                least=t.least,
                most=t.most,
            )
            for t in thresholds(detector.policies)
        ],
    )
