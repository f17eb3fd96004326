"""Series of batches as rows of `chunk`: those with the same steps side by side in one row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from sqlalchemy import Connection

from rankscope.agent import wire
from rankscope.server.storage.database.packing import pack, pack_steps
from rankscope.server.storage.ingest.dictionary import RunDictionary, Series


@dataclass(frozen=True, slots=True)
class Block:
    """One row: series of a layout at the same steps.

    Attributes:
        steps: ascending.
        values: of each series in the layout's order, as bytes.
    """

    layout: int
    first_step: int
    last_step: int
    points: int
    steps: bytes | None
    values: bytes


def blocks(connection: Connection, dictionary: RunDictionary, batch: wire.Batch) -> Iterator[Block]:
    """All points of a batch but those of single tensors."""
    columns = [
        (Series(kind, name), column)
        for kind, of_kind in (("scalar", batch.columns), ("word", batch.words))
        for name, column in of_kind.items()
        if len(column.steps)
    ]
    if not columns:
        return
    numbers = dictionary.numbers(connection, [series for series, _ in columns])
    # The decoder makes equal steps one object, which saves to compare them.
    keys: dict[int, bytes | int] = {}
    together: dict[bytes | int, list[tuple[int, wire.Column]]] = {}
    for series, column in columns:
        at = id(column.steps)
        if at not in keys:
            keys[at] = column.steps.tobytes()
        together.setdefault(keys[at], []).append((numbers[series], column))
    for members in together.values():
        members.sort(key=_number)
        for some in dictionary.grouped(connection, [number for number, _ in members]):
            yield _block(some.layout, members[some.first : some.end])


def _number(member: tuple[int, wire.Column]) -> int:
    return member[0]


def _block(layout: int, members: list[tuple[int, wire.Column]]) -> Block:
    steps = members[0][1].steps
    order = _ascending(steps)
    if order is not None:
        steps = steps[order]
        values = b"".join([pack(column.values[order]) for _, column in members])
    else:
        values = b"".join([pack(column.values) for _, column in members])
    return Block(
        layout=layout,
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        points=len(steps),
        steps=pack_steps(steps),
        values=values,
    )


def _ascending(steps: wire.Int64) -> wire.Int64 | None:
    """Positions that make steps ascend, of two values at one step the later one; None for all."""
    if len(steps) == 1 or bool((steps[1:] > steps[:-1]).all()):
        return None
    order = np.argsort(steps, kind="stable")
    ordered = steps[order]
    stands: wire.Int64 = order[np.append(ordered[1:] > ordered[:-1], True)]
    return stands
