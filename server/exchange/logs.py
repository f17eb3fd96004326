"""What another tool has logged of a run: its tags as it calls them, by rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.agent import wire
from rankscope.agent.wire import Column
from rankscope.server.exchange.points import ExchangeError


@dataclass(frozen=True, slots=True)
class Log:
    """A run in the files of another tool.

    Attributes:
        source: the file or folder, as an absolute path; or a URL.
        tool: what it was written with.
        ranks: tag -> points, for each rank; ranks are 0, 1, 2, ... without gaps.
        notes: what a reader of the verdict should know of these files: sentences.
        started_at: seconds since 1970; NaN where the files do not say.
        name: of the run, where the tool has given it one.
    """

    source: str
    tool: str
    ranks: Mapping[int, Mapping[str, Column]]
    notes: tuple[str, ...] = ()
    started_at: float = math.nan
    name: str = ""


@dataclass(slots=True)
class Collected:
    """Points of one rank, as they are read.

    Attributes:
        points: tag -> steps and values, in the order in which they were logged.
        refused: points at steps that are none (negative, or beyond what the wire takes).
    """

    points: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    refused: int = 0

    def add(self, tag: str, step: int, value: float) -> None:
        """Takes a point."""
        if not 0 <= step <= wire.limits.STEP.most:
            self.refused += 1
            return
        steps, values = self.points.setdefault(tag, ([], []))
        steps.append(step)
        values.append(value)

    def columns(self) -> dict[str, Column]:
        """Tag -> points with ascending steps; of two at one step the one logged later."""
        return {tag: _column(*points) for tag, points in self.points.items()}


def _column(steps: Iterable[int], values: Iterable[float]) -> Column:
    ordered = np.fromiter(steps, np.int64)
    numbers = np.fromiter(values, np.float64)
    order = np.argsort(ordered, kind="stable")
    ordered, numbers = ordered[order], numbers[order]
    stands = np.append(ordered[1:] > ordered[:-1], True)
    return Column(ordered[stands], numbers[stands])


def ranks_of(
    source: str, collected: Mapping[int, Collected]
) -> tuple[dict[int, Mapping[str, Column]], list[str]]:
    """Columns of each rank, with ranks that begin at 0 and have no gaps; and what to note of it.

    Ranks without a log are not missing ranks: many jobs log on some alone.

    Raises:
        ExchangeError: there is no point at all.
    """
    there = {rank: one for rank, one in sorted(collected.items()) if one.points}
    if not there:
        raise ExchangeError(f"{source} holds no scalars: nothing was logged, or nothing of numbers")
    notes = []
    if list(there) != list(range(len(there))):
        named = ", ".join(map(str, there))
        notes.append(f"Logs are there of ranks {named}: they are numbered from 0 here.")
    if refused := sum(one.refused for one in there.values()):
        notes.append(
            "1 point has a negative or impossible step and was left out."
            if refused == 1
            else f"{refused:,} points have negative or impossible steps and were left out."
        )
    return {n: one.columns() for n, one in enumerate(there.values())}, notes
