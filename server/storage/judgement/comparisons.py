"""Comparisons of the ranks, run-length encoded in the order of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, func, insert, select, tuple_, update

from rankscope.agent.wire import STAGES
from rankscope.server.storage import schema
from rankscope.server.storage.database.packing import pack, unpack
from rankscope.server.storage.database.plain import plain
from rankscope.server.storage.ingest.fingerprints import fingerprint_of, load_contents
from rankscope.server.window import (
    Comparison,
    FingerprintPart,
    TensorDifference,
    joined_fingerprint,
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A comparison that held at every compared step from its own to `until_step`."""

    comparison: Comparison
    until_step: int
    checked: int


def write_comparisons(
    connection: Connection, *, run: int, comparisons: Sequence[Comparison]
) -> None:
    """Stores comparisons, given in the order of steps; what is there already is left alone.

    One of equal ranks extends a stretch of equal ranks; one of digests only with the same clusters
    extends a stretch, which keeps its distances; any other begins a stretch of its own.
    """
    t = schema.comparison
    open_rows: dict[str, dict[str, Any]] = {}
    new: list[dict[str, Any]] = []
    grown: dict[int, dict[str, Any]] = {}
    for comparison in comparisons:
        row = open_rows.get(comparison.stage) or _last_row(connection, run, comparison.stage)
        if row is not None:
            open_rows[comparison.stage] = row
            if comparison.step <= row["until_step"]:
                continue
            if _continues(row, comparison):
                row["until_step"] = comparison.step
                row["checked"] += 1
                if row["stored"]:
                    grown[id(row)] = row
                continue
        row = _row(run, comparison)
        open_rows[comparison.stage] = row
        new.append(row)
    for row in grown.values():
        connection.execute(
            update(t)
            .where(t.c.run == run, t.c.stage == row["stage"], t.c.step == row["step"])
            .values(until_step=row["until_step"], checked=row["checked"])
        )
    if new:
        connection.execute(
            insert(t), [{k: v for k, v in row.items() if k != "stored"} for row in new]
        )


def _last_row(connection: Connection, run: int, stage: str) -> dict[str, Any] | None:
    row = _newest_row(connection, run, stage)
    return None if row is None else dict(row._mapping) | {"stored": True}


def _newest_row(connection: Connection, run: int, stage: str) -> Row[Any] | None:
    t = schema.comparison
    return connection.execute(
        select(t).where(t.c.run == run, t.c.stage == stage).order_by(t.c.step.desc()).limit(1)
    ).first()


def newest(connection: Connection, *, run: int, stage: str) -> Comparison | None:
    """The newest comparison of a link of the chain; None where it was never compared."""
    row = _newest_row(connection, run, stage)
    return None if row is None else _stretch(row).comparison


def _continues(row: dict[str, Any], comparison: Comparison) -> bool:
    if row["ranks"] != pack(comparison.ranks) or row["missing"] != list(comparison.missing):
        return False
    if comparison.equal:
        return bool(row["equal"])
    return not comparison.tensors and bool(row["clusters"] == pack(comparison.clusters))


def _row(run: int, comparison: Comparison) -> dict[str, Any]:
    return {
        "run": run,
        "stage": comparison.stage,
        "step": comparison.step,
        "until_step": comparison.step,
        "checked": 1,
        "equal": comparison.equal,
        "decided": comparison.decided,
        "ranks": pack(comparison.ranks),
        "clusters": pack(comparison.clusters),
        "distance": pack(comparison.distance),
        "relative": pack(comparison.relative),
        "tensors": [
            {
                "name": d.name,
                "shape": list(d.shape),
                "ranks": list(d.ranks),
                "distance": plain(d.distance),
                "relative": plain(d.relative),
                "buckets": d.buckets,
                "table": d.table,
            }
            for d in comparison.tensors
        ],
        "tensor_count": comparison.tensor_count,
        "missing": list(comparison.missing),
        "stored": False,
    }


