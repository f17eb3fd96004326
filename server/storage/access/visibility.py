"""Whose runs the request in progress may see: those of some projects, or all.

Every query that begins with a name or an id (of a run, an alert, a silence) asks here, so that no
route can forget to: what may not be seen is as if it were not there. Outside a request, and for
whoever is not bound to projects, everything is visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from sqlalchemy import ColumnElement, true

_projects: ContextVar[frozenset[str] | None] = ContextVar("visible_projects", default=None)


@contextmanager
def limited_to(projects: frozenset[str] | None) -> Iterator[None]:
    """Within the block, and in threads and tasks begun in it, these are visible; None: all."""
    before = _projects.set(projects)
    try:
        yield
    finally:
        _projects.reset(before)


def visible(project: str) -> bool:
    """Whether runs of a project may be seen."""
    projects = _projects.get()
    return projects is None or project in projects


def of_visible(column: ColumnElement[str]) -> ColumnElement[bool]:
    """Condition on a column of projects."""
    projects = _projects.get()
    return true() if projects is None else column.in_(sorted(projects))
