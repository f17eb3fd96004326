"""Points as a rank collects them, step by step, and in series, as the server wants them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from rankscope.agent.wire.batch import Batch, Column, Int64, Row


def in_columns(batch: Batch) -> Batch:
    """The same batch with what its rows say in columns."""
    if not (batch.rows or batch.word_rows):
        return batch
    return replace(
        batch,
        rows=(),
        word_rows=(),
        columns={**batch.columns, **columns_of(batch.rows, np.float64)},
        words={**batch.words, **columns_of(batch.word_rows, np.uint64)},
    )


def columns_of(rows: Iterable[Row], dtype: type[Any]) -> dict[str, Column]:
    """The points of rows by their names; of two for one series and step the later one stays.

    Series with the same steps share them, and all values lie in one array.
    """
    series: dict[str, dict[int, Any]] = {}
    for step, values in rows:
        for name, value in values.items():
            points = series.get(name)
            if points is None:
                points = series[name] = {}
            points[step] = value
    # In place of two calls of numpy for each series.
    every = itertools.chain.from_iterable(points.values() for points in series.values())
    values_of_all = np.fromiter(every, dtype, sum(map(len, series.values())))
    steps: dict[tuple[int, ...], Int64] = {}
    columns = {}
    end = 0
    for name, points in series.items():
        key = tuple(points)
        shared = steps.get(key)
        if shared is None:
            shared = steps[key] = np.fromiter(key, np.int64, len(key))
        begin, end = end, end + len(key)
        columns[name] = Column(shared, values_of_all[begin:end])
    return columns
