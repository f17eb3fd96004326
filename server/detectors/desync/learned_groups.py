"""Ranks that have to hold one and the same thing (a batch, a random state), and no longer do.

Nobody says which ranks these are: they are learned. Ranks that held the same at enough consecutive
observations, something new each time, are a group, and from then on have to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.restarts import passed
from rankscope.server.window import Int64

Ranks = tuple[int, ...]


@dataclass(slots=True)
class Group:
    """Ranks that hold the same.

    Attributes:
        times: observations at which they did.
        agreed_until: step of the last of them.
    """

    times: int
    agreed_until: int


class Differs(Protocol):
    """What a detector knows of a group whose ranks differ."""

    @property
    def group(self) -> Ranks:
        """The ranks."""


Known = TypeVar("Known", bound=Group)
Facts = TypeVar("Facts", bound=Differs)


@dataclass(slots=True)
class Groups(Generic[Known, Facts]):
    """The groups of a run, and the one whose ranks differ.

    Attributes:
        judged: observations so far.
        candidates: ranks that held the same -> at how many consecutive observations.
        known: ranks that have to hold the same.
        restarts: how often a rank has begun anew so far.
        watch: since when a group differs.
    """

    judged: int = 0
    candidates: dict[Ranks, int] = field(default_factory=dict)
    known: dict[Ranks, Known] = field(default_factory=dict)
    restarts: int = 0
    watch: Watch[Facts] = field(default_factory=lambda: Watch(clear_after=8))

    def begin(self, later: Int64, step: int) -> None:
        """Which ranks share is learned anew after a restart.

        Args:
            later: first steps of processes that came after a rank's first one, ascending.
        """
        begun = passed(later, step)
        if begun > self.restarts:
            self.restarts = begun
            self.forget()

    def forget(self) -> None:
        """Learn anew which ranks are groups."""
        self.candidates.clear()
        self.known.clear()

    def observe(
        self,
        step: int,
        held: Mapping[int, int],
        alike: Iterator[Ranks],
        *,
        needed: int,
        made: Callable[[int, int], Known],
        differs: Callable[[Ranks, Known, Mapping[int, int]], tuple[Facts, int | None]],
    ) -> None:
        """Takes what ranks held at one step.

        Args:
            held: rank -> what it held, of the ranks that were sampled at this step.
            alike: ranks that held the same, something new, and may be a group.
            needed: consecutive observations that make a group.
            made: a group of what has been seen: observations, and the last step of these.
            differs: what is known of a group whose ranks differ, and since which step, if before.
        """
        self.judged += 1
        found, sampled = None, set[Ranks]()
        for group, known in self.known.items():
            of_group = {rank: held[rank] for rank in group if rank in held}
            if len(of_group) == len(group):
                sampled.add(group)
                if len(set(of_group.values())) == 1:
                    known.times, known.agreed_until = known.times + 1, step
                elif found is None:
                    found = differs(group, known, of_group)
        if found is not None:
            facts, since = found
            self.watch.bad(step, facts, first_step=since)
        elif sampled:
            episode = self.watch.current
            # Ranks are sampled at steps of their own: others that agree say nothing of these.
            if episode is None or not episode.holding or episode.facts.group in sampled:
                self.watch.good(step)
        taken = {rank for group in self.known for rank in group}
        # Of ranks that were not sampled at this step, nothing new is known.
        candidates = {g: n for g, n in self.candidates.items() if not any(r in held for r in g)}
        for group in alike:
            if not taken & set(group):
                candidates[group] = self.candidates.get(group, 0) + 1
                if candidates[group] >= needed:
                    self.known[group] = made(candidates[group], step)
                    taken |= set(group)
        self.candidates = candidates

    def episodes(self, last_step: int) -> Iterator[Episode[Facts]]:
        """Differences to be reported after a window."""
        return self.watch.take(last_step)


def groups_of(keys: Mapping[int, Hashable], part: Mapping[int, int]) -> Iterator[Ranks]:
    """Ranks with the same key that hold different parts of the model, each group once.

    Args:
        part: rank -> number of the replica class that it belongs to.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank, key in keys.items():
        members[key].append(rank)
    for ranks in members.values():
        if len(ranks) > 1 and len({part.get(rank) for rank in ranks}) == len(ranks):
            yield tuple(ranks)


def suspects_of(held: Mapping[int, int]) -> Ranks:
    """The ranks that do not hold what most do; all of them where there is no majority."""
    holding: dict[int, list[int]] = defaultdict(list)
    for rank, value in held.items():
        holding[value].append(rank)
    most = max(holding.values(), key=len)
    if 2 * len(most) <= len(held):
        return tuple(sorted(held))
    return tuple(sorted(set(held) - set(most)))
