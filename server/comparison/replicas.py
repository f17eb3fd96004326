"""Which ranks hold the same tensors, and so must hold the same values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison.rank_local import RankLocal
from rankscope.server.window import Int64

# Links of the chain that are the same on all replicas of a healthy job. What goes into a reduction
# (batches, local gradients) and random states differ by design.
REPLICATED = (
    "start",
    "outside_optimizer",
    "frozen",
    "reduced_gradient",
    "clipped_gradient",
    "optimizer_state",
    "hyperparameters",
    "parameters",
    "buffers",
    "watched",
)

# What all ranks that hold parts of one model have to have in common.
_OF_THE_MODEL = "hyperparameters"

# Of what else than the parameters a link speaks: tables of which name.
_TABLES = {
    "optimizer_state": "optimizer",
    "buffers": "buffers",
    "watched": "watched",
    "frozen": "frozen",
}

# Links that digests and norms of whole models do not speak for where ranks have copies of their
# own.
_PARTS_ALONE = frozenset(REPLICATED) - {_OF_THE_MODEL, "buffers"}

_Key = tuple[int, ...] | None


class Replicas:
    """The tensor tables of a run's ranks, without those of which each trains a copy of its own.

    Attributes:
        version: changes with the tables.
        own: the copies.
    """

    def __init__(self) -> None:
        self.version = 0
        self.own = RankLocal()
        # Rank -> tensor -> which part of it, where the tables do not say it.
        self._parts: dict[int, Mapping[str, int]] = {}
        self._reported: dict[int, Mapping[str, wire.TensorTable]] = {}
        self._tables: dict[int, Mapping[str, wire.TensorTable]] = {}
        # Tables are compared once, when they come; ranks that hold the same share a number.
        self._numbers: dict[tuple[object, ...], int] = {}
        self._keys: dict[tuple[int, str], _Key] = {}
        self._classes: dict[tuple[str, bytes], tuple[Int64, ...]] = {}

    def learn(self, tables: Mapping[int, Mapping[str, wire.TensorTable]]) -> None:
        """Takes all tables of some ranks, as they hold from now on."""
        if not tables:
            return
        self._reported |= tables
        tables = {rank: self._cut(rank, held) for rank, held in self.own.learn(tables).items()}
        self._tables |= tables
        self.version += 1
        self._classes.clear()
        numbers: dict[int, int] = {}
        for rank, of_rank in tables.items():
            by_name = {}
            for name, table in of_rank.items():
                if id(table) not in numbers:
                    content = (table.names, table.shapes, table.shards)
                    numbers[id(table)] = self._numbers.setdefault(content, len(self._numbers))
                by_name[name] = numbers[id(table)]
            for prefix in ("parameters", *_TABLES.values()):
                names = sorted((n for n in by_name if n.startswith(prefix)), key=_version)
                found = [by_name[name] for name in names]
                self._keys[rank, prefix] = tuple(found) if found else None

    def separate(self, parts: Mapping[int, Mapping[str, int]]) -> None:
        """Takes that some tensors are cut: rank -> name of a tensor -> which part it holds."""
        self._parts |= parts
        self.learn({rank: self._reported[rank] for rank in parts if rank in self._reported})

    def table(self, rank: int, name: str) -> wire.TensorTable | None:
        """A table of a rank; None where it has not reported it."""
        return self._tables.get(rank, {}).get(name)

    def described(self, rank: int, made: wire.Fingerprint) -> wire.TensorTable:
        """The table that a rank's fingerprints speak of."""
        table = self.table(rank, made.table)
        if table is not None and len(table.names) == len(made.digests):
            return table
        # It has not reported it, or of another version: the tensors have their places for names.
        count = len(made.digests)
        names = tuple(f"{made.table}[{n}]" for n in range(count))
        return wire.TensorTable(names, ((),) * count, ("",) * count, ("",) * count)

    def count(self, rank: int, stage: str, like: str) -> int:
        """Tensors of all tables that a link speaks of on a rank, as new as one of them."""
        prefix, (_, version) = _TABLES[stage], _version(like)
        held = self._tables.get(rank, {})
        return sum(
            len(table.names)
            for name, table in held.items()
            if name.startswith(prefix) and _version(name)[1] == version
        )

    def newest(self, rank: int) -> wire.TensorTable | None:
        """The table of a rank's parameters as it was reported last."""
        held = self._tables.get(rank, {})
        names = [name for name in held if name.startswith("parameters")]
        newest = max(names, key=lambda name: int(name.partition("@")[2] or 0), default="")
        return held.get(newest)

    def classes(self, stage: str, ranks: Int64) -> tuple[Int64, ...]:
        """Rows of ranks that hold replicas of what a link speaks of, one array a replica class.

        Settings are those of a model: ranks that hold other parts of the same tensors (shards of
        FSDP, halves of tensor parallelism) step with them, too. Stages of a pipeline hold other
        tensors, and may have settings of their own.

        The largest class comes first, of equally large ones that with the lowest rank. A rank that
        is alone with what it holds is a class, too.
        """
        held = self._classes.get((stage, ranks.tobytes()))
        if held is not None:
            return held
        found = self._split(np.arange(len(ranks)), ranks, "parameters")
        prefix = _TABLES.get(stage)
        if stage == _OF_THE_MODEL:
            found = self._by_names(found, ranks)
        if prefix is not None:
            parts = []
            for rows in found:
                known = [row for row in rows.tolist() if self._keys.get((int(ranks[row]), prefix))]
                split = self._split(np.array(known, dtype=np.int64), ranks, prefix)
                # Who has not reported what it holds is taken to hold what most do.
                silent = {*rows.tolist()} - {*known}
                most = {*split[0].tolist()} if split else set()
                parts += [np.array(sorted(silent | most), np.int64), *split[1:]]
            found = sorted(parts, key=_size)
        made = tuple(found)
        self._classes[stage, ranks.tobytes()] = made
        return made

    def whole(self, stage: str, ranks: Int64) -> bool:
        """Whether digests and norms of whole models, of replicas, have to agree on a link."""
        return stage not in _PARTS_ALONE or not self.own.among(ranks)

    def rows(self, stage: str, ranks: Int64) -> Int64:
        """Rows of the largest set of ranks that hold replicas of what a link speaks of."""
        classes = self.classes(stage, ranks)
        return classes[0] if classes else np.zeros(0, np.int64)

    def _cut(
        self, rank: int, tables: Mapping[str, wire.TensorTable]
    ) -> Mapping[str, wire.TensorTable]:
        parts = self._parts.get(rank)
        if not parts:
            return tables
        return {
            name: replace(
                table,
                shards=tuple(
                    f"part {parts[tensor]} @" if tensor in parts else shard
                    for tensor, shard in zip(table.names, table.shards, strict=True)
                ),
            )
            if name.startswith("parameters")
            else table
            for name, table in tables.items()
        }

    def _by_names(self, classes: list[Int64], ranks: Int64) -> list[Int64]:
        """Classes whose tensors have the same names throughout, put together."""
        models: dict[object, list[Int64]] = defaultdict(list)
        for number, rows in enumerate(classes):
            table = self.newest(int(ranks[rows[0]]))
            models[number if table is None else frozenset(table.names)].append(rows)
        return sorted((np.sort(np.concatenate(parts)) for parts in models.values()), key=_size)

    def _split(self, rows: Int64, ranks: Int64, prefix: str) -> list[Int64]:
        classes: dict[_Key, list[int]] = defaultdict(list)
        for row in rows.tolist():
            classes[self._keys.get((int(ranks[row]), prefix))].append(row)
        if prefix == "parameters":
            # When parameters are frozen or added all ranks report it, one after the other: who has
            # not yet is still one of those it was with.
            for key in sorted((k for k in classes if k is not None), key=len, reverse=True):
                longer = [k for k in classes if k is not None and k[: len(key)] == key != k]
                if longer:
                    classes[max(longer, key=lambda k: len(classes[k]))] += classes.pop(key)
        return sorted((np.array(sorted(held), np.int64) for held in classes.values()), key=_size)


def _version(name: str) -> tuple[str, int]:
    """Order of tables: `parameters@10` is newer than `parameters@2`."""
    table, _, version = name.partition("@")
    return table, int(version) if version.isdigit() else 0


def _size(rows: Int64) -> tuple[int, int]:
    return -len(rows), int(rows[0]) if len(rows) else -1
