"""Puts what ranks posted, in whatever order, into windows of aligned steps.

A window holds the steps about which every living rank has said all it will say. A rank that is
missing, silent or far behind holds the others up for a while only. Memory is bounded: a rank that
lags more than `MAX_LAG` steps behind the fastest is waited for no longer, and what comes later than
its step was evaluated is counted and not looked at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rankscope.agent import wire
from rankscope.agent.wire import STAGES
from rankscope.server import compare
from rankscope.server.storage.evaluation import ColumnPart, Life, NewData, PrintPart
from rankscope.server.window import Comparison, Int64, Series, Window

# Numbers that must be the same on all ranks after a step, the link they speak for, and how exactly.
COMPARED_SERIES = (
    ("grad_norm", "reduced_gradient", compare.NORM_TOLERANCE),
    ("lr", "hyperparameters", 1e-12),
)

# How long a rank may hold up the others: one that has never been seen, and one that fell silent.
UNSEEN_SECONDS = 30.0
SILENT_SECONDS = 10.0
MAX_LAG = 4096

# Steps a window: bounds what is in memory during a replay.
_BLOCK = 512


@dataclass(slots=True)
class _Pending:
    """Points of one series of one rank that are not in a window yet."""

    steps: list[Int64] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)

    def add(self, part: ColumnPart) -> None:
        self.steps.append(part.steps)
        self.values.append(part.values)
        self.attempts.append(part.attempt)

    def take(self, through: int) -> tuple[Int64, Any]:
        """Points up to a step, each step once: of several the newest attempt's last stands."""
        order = np.argsort(self.attempts, kind="stable")
        steps = np.concatenate([self.steps[i] for i in order])
        values = np.concatenate([self.values[i] for i in order])
        attempts = np.concatenate(
            [np.full(len(self.steps[i]), self.attempts[i], dtype=np.int64) for i in order]
        )
        later = steps > through
        self.steps, self.values, self.attempts = [], [], []
        for attempt in np.unique(attempts[later]):
            rest = later & (attempts == attempt)
            self.steps.append(steps[rest])
            self.values.append(values[rest])
            self.attempts.append(int(attempt))
        steps, values = steps[~later], values[~later]
        if len(steps) > 1 and not bool((np.diff(steps) > 0).all()):
            by_step = np.argsort(steps, kind="stable")
            steps, values = steps[by_step], values[by_step]
            stands = np.append(np.diff(steps) > 0, True)
            steps, values = steps[stands], values[stands]
        return steps, values


