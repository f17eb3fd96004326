"""The first step, link and tensor at which two runs differ, read off their digests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from sqlalchemy import Connection

from rankscope.agent.wire import Int64, TensorTable
from rankscope.server.comparison import between_runs
from rankscope.server.comparison.between_runs import Differing
from rankscope.server.storage.reading import digests
from rankscope.server.window import FingerprintKey, TensorDifference

# Steps that are read at once: no more than a search needs that ends early.
_WINDOW = 4096
# Rows of fingerprints that are read at once, and how many a rank may have at a step.
_ROWS = 50_000
_ROWS_OF_A_STEP = 8
# After the first difference: how far a fingerprint is looked for that names the tensor.
_BEYOND = 8 * _WINDOW


_Rows = tuple[Mapping[FingerprintKey, Any], Mapping[FingerprintKey, Any]]


@dataclass(frozen=True, slots=True)
class Bits:
    """How far two runs hold the same bits, rank by rank.

    Attributes:
        first: where they first differ; None: nowhere that was compared.
        before: last compared step before that; None: there was none.
        tensors: those that differ by the first fingerprints that both runs have from `first` on and
            that do, the first in the model first.
        named_at: step and link of these fingerprints.
        ranks: that were compared.
        steps: number of compared steps, from `first_step` to `last_step`.
        sampled: of each run the number of steps with digests, as far as they were read.
        other_tensors: whether the runs' parameters are other tensors, so that nothing compares.
    """

    first: Differing | None = None
    before: int | None = None
    tensors: tuple[TensorDifference, ...] = ()
    named_at: tuple[int, str] | None = None
    ranks: tuple[int, ...] = ()
    steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    sampled: tuple[int, int] = (0, 0)
    other_tensors: bool = False


@dataclass(slots=True)
class _Search:
    connection: Connection
    runs: tuple[int, int]
    tables: Mapping[int, Mapping[str, TensorTable]]
    met: list[Int64] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    sampled: list[int] = field(default_factory=lambda: [0, 0])

    def window(self, first: int, last: int) -> Differing | None:
        """The first difference from step `first` to `last`."""
        words = [
            digests.read_digests(self.connection, run=run, first=first, last=last)
            for run in self.runs
        ]
        found, met = between_runs.first_of_digests(*words)
        self.ranks |= met.ranks
        self.met.append(met.steps)
        steps: list[list[Int64]] = [[s for s, _ in of_run.values()] for of_run in words]
        by_tensor = None
        for rows, common in self._fingerprints(first, last if found is None else found.step):
            self.ranks |= {key.rank for key in common}
            self.met.append(_steps_of(common))
            for of_run, made in zip(steps, rows, strict=True):
                of_run.append(_steps_of(made))
            by_tensor = self._first_of_fingerprints(rows, common)
            if by_tensor is not None:
                break
        for n, of_run in enumerate(steps):
            self.sampled[n] += len(np.unique(np.concatenate(of_run))) if of_run else 0
        return min((d for d in (found, by_tensor) if d is not None), key=_place, default=None)

    def _fingerprints(self, first: int, last: int) -> Iterator[tuple[_Rows, list[FingerprintKey]]]:
        """Rows of both runs, some steps at a time, and of what both have some."""
        at_once = max(1, _ROWS // max(1, len(self.tables) * _ROWS_OF_A_STEP))
        for begin in range(first, last + 1, at_once):
            end = min(begin + at_once - 1, last)
            one, other = (
                digests.fingerprint_rows(self.connection, run=run, first=begin, last=end)
                for run in self.runs
            )
            common = [key for key in one if key in other and self.tables.get(key.rank)]
            yield (one, other), common

    def _first_of_fingerprints(
        self, rows: _Rows, common: Collection[FingerprintKey]
    ) -> Differing | None:
        # Equal contents are equal digests; unequal ones may differ in the rounding of a sketch.
        suspects = [k for k in common if _contents(rows[0][k]) != _contents(rows[1][k])]
        for step, stage, ranks in between_runs.in_order(suspects):
            wrong = [
                rank for rank in ranks if self.tensors(FingerprintKey(step, stage, rank), rows)
            ]
            if wrong:
                return Differing(step, stage, tuple(wrong))
        return None

    def tensors(self, key: FingerprintKey, rows: _Rows) -> tuple[TensorDifference, ...]:
        """Tensors that differ between the fingerprints of a rank at one step."""
        one, other = (
            digests.load_fingerprints(self.connection, run=run, rows=of_run[key])
            for run, of_run in zip(self.runs, rows, strict=True)
        )
        found = between_runs.differing_tensors(key, one, other, self.tables[key.rank])
        return found or ()

    def named(
        self, first: Differing, end: int
    ) -> tuple[tuple[TensorDifference, ...], tuple[int, str] | None]:
        """Which tensors differ by the first fingerprints of both from there on that do; of what."""
        for rows, common in self._fingerprints(first.step, min(end, first.step + _BEYOND)):
            keys = [
                key
                for key in common
                if Differing(key.step, key.stage, ()).place >= first.place
                and _contents(rows[0][key]) != _contents(rows[1][key])
            ]
            for step, stage, ranks in between_runs.in_order(keys):
                found = [(r, self.tensors(FingerprintKey(step, stage, r), rows)) for r in ranks]
                if merged := between_runs.merged(found):
                    return tuple(merged), (step, stage)
        return (), None


def compare_bits(connection: Connection, *, runs: tuple[int, int], end: int) -> Bits:
    """Compares two runs up to step `end`, or to the first step at which they differ.

    Args:
        runs: keys of the runs.
    """
    one, other = (digests.rank_tables(connection, run=run) for run in runs)
    both = one.keys() & other.keys()
    tables = {rank: between_runs.same_tables(one[rank], other[rank]) for rank in both}
    if any(_others(one[rank], other[rank], tables[rank]) for rank in both):
        return Bits(other_tensors=True)
    search = _Search(connection, runs, tables)
    first: Differing | None = None
    begin = 0
    while first is None and begin <= end:
        last = min(begin + _WINDOW - 1, end)
        known = sum(search.sampled)
        first = search.window(begin, last)
        begin = last + 1
        if sum(search.sampled) == known:
            # Nothing there: some count tokens as steps, and there may be billions of such windows.
            begin = _next(connection, runs, begin, end)
    steps = np.unique(np.concatenate(search.met)) if search.met else np.empty(0, np.int64)
    if first is not None:
        # Those beyond it were read with it, and nobody looked.
        steps = steps[steps <= first.step]
    bits = Bits(
        first=first,
        ranks=tuple(sorted(search.ranks)),
        steps=len(steps),
        first_step=int(steps[0]) if len(steps) else None,
        last_step=int(steps[-1]) if len(steps) else None,
        sampled=(search.sampled[0], search.sampled[1]),
    )
    if first is None:
        return bits
    earlier = steps[steps < first.step]
    named, at = search.named(first, end)
    before = int(earlier[-1]) if len(earlier) else None
    return replace(bits, before=before, tensors=named, named_at=at)


def _next(connection: Connection, runs: tuple[int, int], begin: int, end: int) -> int:
    """The first step from `begin` on at which either run has something; beyond `end` for none."""
    found = [digests.next_step(connection, run=run, after=begin) for run in runs]
    return min((step for step in found if step is not None), default=end + 1)


def _steps_of(keys: Iterable[FingerprintKey]) -> Int64:
    return np.unique(np.array([key.step for key in keys], np.int64))


def _place(differing: Differing) -> tuple[int, int]:
    return differing.place


def _contents(rows: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: bytes(row.content) for name, row in rows.items()}


def _others(
    one: Mapping[str, TensorTable],
    other: Mapping[str, TensorTable],
    same: Mapping[str, TensorTable],
) -> bool:
    name = "parameters"
    return name in one and name in other and name not in same
