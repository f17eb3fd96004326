"""Tensors of which each rank trains a copy of its own, as the ranks say with `wire.RANK_LOCAL`.

Of a large table, say, that is averaged now and then, or never. They are taken out of the tables and
the fingerprints before anything is compared: what is left decides which ranks are replicas, and is
what these are compared in. (Ranks of tensor parallelism hold parts of one tensor, each under a key
of its own, and share a batch: they are no replicas.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rankscope.agent import wire
from rankscope.server.window import Int64

# Tables of tensors that have the name of a parameter by chance alone.
_OTHERS = "buffers"
# Those of further modules call a tensor `<module>.<name of the parameter>`.
_WATCHED = "watched"


class RankLocal:
    """Which tensors of which ranks are such copies.

    Attributes:
        ranks: those that have any.
    """

    def __init__(self) -> None:
        self.ranks: frozenset[int] = frozenset()
        # Of tables with such tensors: how many there are, and the places of the others.
        self._kept: dict[tuple[int, str], tuple[int, Int64]] = {}

    def learn(
        self, tables: Mapping[int, Mapping[str, wire.TensorTable]]
    ) -> Mapping[int, Mapping[str, wire.TensorTable]]:
        """Takes all tables of some ranks; returns them without these tensors."""
        known: dict[int, frozenset[str]] = {}
        own: dict[int, set[str]] = {}
        for rank, of_rank in tables.items():
            for table in of_rank.values():
                if id(table) not in known:
                    known[id(table)] = _declared(table)
                if known[id(table)]:
                    own.setdefault(rank, set()).update(known[id(table)])
        if not own and self.ranks.isdisjoint(tables):
            return tables
        self.ranks = (self.ranks - tables.keys()) | own.keys()
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] not in tables}
        return {
            rank: self._left(rank, of_rank, own[rank]) if rank in own else of_rank
            for rank, of_rank in tables.items()
        }

    def among(self, ranks: Int64) -> bool:
        """Whether any of some ranks has such a tensor: digests of its whole model are its own."""
        return bool(self.ranks) and not self.ranks.isdisjoint(ranks.tolist())

    def without(self, rank: int, made: wire.Fingerprint) -> wire.Fingerprint | None:
        """A fingerprint without these tensors; None where nothing is left, or known of it."""
        if rank not in self.ranks:
            return made
        count, kept = self._kept.get((rank, made.table), (-1, None))
        if kept is None:
            # Of a table that was not reported it is not known which tensors these are.
            return made if made.table.startswith(_OTHERS) else None
        if count != len(made.digests) or not len(kept):
            return None
        if len(kept) == count:
            return made
        sketches = None if made.sketches is None else made.sketches[kept]
        return replace(made, digests=made.digests[kept], sketches=sketches)

    def _left(
        self, rank: int, tables: Mapping[str, wire.TensorTable], own: set[str]
    ) -> dict[str, wire.TensorTable]:
        left = {}
        for name, table in tables.items():
            kept = [at for at, tensor in enumerate(table.names) if not _is_in(tensor, own, name)]
            self._kept[rank, name] = len(table.names), np.array(kept, dtype=np.int64)
            if len(kept) == len(table.names):
                left[name] = table
            elif kept or name.startswith("parameters"):
                left[name] = wire.TensorTable(
                    names=tuple(table.names[at] for at in kept),
                    shapes=tuple(table.shapes[at] for at in kept),
                    dtypes=tuple(table.dtypes[at] for at in kept),
                    shards=tuple(table.shards[at] for at in kept),
                )
        return left


def _declared(table: wire.TensorTable) -> frozenset[str]:
    return frozenset(
        name
        for name, shard in zip(table.names, table.shards, strict=True)
        if shard.startswith(wire.RANK_LOCAL)
    )


def _is_in(tensor: str, own: set[str], table: str) -> bool:
    if table.startswith(_OTHERS):
        return False
    if table.startswith(_WATCHED):
        return any(tensor == name or tensor.endswith(f".{name}") for name in own)
    return tensor in own
