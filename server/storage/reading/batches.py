"""What the ranks read, by the digests of their batches and of some of the samples in them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from sqlalchemy import Connection, select

from rankscope.agent.wire import BATCH_PART, NO_SAMPLE, SAMPLE_DIGESTS, SAMPLES_REPORTED, Int64
from rankscope.server.storage import schema
from rankscope.server.storage.ingest.dictionary import places_of, read_layouts
from rankscope.server.storage.maintenance import watermarks
from rankscope.server.storage.reading.points import read_points
from rankscope.server.window import BatchesRead

# Where both are posted, equal batches are known by the digest of a part.
_BATCHES = ("batch", BATCH_PART)


def read_batches(
    connection: Connection,
    *,
    run: int,
    most: int,
    from_step: int | None = None,
    to_step: int | None = None,
) -> BatchesRead:
    """Batches of all ranks over a range of steps, both ends included.

    Args:
        most: batches, of all ranks together; of more the steps at the end of the range are read.
    """
    m = schema.metric.c
    rows = connection.execute(
        select(m.id, m.name).where(
            m.run == run, m.kind == "word", m.name.in_((*_BATCHES, *SAMPLE_DIGESTS))
        )
    )
    numbers = {row.name: row.id for row in rows}
    layouts = read_layouts(connection, run=run)
    places = {name: places_of(layouts, number) for name, number in numbers.items()}
    holding = {layout for name in _BATCHES for layout in places.get(name, ())}
    span = _span(connection, run, holding, most, from_step, to_step)
    if span is None:
        return BatchesRead()
    ranks, first, last, complete = span
    watermark = watermarks.load(connection, run=run)

    def values(name: str) -> tuple[Int64, np.ndarray[tuple[int], np.dtype[np.uint64]]]:
        if name not in places:
            return np.empty(0, np.int64), np.empty(0, np.uint64)
        found = read_points(
            connection,
            run=run,
            places=places[name],
            ranks=ranks,
            watermark=watermark,
            first=first,
            last=last,
        )
        # Stored as they came: eight bytes that are no float.
        return (found.rank * span_of + found.steps - first), found.values.view(np.uint64)

    span_of = last - first + 1
    of_batches = [values(name) for name in _BATCHES]
    keys = np.unique(np.concatenate([at for at, _ in of_batches]))
    digests = np.zeros(len(keys), np.uint64)
    for at, found in of_batches:
        digests[np.searchsorted(keys, at)] = found
    samples = np.full((len(keys), SAMPLES_REPORTED), NO_SAMPLE, np.uint32)
    for n, name in enumerate(SAMPLE_DIGESTS):
        at, found = values(name)
        row = np.minimum(np.searchsorted(keys, at), len(keys) - 1)
        row, found = row[keys[row] == at], found[keys[row] == at]
        samples[row, 2 * n] = found >> np.uint64(32)
        samples[row, 2 * n + 1] = found & np.uint64(NO_SAMPLE)
    return BatchesRead(keys // span_of, keys % span_of + first, digests, samples, complete)


def _span(
    connection: Connection,
    run: int,
    layouts: Collection[int],
    most: int,
    from_step: int | None,
    to_step: int | None,
) -> tuple[list[int], int, int, bool] | None:
    """Ranks, first and last step of what is read, and whether that is all there is in the range."""
    c = schema.chunk.c
    query = select(c.rank, c.first_step, c.last_step, c.points).where(
        c.run == run, c.layout.in_(layouts)
    )
    if from_step is not None:
        query = query.where(c.last_step >= from_step)
    if to_step is not None:
        query = query.where(c.first_step <= to_step)
    rows = connection.execute(query).all()
    if not rows:
        return None
    rank, begin, end, points = np.array([tuple(row) for row in rows], np.int64).T
    first = int(begin.min()) if from_step is None else from_step
    last = int(end.max()) if to_step is None else to_step
    if int(points.sum()) > most:
        first = max(first, _first_of_newest(begin, np.minimum(end, last), points, most, last))
    complete = first <= int(begin.min()) or first == from_step
    return sorted(set(rank.tolist())), first, last, complete


def _first_of_newest(begin: Int64, end: Int64, points: Int64, most: int, last: int) -> int:
    """The step from which on there are about `most` points, by the mean density of each row."""
    density = points / np.maximum(end - begin + 1, 1)
    low, high = int(begin.min()), last
    while low < high:
        middle = (low + high) // 2
        held = (np.maximum(end - np.maximum(begin, middle) + 1, 0) * density).sum()
        if held > most:
            low = middle + 1
        else:
            high = middle
    return low