def list_comparisons(
    connection: Connection,
    *,
    run: int,
    limit: int,
    stage: str | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    after: tuple[int, str] | None = None,
) -> tuple[list[Stretch], tuple[int, str] | None]:
    """Stretches that touch a range of steps, in the order of steps, and where the next page begins.

    Args:
        after: what the page before ended with: (step, stage).
    """
    t = schema.comparison
    query = select(t).where(t.c.run == run).order_by(t.c.step, t.c.stage).limit(limit + 1)
    if stage is not None:
        query = query.where(t.c.stage == stage)
    if from_step is not None:
        query = query.where(t.c.until_step >= from_step)
    if to_step is not None:
        query = query.where(t.c.step <= to_step)
    if after is not None:
        query = query.where(tuple_(t.c.step, t.c.stage) > after)
    rows = connection.execute(query).all()
    more = len(rows) > limit
    rows = rows[:limit]
    return [_stretch(r) for r in rows], (rows[-1].step, rows[-1].stage) if more else None


def list_stages(connection: Connection, *, run: int) -> tuple[str, ...]:
    """Links that were compared in a run, in the order of the chain."""
    t = schema.comparison
    found = set(connection.scalars(select(t.c.stage).where(t.c.run == run).distinct()))
    return tuple(s for s in STAGES if s in found)


def _stretch(row: Row[Any]) -> Stretch:
    return Stretch(
        Comparison(
            step=row.step,
            stage=row.stage,
            ranks=unpack(row.ranks, np.int64),
            clusters=unpack(row.clusters, np.int64),
            distance=unpack(row.distance, np.float64),
            relative=unpack(row.relative, np.float64),
            decided=row.decided,
            tensors=tuple(
                TensorDifference(
                    name=d["name"],
                    shape=tuple(d["shape"]),
                    ranks=tuple(d["ranks"]),
                    distance=float(d["distance"]),
                    relative=float(d["relative"]),
                    buckets=d["buckets"],
                    table=d["table"],
                )
                for d in row.tensors
            ),
            tensor_count=row.tensor_count,
            missing=tuple(row.missing),
        ),
        until_step=row.until_step,
        checked=row.checked,
    )


def sampled_fingerprints(
    connection: Connection,
    *,
    run: int,
    stage: str,
    from_step: int | None = None,
    to_step: int | None = None,
) -> list[FingerprintPart]:
    """Fingerprints of all ranks at the latest step of a range at which most ranks were sampled."""
    f = schema.fingerprint
    held = select(f.c.step, func.count(func.distinct(f.c.rank)).label("ranks")).where(
        f.c.run == run, f.c.stage == stage, f.c.buckets > 0
    )
    if from_step is not None:
        held = held.where(f.c.step >= from_step)
    if to_step is not None:
        held = held.where(f.c.step <= to_step)
    rows = connection.execute(held.group_by(f.c.step).order_by(f.c.step.desc()).limit(64)).all()
    if not rows:
        return []
    # The newest steps may not be in from all ranks yet.
    most = max(row.ranks for row in rows)
    step = next(row.step for row in rows if row.ranks == most)
    newest: dict[int, dict[str, FingerprintPart]] = {}
    of_step = connection.execute(
        select(f)
        .where(f.c.run == run, f.c.stage == stage, f.c.step == step)
        .order_by(f.c.rank, f.c.attempt)
    ).all()
    contents = load_contents(connection, run=run, rows=of_step)
    for row in of_step:
        part = FingerprintPart(row.rank, row.attempt, fingerprint_of(row, contents))
        newest.setdefault(row.rank, {})[row.table] = part
    return [_joined(newest[rank]) for rank in sorted(newest)]


def _joined(parts: dict[str, FingerprintPart]) -> FingerprintPart:
    last = max(parts.values(), key=lambda part: part.attempt)
    # What only an earlier attempt had is not there any more.
    fingerprints = {name: p.fingerprint for name, p in parts.items() if p.attempt == last.attempt}
    return FingerprintPart(last.rank, last.attempt, joined_fingerprint(fingerprints))
