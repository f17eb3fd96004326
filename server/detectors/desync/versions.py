"""Which version of the parameters each rank holds, derived from model digests alone.

Ranks that train for themselves between two averagings, and workers of a parameter server, hold
different parameters by design. What shows whether the design is kept: that all of them come
together at an averaging, and that what a worker holds is what the server held not long ago.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.window import Window

# Versions remembered.
_MEMORY = 4096
# Steps without a gap after which a version that is not known is not a rank's that is old.
_LONG = 64


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """What digests say of one step.

    Attributes:
        joined: whether ranks that differed after the step before were equal before this one, or
            after it, all of them.
        outside: ranks that were not part of it, where most ranks came together, out of more than
            two that were all by themselves before.
        groups: where all that were all by themselves before became equal in groups of two and
            more: these, in the order of their ranks.
        lags: steps by which what each rank holds is old, where all of it is versions of one model
            and one rank at most has made a new one; None where that is not so.
        between: whether it is known what the ranks held before the step, after the one before it.
        nobody: whether it is known that none of them wrote anything in between.
        known: whether every version that a rank may hold was seen, as far back as it matters.
    """

    joined: bool = False
    outside: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    lags: dict[int, int] | None = None
    known: bool = False
    between: bool = False
    nobody: bool = False


@dataclass(slots=True)
class Versions:
    """Digests that ranks have held.

    Attributes:
        born: digest -> step after which a rank first held it, in that order.
        held: rank -> digest after step `step`.
        since: first step since which none was left out.
        started: whether that is the first one of all.
    """

    born: OrderedDict[int, int] = field(default_factory=OrderedDict)
    held: dict[int, int] = field(default_factory=dict)
    step: int = -2
    since: int = 0
    started: bool = False

    def take(self, window: Window, step: int, members: Sequence[int]) -> VersionFacts:
        """Looks at the digests of a step; steps are to be shown in their order."""
        if not window.rank_local.isdisjoint(members):
            return VersionFacts()  # no two ranks ever hold one version
        start = _digests_at(window, "start", step, members)
        if start:
            # What there was before the first step.
            self.held, self.step = start, step - 1
            self.since, self.started = step, True
            self._bear(start, step - 1)
        after = _digests_at(window, "parameters", step, members)
        changes = _digests_at(window, "outside_optimizer", step, members)
        held = self.held if self.step == step - 1 else {}
        if len(after) < 2:
            return _before_alone(held, changes)
        if not held:
            self.since, self.started = step, False
        before = {
            rank: (held[rank] + change) % 2**64 for rank, change in changes.items() if rank in held
        }
        new = self._bear(after, step)
        self.held, self.step = after, step
        differed = len(set(held.values())) > 1 and held.keys() == after.keys()
        if len(set(after.values())) == 1:
            return VersionFacts(
                differed, lags=dict.fromkeys(after, 0), known=True, between=bool(before)
            )
        together = before if before.keys() == after.keys() else {}
        joined = differed and len(set(together.values())) == 1
        alone = differed and len(held) > 2 and len(set(held.values())) == len(held)
        outside: tuple[int, ...] = ()
        groups: tuple[tuple[int, ...], ...] = ()
        if alone and not joined:
            groups = _groups(together) or _groups(after)
            outside = () if groups else _outside(together) or _outside(after)
        lags = None
        if len(new) <= 1:
            lags = {rank: step - self.born[digest] for rank, digest in after.items()}
        known = self.started or step - self.since >= _LONG
        nobody = bool(together) and not any(changes.values())
        return VersionFacts(joined, outside, groups, lags, known, bool(together), nobody)

    def _bear(self, digests: dict[int, int], step: int) -> set[int]:
        """Takes digests; returns those that nobody had before."""
        # Digest by digest: the difference of a set and the keys of a dict walks through all the
        # keys.
        new = {digest for digest in digests.values() if digest not in self.born}
        for digest in sorted(new):
            self.born[digest] = step
        while len(self.born) > _MEMORY:
            self.born.popitem(last=False)
            self.started = False
        return new


def _before_alone(held: dict[int, int], changes: dict[int, int]) -> VersionFacts:
    """What is known before a step after which nobody has sampled."""
    if len(held) < 2 or not held.keys() <= changes.keys():
        return VersionFacts()
    before = {rank: (digest + changes[rank]) % 2**64 for rank, digest in held.items()}
    differed = len(set(held.values())) > 1
    nobody = not any(changes[rank] for rank in held)
    alone = len(held) > 2 and len(set(held.values())) == len(held)
    joined = differed and len(set(before.values())) == 1
    groups = _groups(before) if alone else ()
    return VersionFacts(joined, groups=groups, between=True, nobody=nobody)


def _digests_at(window: Window, name: str, step: int, members: Sequence[int]) -> dict[int, int]:
    series = window.digests.get(name)
    if series is None:
        return {}
    column = int(np.searchsorted(window.steps, step))
    if column == len(window.steps) or window.steps[column] != step:
        return {}
    rows = np.flatnonzero(np.isin(window.ranks, members) & series.present[:, column])
    return dict(zip(window.ranks[rows].tolist(), series.values[rows, column].tolist(), strict=True))


def _groups(digests: dict[int, int]) -> tuple[tuple[int, ...], ...]:
    """Ranks with one digest, where every rank shares its own with another, and not with all."""
    holders: dict[int, list[int]] = defaultdict(list)
    for rank, digest in sorted(digests.items()):
        holders[digest].append(rank)
    if len(holders) < 2 or min(map(len, holders.values())) < 2:
        return ()
    return tuple(tuple(group) for group in holders.values())


def _outside(digests: dict[int, int]) -> tuple[int, ...]:
    """Ranks that have not the digest that most have; none where there is no such digest."""
    holders: dict[int, list[int]] = defaultdict(list)
    for rank, digest in digests.items():
        holders[digest].append(rank)
    most = max(holders.values(), key=len, default=[])
    if 2 * len(most) <= len(digests):
        return ()
    return tuple(sorted(set(digests) - set(most)))
