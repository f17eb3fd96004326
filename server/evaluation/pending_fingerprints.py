"""Fingerprints that wait for their step to be complete, within a bound of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison.rank_local import RankLocal
from rankscope.server.evaluation.pending import superseded_from
from rankscope.server.window import FingerprintPart, Int64

MAX_FINGERPRINT_BYTES = 256 * 2**20

# Step and stage.
Key = tuple[int, str]
# By rank and table.
Fingerprints = dict[int, dict[str, wire.Fingerprint]]


class PendingFingerprints:
    """Fingerprints that are not in a window yet, by step and stage, then by rank and table.

    Of more than `MAX_FINGERPRINT_BYTES` the oldest are given up.

    Args:
        own: tensors of which each rank trains a copy of its own; they are left out of all answers.
        begins: rank -> attempt -> its first step, as it is known at the time of a call.

    Attributes:
        given_up: number of those that there was no room for.
    """

    def __init__(self, own: RankLocal, begins: Mapping[int, Mapping[int, int]]) -> None:
        self.given_up = 0
        self._own = own
        self._begins = begins
        self._held: dict[Key, dict[tuple[int, str], FingerprintPart]] = defaultdict(dict)
        # What ranks held when they began anew at a step that had been evaluated, by that step.
        self._restarted: dict[int, dict[tuple[int, str], FingerprintPart]] = defaultdict(dict)
        self._bytes = 0

    def add(self, made: FingerprintPart, *, restarted: bool = False) -> None:
        """Takes one, unless a later attempt of the rank has made another.

        Args:
            restarted: it is what the rank began anew with, at a step that has been evaluated.
        """
        fingerprint = made.fingerprint
        if restarted:
            held = self._restarted[fingerprint.step]
        else:
            held = self._held[fingerprint.step, fingerprint.stage]
        known = held.get((made.rank, fingerprint.table))
        if known is not None:
            if known.attempt > made.attempt:
                return
            self._bytes -= _bytes_of(known)
        held[made.rank, fingerprint.table] = made
        self._bytes += _bytes_of(made)
        while self._bytes > MAX_FINGERPRINT_BYTES and len(self._held) > 1:
            self.given_up += sum(map(len, self.take(min(self._held)).values()))

    def join_restarted(self) -> None:
        """From now on, what ranks began anew with is of the stage `start` of its step."""
        self._held |= {(step, "start"): made for step, made in self._restarted.items()}
        self._restarted.clear()

    def steps(self) -> Int64:
        """Of all that wait; a step may be named several times."""
        return np.array([step for step, _ in self._held], dtype=np.int64)

    def keys(self, through: int, stages: Iterable[str] | None = None) -> list[Key]:
        """Steps up to `through`, and stages, of what waits; of these stages alone, if given."""
        wanted = None if stages is None else frozenset(stages)
        return [k for k in self._held if k[0] <= through and (wanted is None or k[1] in wanted)]

    def of_lowest_rank(self, key: Key) -> wire.Fingerprint:
        """That of the lowest rank of all that wait, rank-local tensors included."""
        held = self._held[key]
        return held[min(held)].fingerprint

    def of_all_attempts(self, key: Key) -> Fingerprints:
        """Those of a step and stage, whatever a later attempt has posted."""
        return self._of(self._held[key].values() if key in self._held else ())

    def held(self, key: Key) -> Fingerprints:
        """Those of a step and stage that count: no later attempt has begun before."""
        begins = self._begins
        parts = self._held[key].values()
        return self._of(p for p in parts if key[0] < superseded_from(p.attempt, begins[p.rank]))

    def take(self, key: Key) -> Fingerprints:
        """The same as `held`; they wait no longer."""
        found = self.held(key)
        self._bytes -= sum(map(_bytes_of, self._held.pop(key).values()))
        return found

    def _of(self, parts: Iterable[FingerprintPart]) -> Fingerprints:
        found: Fingerprints = defaultdict(dict)
        for made in parts:
            shared = self._own.without(made.rank, made.fingerprint)
            if shared is not None:
                found[made.rank][made.fingerprint.table] = shared
        return found


def _bytes_of(made: FingerprintPart) -> int:
    sketches = made.fingerprint.sketches
    return int(made.fingerprint.digests.nbytes) + (0 if sketches is None else int(sketches.nbytes))
