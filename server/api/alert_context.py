"""What is around an alert, of what the ranks have sent: lines, difference, settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import Connection

from rankscope.server.api import alert_models
from rankscope.server.api.models import time_of
from rankscope.server.storage.reading import runs

# Settings of one run that are shown, and characters of one: a table for a person.
_MOST_SETTINGS, _LONGEST = 500, 500


def context_of(
    connection: Connection, run: int, step: int, config: Mapping[str, Any]
) -> alert_models.AlertContext:
    """What is known around a step of a run.

    Args:
        run: its key.
        config: what its ranks said of themselves.
    """
    said = runs.git_diff(connection, run=run)
    return alert_models.AlertContext(
        console=[
            alert_models.ConsoleLines(
                rank=row.rank, step=row.step, at=time_of(row.at), lines=_lines(row.data)
            )
            for row in runs.consoles(connection, run=run, step=step)
        ],
        git_diff=None
        if said is None
        else alert_models.GitDiff(
            commit=str(said.get("commit", "")),
            diff=str(said.get("diff", "")),
            truncated=said.get("truncated") is True,
        ),
        settings=dict(
            pair for pair, _ in zip(_plain("", config), range(_MOST_SETTINGS), strict=False)
        ),
    )


def _lines(data: Mapping[str, Any]) -> list[str]:
    lines = data.get("lines")
    return [str(line) for line in lines] if isinstance(lines, list) else []


def _plain(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Plain values by dotted name; short lists of them are one."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _plain(f"{prefix}.{name}" if prefix else str(name), inner)
    elif value is None or isinstance(value, bool | int | float):
        yield prefix, value
    elif isinstance(value, str):
        yield prefix, value[:_LONGEST]
    elif isinstance(value, list):
        if all(one is None or isinstance(one, bool | int | float | str) for one in value):
            yield prefix, ", ".join(map(str, value))[:_LONGEST]
        else:
            for place, inner in enumerate(value):
                yield from _plain(f"{prefix}.{place}", inner)
