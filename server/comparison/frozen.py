"""Parameters that no optimizer is to move, which the ranks read part by part.

A part is one tensor table. Ranks read the same one at each step that they share, and send digests;
sketches come along only with a digest that is new, and are remembered here: what has the same bits
has the same sketch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from rankscope.agent import wire
from rankscope.server.comparison.own_history import Change, changed_alone
from rankscope.server.comparison.replicas import Replicas
from rankscope.server.window import Comparison, Float64, Int64

STAGE = "frozen"
# Bytes of sketches that are remembered; what is forgotten costs the size of a difference, and not
# the difference.
_MOST_BYTES = 8 * 2**20

_Prints = Mapping[int, Mapping[str, wire.Fingerprint]]


class Frozen:
    """What is remembered of them.

    Args:
        replicas: which ranks hold the same.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        # Table and digests -> sketches.
        self._sketches: OrderedDict[tuple[str, bytes], Float64] = OrderedDict()
        self._bytes = 0
        # What a rank held when it was first heard of a table, by rank and table.
        self._first: dict[tuple[int, str], wire.Fingerprint] = {}
        # Tables whose last comparison found ranks that differ.
        self._differing: set[str] = set()

    def filled(self, prints: _Prints) -> dict[int, dict[str, wire.Fingerprint]]:
        """Fingerprints by rank and table, with the sketches that are known."""
        found: dict[int, dict[str, wire.Fingerprint]] = {}
        for of_rank in prints.values():
            for table, made in of_rank.items():
                if made.sketches is not None:
                    self._remember(table, made.digests.tobytes(), made.sketches)
        for rank, of_rank in prints.items():
            found[rank] = {table: self._with_sketches(made) for table, made in of_rank.items()}
        return found

    def compared(
        self,
        key: tuple[int, str],
        prints: _Prints,
        ranks: Int64,
        of_replicas: Comparison | None,
    ) -> Comparison | None:
        """The comparison of a step; None where it says nothing of all parts together.

        Args:
            key: step and stage.
            prints: as `filled` gives them.
            ranks: of the run.
            of_replicas: what came of comparing replicas.
        """
        found = of_replicas
        if found is None or found.equal:
            found = self._on_their_own(key, prints, ranks) or found
        if found is None:
            return None
        read = {table for of_rank in prints.values() for table in of_rank}
        differing = {tensor.table for tensor in found.tensors}
        self._differing = (self._differing - read) | differing
        if found.equal and self._differing:
            return None  # another part, of which it is known that it differs, was not read
        if found.equal or not found.tensor_count:
            return found
        rank = int(found.ranks[0])
        return replace(found, tensor_count=self._replicas.count(rank, STAGE, min(differing)))

    def _on_their_own(
        self, key: tuple[int, str], prints: _Prints, ranks: Int64
    ) -> Comparison | None:
        classes = self._replicas.classes(STAGE, ranks)
        unpaired = {int(ranks[rows[0]]) for rows in classes if len(rows) == 1}
        for rows in self._replicas.classes("hyperparameters", ranks):
            members = unpaired.intersection(ranks[rows].tolist(), prints)
            changes: dict[str, dict[int, Change]] = {}
            for rank in sorted(members):
                for table, made in prints[rank].items():
                    changes.setdefault(table, {})[rank] = self._change(rank, made)
            for of_table in changes.values():
                found = changed_alone(*key, of_table)
                if found is not None:
                    return found
        return None

    def _change(self, rank: int, made: wire.Fingerprint) -> Change:
        """What has changed on a rank since it was first heard of the table."""
        first = self._first.get((rank, made.table))
        if first is None or len(first.digests) != len(made.digests):
            first = self._first[rank, made.table] = replace(made, sketches=None)
        table = self._replicas.described(rank, made)
        changed = first.digests != made.digests
        by = of = None
        if changed.any():
            of = self._sketches.get((made.table, first.digests.tobytes()))
            by = None if of is None or made.sketches is None else made.sketches - of
        return Change(made.table, table.names, table.shapes, changed, by, of)

    def _with_sketches(self, made: wire.Fingerprint) -> wire.Fingerprint:
        if made.sketches is None:
            known = self._sketches.get((made.table, made.digests.tobytes()))
            return made if known is None else replace(made, sketches=known)
        return made

    def _remember(self, table: str, digests: bytes, sketches: Float64) -> None:
        if (table, digests) in self._sketches:
            self._sketches.move_to_end((table, digests))
            return
        self._sketches[table, digests] = sketches
        self._bytes += sketches.nbytes
        while self._bytes > _MOST_BYTES and len(self._sketches) > 1:
            _, forgotten = self._sketches.popitem(last=False)
            self._bytes -= forgotten.nbytes
