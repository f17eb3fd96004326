"""`metrics.csv` of Lightning's CSVLogger as a log; any CSV with a column `step` is read."""

from __future__ import annotations

import csv
from pathlib import Path

from rankscope.server.exchange.logs import Collected, Log, ranks_of
from rankscope.server.exchange.points import ExchangeError

NAME = "metrics.csv"


def find(source: Path) -> Path | None:
    """The file that is meant.

    Raises:
        ExchangeError: several are.
    """
    if source.is_file():
        return source
    if (own := source / NAME).is_file():
        return own
    below = sorted(source.rglob(NAME))
    if len(below) > 1:
        named = ", ".join(map(str, below[:10]))
        raise ExchangeError(f"{source} holds {len(below)} runs; name one of them: {named}")
    return below[0] if below else None


def read(source: Path) -> Log:
    """The run in a `metrics.csv`, or in a folder with one; empty fields were not logged.

    Raises:
        ExchangeError: there is none, or a line of it cannot be read.
    """
    path = find(source)
    if path is None:
        raise ExchangeError(f"{source} holds no {NAME}")
    collected = Collected()
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, strict=True)
            if "step" not in (rows.fieldnames or ()):
                raise ExchangeError(f"{path} has no column step in its first line")
            for row in rows:
                _take(collected, row, f"{path} line {rows.line_num}")
    except (csv.Error, UnicodeDecodeError) as error:
        raise ExchangeError(f"{path} is no CSV file: {error}") from error
    place = str(path.resolve())
    ranks, notes = ranks_of(place, {0: collected})
    return Log(place, "CSV", ranks, tuple(notes))


def _take(collected: Collected, row: dict[str, str | None], where: str) -> None:
    step = row.pop("step")
    if not step:
        return
    try:
        number = int(float(step))
    except (ValueError, OverflowError):
        raise ExchangeError(f"{where}: {step!r} is no step") from None
    for name, text in row.items():
        # Fields beyond the header have no name, and text is no metric.
        if name and isinstance(text, str) and text and (value := _number(text)) is not None:
            collected.add(name, number, value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
