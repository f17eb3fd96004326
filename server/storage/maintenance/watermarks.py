"""How far a run's roll-ups go, and which parts of a run have changed when: one small row a run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from sqlalchemy import Connection, select

from rankscope.agent.wire import Int64
from rankscope.server.storage import schema
from rankscope.server.storage.database import dialect
from rankscope.server.storage.database.packing import pack, unpack

_BLOCKS = 256
_WIDTH = 64
# Rows are merged to longer ones in this many goes.
TIERS = 2


@dataclass(slots=True)
class RankWatermark:
    """Of one rank.

    Attributes:
        end: all that came up to `Mark.arrival` with a step before it is in the roll-ups.
        last: the last step seen so far; -1 before any.
        waiting: rows of `chunk` that have come since it was last rolled up.
        longest: steps from the first to the last of the longest row of `chunk`, less one.
        merged: up to which step its rows are merged, for each tier of `merging.py`.
        short: where the last row begins that is short enough for that; -1 before any.
    """

    end: int = 0
    last: int = -1
    waiting: int = 0
    longest: int = 0
    merged: list[int] = field(default_factory=lambda: [0] * TIERS)
    short: int = -1


@dataclass(slots=True)
class Watermark:
    """Of one run.

    Attributes:
        number: rises with every change; 0 where there is no row yet.
        arrival: everything up to this arrival has been examined.
        touched: int64 [256]: the last arrival that brought a point of each `touched_width` steps.
    """

    number: int = 0
    arrival: int = 0
    ranks: dict[int, RankWatermark] = field(default_factory=dict)
    touched: Int64 = field(default_factory=lambda: np.zeros(_BLOCKS, np.int64))
    touched_width: int = _WIDTH

    def touch(self, first: Int64, last: Int64, arrival: Int64) -> None:
        """Takes note of steps that arrivals brought: int64 [N] each, arrivals ascending."""
        while int(last.max()) >= self.touched_width * _BLOCKS:
            pairs = self.touched.reshape(-1, 2).max(axis=1)
            self.touched = np.concatenate([pairs, np.zeros_like(pairs)])
            self.touched_width *= 2
        low, high = first // self.touched_width, last // self.touched_width
        for a, b in set(zip(low.tolist(), high.tolist(), strict=True)):
            newest = int(arrival[(low == a) & (high == b)][-1])
            part = self.touched[a : b + 1]
            np.maximum(part, newest, out=part)

    def touched_at(self, first: int | None, last: int | None) -> int:
        """The last arrival that may have changed anything from `first` to `last`."""
        a = 0 if first is None else min(first // self.touched_width, _BLOCKS)
        b = _BLOCKS if last is None else last // self.touched_width + 1
        return int(self.touched[a:b].max(initial=0))


def load(connection: Connection, *, run: int) -> Watermark:
    """The watermark of a run; one with number 0 where it has none."""
    t = schema.rollup_mark
    row = connection.execute(select(t).where(t.c.run == run)).first()
    if row is None:
        return Watermark()
    ranks = unpack(row.ranks, np.int64).reshape(-1, 5).tolist()
    merges = unpack(row.merges or b"", np.int64).reshape(-1, 2 + TIERS).tolist()
    merged = {rank: (ends, short) for rank, short, *ends in merges}
    return Watermark(
        row.number,
        row.arrival,
        {
            # What came before anything was merged may be short.
            rank: RankWatermark(end, last, waiting, longest, *merged.get(rank, ([0] * TIERS, last)))
            for rank, end, last, waiting, longest in ranks
        },
        unpack(row.touched, np.int64).copy(),
        row.touched_width,
    )


def save(connection: Connection, watermark: Watermark, *, run: int, pending: bool) -> bool:
    """Writes a watermark as the next number; False, with nothing written, if another was faster."""
    t = schema.rollup_mark
    ranks = [
        [rank, m.end, m.last, m.waiting, m.longest] for rank, m in sorted(watermark.ranks.items())
    ]
    merges = [[rank, m.short, *m.merged] for rank, m in sorted(watermark.ranks.items())]
    values = {
        "number": watermark.number + 1,
        "arrival": watermark.arrival,
        "pending": pending,
        "ranks": pack(np.array(ranks, np.int64)),
        "touched": pack(watermark.touched),
        "touched_width": watermark.touched_width,
        "merges": pack(np.array(merges, np.int64)),
    }
    if watermark.number == 0:
        made = dialect.insert(connection, t).on_conflict_do_nothing().values(run=run, **values)
        # Not by the number of rows, which drivers do not report every INSERT.
        saved = connection.execute(made.returning(t.c.run)).first() is not None
    else:
        changed = t.update().where(t.c.run == run, t.c.number == watermark.number).values(values)
        saved = connection.execute(changed.returning(t.c.run)).first() is not None
    watermark.number += saved
    return saved
