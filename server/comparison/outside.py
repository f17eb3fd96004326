"""Sharded parameters that something else than the optimizer wrote, on some ranks and not on others.

A rank says of each step by how much its tensors have changed between the end of the step before and
its beginning. What changes a model on purpose (averages, clamping, a checkpoint) changes all of its
parts; where a tensor has changed on some of the ranks that hold parts of it and not on the others,
they need no replica to show it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison.own_history import Change, changed_alone
from rankscope.server.comparison.replicas import Replicas
from rankscope.server.window import Comparison, Int64, Series

STAGE = "outside_optimizer"
# Steps before which nothing was written on any rank. Where a rank writes its part alone as a rule
# (a row of padding set to zero, a scale that is clamped), it does so from the beginning.
_QUIET = 8

_Prints = Mapping[tuple[int, str], Mapping[int, Mapping[str, wire.Fingerprint]]]


def unchanged_too(
    prints: Mapping[int, Mapping[str, wire.Fingerprint]],
    words: Series | None,
    ranks: Int64,
    steps: Int64,
    step: int,
) -> Mapping[int, Mapping[str, wire.Fingerprint]]:
    """By how much tensors changed before a step, of ranks that wrote nothing as well.

    These post a digest of 0 and no fingerprint: nothing has changed in any tensor.

    Args:
        prints: of those that wrote something, by rank and table.
        words: model digests of this link.
        ranks, steps: rows and columns of the words.
    """
    column = int(np.searchsorted(steps, step))
    if words is None or not prints or column == len(steps) or steps[column] != step:
        return prints
    first = next(iter(prints.values()))
    if any(
        of_rank.keys() != first.keys()
        or any(len(of_rank[t].digests) != len(first[t].digests) for t in first)
        for of_rank in prints.values()
    ):
        return prints  # ranks that hold different parts
    nothing = {
        table: replace(
            made,
            digests=np.zeros_like(made.digests),
            sketches=None if made.sketches is None else np.zeros_like(made.sketches),
        )
        for table, made in first.items()
    }
    known = words.present[:, column] & (words.values[:, column] == 0)
    quiet = [rank for rank in ranks[known].tolist() if rank not in prints]
    return {**prints, **dict.fromkeys(quiet, nothing)}


def without_shares(comparison: Comparison) -> Comparison:
    """The same without what is relative to a change of nothing: of what share that is, is unknown.

    How far the parameters differ is seen of these themselves.
    """
    relative = np.where(np.isinf(comparison.relative), np.nan, comparison.relative)
    tensors = tuple(
        replace(t, relative=math.nan) if math.isinf(t.relative) else t for t in comparison.tensors
    )
    return replace(comparison, relative=relative, tensors=tensors)


class Outside:
    """Of ranks that have no replica.

    Args:
        replicas: which ranks have one.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        # By the ranks of a model: steps in a row before which none of them had written anything.
        self._quiet: dict[bytes, int] = {}

    def found(
        self, words: Series, prints: _Prints, ranks: Int64, steps: Int64
    ) -> dict[tuple[int, str], Comparison]:
        """The steps before which some ranks wrote a tensor that others left as it was.

        Args:
            words: of this link, at these steps.
            prints: of this link, by step and stage, rank and table: by how much tensors changed.
            ranks, steps: rows and columns of the words.
        """
        classes = self._replicas.classes(STAGE, ranks)
        unpaired = {int(rows[0]) for rows in classes if len(rows) == 1}
        found: dict[tuple[int, str], Comparison] = {}
        for rows in self._replicas.classes("hyperparameters", ranks):
            alone = np.array(sorted(unpaired.intersection(rows.tolist())), dtype=np.int64)
            if len(alone) < 2:
                continue
            model = ranks[alone].tobytes()
            quiet = self._quiet.get(model, 0)
            for column in np.flatnonzero(words.present[alone].any(axis=0)).tolist():
                there = alone[words.present[alone, column]]
                wrote = ranks[there[words.values[there, column] != 0]].tolist()
                before, quiet = quiet, 0 if wrote else quiet + 1
                key = int(steps[column]), STAGE
                if wrote and before >= _QUIET:
                    one = self._compared(key, ranks[there].tolist(), wrote, prints.get(key, {}))
                    if one is not None:
                        found[key] = one
            self._quiet[model] = quiet
        return found

    def _compared(
        self,
        key: tuple[int, str],
        members: list[int],
        wrote: list[int],
        prints: Mapping[int, Mapping[str, wire.Fingerprint]],
    ) -> Comparison | None:
        posted = {rank: next(iter(prints[rank].values()), None) for rank in wrote if rank in prints}
        first = next((made for made in posted.values() if made is not None), None)
        if first is None or len(posted) < len(wrote):
            return None  # which tensors these were is not known
        changes: dict[int, Change] = {}
        for rank in members:
            made = posted.get(rank)
            table = self._replicas.table(rank, first.table)
            if table is None or len(table.names) != len(first.digests):
                return None
            changed = np.zeros(len(table.names), dtype=bool) if made is None else made.digests != 0
            by = None if made is None else made.sketches
            changes[rank] = Change(first.table, table.names, table.shapes, changed, by)
        return changed_alone(*key, changes)
