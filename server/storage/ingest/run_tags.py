"""Tags of runs in the database: one text, in which each stands between two line breaks."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import ColumnElement, Connection, select, update

from rankscope.agent import wire
from rankscope.server.storage import schema


class TooMany(ValueError):
    """A run would have more tags than it may have."""


def packed(named: Iterable[str]) -> str:
    """The text for the column."""
    return "".join(f"\n{tag}" for tag in sorted(named)) + "\n"


def unpacked(column: str | None) -> list[str]:
    """The tags of a row, by name."""
    return [tag for tag in (column or "").split("\n") if tag]


def has(tag: str) -> ColumnElement[bool]:
    """Whether a run has a tag."""
    return schema.run.c.tags.contains(f"\n{tag}\n", autoescape=True)


def change(
    connection: Connection, *, run: int, add: Collection[str], remove: Collection[str]
) -> list[str]:
    """Adds tags to a run and takes others off it; returns what it has then, by name.

    Args:
        run: key of the run.
        add: checked by `wire.tags.problem_of`.
        remove: those that it does not have make no difference.

    Raises:
        TooMany: they would be too many.
    """
    r = schema.run.c
    have = connection.scalar(select(r.tags).where(r.key == run).with_for_update())
    found = {*unpacked(have), *add} - {*remove}
    if len(found) > wire.tags.MOST:
        raise TooMany(f"a run has at most {wire.tags.MOST} tags; these would be {len(found)}")
    connection.execute(update(schema.run).where(r.key == run).values(tags=packed(found)))
    return sorted(found)
