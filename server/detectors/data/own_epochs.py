"""Ranks whose epochs come in one order, while the others' are shuffled anew each time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.data.batches import Collisions
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.wording import agree, count, ranks
from rankscope.server.window import Int64

UInt64 = npt.NDArray[np.uint64]

# Shorter orders are a loader that stands still, or goes through a few batches: `OwnRepeats`.
_SHORTEST = 9
# Remembered observations of all ranks together, and of each at least; an epoch that is longer is
# not recognised.
_MEMORY = 65_536
_LEAST = 512  # epochs of some hundred batches are known of 1,000 ranks, too


@dataclass(slots=True)
class _Order:
    """The batches of one rank.

    Attributes:
        seen: digest -> step at which it was seen last.
        at: step -> digest.
        run: consecutive observations that repeat what was seen `distance` steps before.
        since: step of the first of them.
        distinct: different ones among them: a batch that comes again and again is no order.
        chance: how often two batches are the same by chance, as those of few samples may be.
    """

    seen: dict[int, int] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)
    steps: deque[int] = field(default_factory=deque)
    run: int = 0
    distance: int = 0
    since: int = 0
    distinct: set[int] = field(default_factory=set)
    chance: Collisions = field(default_factory=Collisions)

    def take(self, step: int, digest: int, memory: int) -> None:
        earlier = self.seen.get(digest)
        before = self.run
        if earlier is not None and step - earlier >= _SHORTEST:
            if not self.run or step - earlier != self.distance:
                self.run, self.distance, self.since = 0, step - earlier, step
            self.run += 1
        elif earlier is not None or step - self.distance in self.at:
            # Where its counterpart was not examined, it says nothing.
            self.run = 0
        if self.run <= 1:
            self.distinct.clear()
        if self.run:
            self.distinct.add(digest)
        # What goes on in a sequence is no chance.
        self.chance.push(digest, counts=self.run <= max(before, 1))
        self.seen[digest], self.at[step] = step, digest
        self.steps.append(step)
        if len(self.steps) > memory:
            gone = self.steps.popleft()
            old = self.at.pop(gone)
            if self.seen.get(old) == gone:
                del self.seen[old]

    @property
    def repeats(self) -> bool:
        """Whether so many repeat that it is no chance."""
        return bool(self.run) and len(self.distinct) >= self.chance.needed()


@dataclass(slots=True)
class Epochs:
    """Ranks that read one order again and again.

    Attributes:
        ranks: those.
        distance: steps from a batch to the same one before; of the first rank.
        length: consecutive observations that repeat; the most of a rank.
    """

    ranks: tuple[int, ...]
    distance: int
    length: int


@dataclass(slots=True)
class OwnEpochs:
    """Follows the order of each rank's batches."""

    orders: dict[int, _Order] = field(default_factory=dict)
    watch: Watch[Epochs] = field(default_factory=lambda: Watch(clear_after=64))

    def take(self, step: int, who: Int64, digests: UInt64) -> None:
        """The batches of all ranks at a step.

        Args:
            who: ranks, [R].
            digests: of their batches, [R].
        """
        memory = max(_MEMORY // max(len(who), 1), _LEAST)
        for rank, digest in zip(who.tolist(), digests.tolist(), strict=True):
            order = self.orders.get(rank)
            if order is None:
                order = self.orders[rank] = _Order()
            order.take(step, digest, memory)
        repeating = [rank for rank in who.tolist() if self.orders[rank].repeats]
        # Where others begin to repeat, too, it is the order of all the data, or soon will be.
        new = [rank for rank in who.tolist() if not self.orders[rank].run]
        if not repeating or len(repeating) + len(new) < len(who) or not new:
            self.watch.good(step)
            return
        orders = [self.orders[rank] for rank in repeating]
        facts = Epochs(tuple(repeating), orders[0].distance, max(o.run for o in orders))
        episode = self.watch.bad(step, facts, first_step=min(o.since for o in orders))
        if len(facts.ranks) >= len(episode.facts.ranks):
            episode.facts = facts


def epochs_finding(episode: Episode[Epochs]) -> Finding:
    """The finding as it stands."""
    epochs, step = episode.facts, episode.first_step
    who, several = ranks(epochs.ranks), len(epochs.ranks)
    return episode.finding(
        kind="data.unshuffled",
        key="own",
        severity="warning",
        title=f"Batches of {who} come in the same order again since step {step}, the others' do "
        "not",
        ranks=epochs.ranks,
        stage="batch",
        cause=(
            f"Since step {step} {who} {agree(several, 'reads')} what "
            f"{'it' if several == 1 else 'they'} read {count(epochs.distance, 'step')} before, in "
            f"the same order ({count(epochs.length, 'batch')} in a row), while the other ranks' "
            "batches are new ones. Where samplers split one shuffled list between the ranks, the "
            "part of such a rank is one of another list: some samples are read by two ranks in an "
            "epoch, others by none."
        ),
        remedy=(
            f"Look at what {who} {agree(several, 'does')} at the beginning of an epoch: "
            "`sampler.set_epoch(epoch)` is to be called on every rank, with the same epoch. "
            "Nothing, if its data are fewer and the order is meant."
        ),
        evidence={"distance": epochs.distance, "length": epochs.length},
    )