class Aligner:
    """The state of one run's alignment.

    Args:
        metrics: series that detectors want.

    Attributes:
        last_step: last step that is in a window; -1 before the first.
        late: points and prints that came after their step had been evaluated.
    """

    def __init__(self, metrics: Collection[str]) -> None:
        self.metrics = frozenset(metrics) | {name for name, _, _ in COMPARED_SERIES}
        self._wanted = frozenset(metrics)
        self.last_step = -1
        self.late = 0
        self._series: dict[tuple[str, int], _Pending] = defaultdict(_Pending)
        self._words: dict[tuple[str, int], _Pending] = defaultdict(_Pending)
        self._prints: dict[tuple[int, str], dict[int, PrintPart]] = defaultdict(dict)
        self._loaded: Counter[int] = Counter()
        self._lives: dict[int, Life] = {}
        self._tables: Mapping[int, Mapping[str, wire.TensorTable]] = {}
        self._world_size = 1
        self._config: Mapping[str, Any] = {}
        self._more = False

    def add(self, data: NewData) -> None:
        """Takes what is new in the database."""
        for target, parts in ((self._series, data.columns), (self._words, data.words)):
            for part in parts:
                fresh = self._fresh(part)
                if len(fresh.steps):
                    target[part.metric, part.rank].add(fresh)
                    newest = int(fresh.steps.max())
                    self._loaded[part.rank] = max(self._loaded.get(part.rank, -1), newest)
        for made in data.prints:
            if made.print.step <= self.last_step:
                self.late += 1
                continue
            known = self._prints[made.print.step, made.print.stage].get(made.rank)
            if known is None or known.attempt <= made.attempt:
                self._prints[made.print.step, made.print.stage][made.rank] = made
        self._lives = {life.life.rank: life for life in data.lives}
        self._tables = data.tables or self._tables
        self._world_size = data.world_size
        self._config = data.config
        self._more = data.more

    def windows(self, now: float) -> Iterator[Window]:
        """Windows of what is complete; at least one, which may have no steps."""
        frontier = self._frontier(now)
        while True:
            steps = self._steps(frontier)
            rest = steps[_BLOCK:]
            steps = steps[:_BLOCK]
            through = int(steps[-1]) if len(rest) else frontier
            yield self._window(steps, through, now)
            if not len(rest):
                return

    def _fresh(self, part: ColumnPart) -> ColumnPart:
        if part.steps[0] > self.last_step:
            return part
        new = part.steps > self.last_step
        self.late += int((~new).sum())
        return replace(part, steps=part.steps[new], values=part.values[new])

    def _frontier(self, now: float) -> int:
        """Last step that nothing more is to be expected about."""
        reached = {rank: self._reached(rank, life) for rank, life in self._lives.items()}
        if not reached:
            return -1
        fastest = max(life.through_step for life in self._lives.values())
        if self._more:
            # There is more in the database: nobody is late, all are to be read first.
            return min(min(reached.values()), fastest)
        first_seen = min(life.life.first_seen for life in self._lives.values())
        waited = max(now, first_seen) - first_seen
        if len(self._lives) < self._world_size and waited < UNSEEN_SECONDS:
            return -1
        holding = [
            reached[rank]
            for rank, life in self._lives.items()
            if life.life.state == "running"
            and now - life.life.last_seen < SILENT_SECONDS
            and reached[rank] > fastest - MAX_LAG
        ]
        return min([*holding, fastest])

    def _reached(self, rank: int, life: Life) -> int:
        if not self._more:
            return life.through_step
        # What was read ends in the middle: the last step read may lack a part.
        return min(life.through_step, self._loaded.get(rank, 0) - 1)

    def _steps(self, through: int) -> Int64:
        held = [s for p in self._series.values() for s in p.steps]
        held += [s for p in self._words.values() for s in p.steps]
        held.append(np.array([step for step, _ in self._prints], dtype=np.int64))
        steps = np.unique(np.concatenate(held))
        return steps[steps <= through]

    def _window(self, steps: Int64, through: int, now: float) -> Window:
        ranks = np.array(sorted(self._lives), dtype=np.int64)
        series = {
            name: aligned
            for name in sorted({metric for metric, _ in self._series})
            if (aligned := self._aligned(self._series, name, ranks, steps, through, np.float64))
        }
        comparisons = self._comparisons(series, ranks, steps, through)
        self.last_step = max(self.last_step, through)
        return Window(
            world_size=self._world_size,
            ranks=ranks,
            steps=steps,
            series={name: s for name, s in series.items() if name in self._wanted},
            comparisons=comparisons,
            lives=tuple(self._lives[int(r)].life for r in ranks),
            now=now,
            last_step=self.last_step,
            config=self._config,
        )

    def _aligned(
        self,
        pending: dict[tuple[str, int], _Pending],
        name: str,
        ranks: Int64,
        steps: Int64,
        through: int,
        dtype: type[Any],
    ) -> Series | None:
        values = np.zeros((len(ranks), len(steps)), dtype)
        present = np.zeros(values.shape, dtype=bool)
        for row, rank in enumerate(ranks.tolist()):
            held = pending.get((name, rank))
            if held is None or not held.steps:
                continue
            at, what = held.take(through)
            columns = np.searchsorted(steps, at)
            values[row, columns] = what
            present[row, columns] = True
        return Series(values, present) if present.any() else None

    # ----------------------------------------------------------------------------- the comparisons

    def _comparisons(
        self, series: Mapping[str, Series], ranks: Int64, steps: Int64, through: int
    ) -> tuple[Comparison, ...]:
        found: dict[tuple[int, str], Comparison] = {}
        members = self._replicas(ranks)
        for metric, stage, tolerance in COMPARED_SERIES:
            if metric in series and len(members) > 1:
                self._compare_values(found, series[metric], stage, tolerance, ranks, members, steps)
        for stage in {s for s, _ in self._words}:
            self._compare_words(found, stage, ranks, members, steps, through)
        for key in [k for k in self._prints if k[0] <= through]:
            self._compare_prints(found, key, self._prints.pop(key), members)
        chain = {stage: n for n, stage in enumerate(STAGES)}
        ordered = sorted(found, key=lambda k: (k[0], chain[k[1]]))
        return tuple(found[key] for key in ordered)

    def _replicas(self, ranks: Int64) -> Int64:
        """Rows of the largest set of ranks that hold the same tensors: these must agree."""
        classes: dict[Any, list[int]] = defaultdict(list)
        for row, rank in enumerate(ranks.tolist()):
            table = self._tables.get(rank, {}).get("parameters")
            classes[table and (table.names, table.shapes, table.shards)].append(row)
        return np.array(max(classes.values(), key=len, default=[]), dtype=np.int64)

    def _compare_values(
        self,
        found: dict[tuple[int, str], Comparison],
        aligned: Series,
        stage: str,
        tolerance: float,
        ranks: Int64,
        members: Int64,
        steps: Int64,
    ) -> None:
        for column, step in enumerate(steps.tolist()):
            rows = members[aligned.present[members, column]]
            if len(rows) > 1:
                found[step, stage] = compare.compare_values(
                    step, stage, ranks[rows], aligned.values[rows, column], tolerance=tolerance
                )

    def _compare_words(
        self,
        found: dict[tuple[int, str], Comparison],
        stage: str,
        ranks: Int64,
        members: Int64,
        steps: Int64,
        through: int,
    ) -> None:
        aligned = self._aligned(self._words, stage, ranks, steps, through, np.uint64)
        if aligned is None:
            return
        words: Any = aligned.values
        for column, step in enumerate(steps.tolist()):
            rows = members[aligned.present[members, column]]
            if len(rows) > 1:
                found[step, stage] = compare.compare_words(
                    step, stage, ranks[rows], words[rows, column]
                )

    def _compare_prints(
        self,
        found: dict[tuple[int, str], Comparison],
        key: tuple[int, str],
        parts: Mapping[int, PrintPart],
        members: Int64,
    ) -> None:
        step, stage = key
        all_ranks = sorted(self._lives)
        ranks = [all_ranks[row] for row in members.tolist() if all_ranks[row] in parts]
        known = found.get(key)
        # A word of every rank says more than prints of some.
        if len(ranks) < 2 or (known is not None and len(known.ranks) > len(ranks)):
            return
        prints = [parts[r].print for r in ranks]
        table = self._tables.get(ranks[0], {}).get(prints[0].table)
        if table is None or any(len(p.digests) != len(table.names) for p in prints):
            return
        found[key] = compare.compare_prints(
            step, stage, np.array(ranks, dtype=np.int64), prints, table
        )


def lives_since(lives: Sequence[Life], floor: float) -> tuple[Life, ...]:
    """Lives as if every rank had been heard of at `floor`.

    While the server was away it could not hear anybody: silence is counted from its return.
    """
    return tuple(
        replace(life, life=replace(life.life, last_seen=max(life.life.last_seen, floor)))
        for life in lives
    )
