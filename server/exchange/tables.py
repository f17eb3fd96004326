"""Points as a table of four columns: `metric`, `rank`, `step`, `value`; one line a point."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankscope.server.exchange.points import Points, places, require

COLUMNS = ("metric", "rank", "step", "value")


class CsvWriter:
    """Writes a CSV file (RFC 4180 but for its line ends, UTF-8, a header).

    Numbers have as many digits as it takes to read the same number again; those that are none are
    `NaN`, `inf` and `-inf`: polars takes no other spelling for numbers; pandas, DuckDB and numpy
    take these too.

    Raises:
        ExchangeError: the path is a folder or no ordinary file, or there is no folder for it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path, self._part = places(path)
        self._file = self._part.open("w", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._rows.writerow(COLUMNS)

    def write(self, points: Points) -> None:
        """Writes some points of a series."""
        steps, values = points.steps.tolist(), points.values.tolist()
        self._rows.writerows(
            (points.metric, points.rank, step, "NaN" if value != value else repr(value))
            for step, value in zip(steps, values, strict=True)
        )

    def close(self) -> None:
        """Puts the file into its place."""
        self._file.close()
        self._part.replace(self._path)

    def abandon(self) -> None:
        """Removes what was written."""
        # Where the disk is full, closing writes what is left, and fails once more.
        with contextlib.suppress(OSError):
            self._file.close()
        self._part.unlink(missing_ok=True)


class ParquetWriter:
    """Writes a Parquet file; `metric` is a dictionary of strings, the rest int32, int64, double.

    What is known of the run stands as JSON under `rankscope` in the metadata of its schema.

    Raises:
        ExchangeError: pyarrow is not installed, the path is a folder or no ordinary file, or there
            is no folder for it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._arrow = require("pyarrow", "parquet", "Parquet")
        parquet = require("pyarrow.parquet", "parquet", "Parquet")
        self._path, self._part = places(path)
        arrow = self._arrow
        self._schema = arrow.schema(
            [
                ("metric", arrow.dictionary(arrow.int32(), arrow.string())),
                ("rank", arrow.int32()),
                ("step", arrow.int64()),
                ("value", arrow.float64()),
            ],
            metadata={"rankscope": json.dumps(about)},
        )
        self._waiting: list[Any] = []
        self._count = 0
        try:
            self._writer = parquet.ParquetWriter(self._part, self._schema)
        except OSError:
            self._part.unlink(missing_ok=True)
            raise

    def write(self, points: Points) -> None:
        """Writes some points of a series, once there are enough for a group of rows."""
        arrow, count = self._arrow, len(points.steps)
        metric = arrow.DictionaryArray.from_arrays(
            arrow.repeat(arrow.scalar(0, arrow.int32()), count), arrow.array([points.metric])
        )
        rank = arrow.repeat(arrow.scalar(points.rank, arrow.int32()), count)
        # A NaN is a number here and no missing one.
        step, value = arrow.array(points.steps), arrow.array(points.values, from_pandas=False)
        self._waiting.append(arrow.table([metric, rank, step, value], schema=self._schema))
        self._count += count
        if self._count >= _ROWS_OF_A_GROUP:
            self._flush()

    def close(self) -> None:
        """Puts the file into its place."""
        self._flush()
        self._writer.close()
        self._part.replace(self._path)

    def abandon(self) -> None:
        """Removes what was written."""
        with contextlib.suppress(OSError):
            self._writer.close()
        self._part.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(self._arrow.concat_tables(self._waiting).unify_dictionaries())
        self._waiting, self._count = [], 0


# Small series share a group: one each would make files of which most is index.
_ROWS_OF_A_GROUP = 500_000
