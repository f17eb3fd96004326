"""Whether a view of a run has changed, without reading its points."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, func, select

from rankscope.server.storage import schema
from rankscope.server.storage.maintenance import rollups, watermarks

# Batches since the last compaction that are examined one by one.
_MAX_NEW = 5000


def last_change(
    connection: Connection,
    *,
    run: int,
    ranks: Collection[int] | None,
    from_step: int | None,
    to_step: int | None,
    max_points: int,
) -> int:
    """The last arrival that may have changed a view of some ranks and steps, both ends included."""
    if from_step is not None and to_step is not None:
        # Buckets at the ends are whole ones, at most so wide.
        widest = rollups.FANOUT * (rollups.BASE + 2 * (to_step - from_step) // max_points)
        from_step = max(0, from_step - widest)
        to_step = min(to_step + widest, 2**63 - 1)
    else:
        # Where the ends are open, the buckets' width depends on all there is.
        from_step = to_step = None
    watermark = watermarks.load(connection, run=run)
    r, c = schema.run.c, schema.chunk.c
    newest: int = connection.scalar(select(r.arrivals).where(r.key == run)) or 0
    if newest - watermark.arrival > _MAX_NEW:
        return newest
    new = select(func.max(c.arrival)).where(c.run == run, c.arrival > watermark.arrival)
    if from_step is not None:
        # Sums: not by the primary key.
        new = new.where(c.first_step + 0 <= to_step, c.last_step >= from_step)
    if ranks is not None:
        new = new.where((c.rank + 0).in_(list(ranks)))
    found = connection.scalar(new)
    return max(watermark.touched_at(from_step, to_step), 0 if found is None else found)
