"""Ranks that read the same few batches again and again, while the others read new ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.wording import agree, count, ranks
from rankscope.server.window import Bool, Int64

UInt64 = npt.NDArray[np.uint64]

# Batches that a loop of one rank goes through, at most: what a loader that stands still gives, or
# one whose workers have died but for some. Longer orders are those of small data sets.
_LONGEST = 8
# Consecutive observations at which a batch was the one before, or that of a loop ago. Accumulation
# and steps that are done again repeat a batch two or three times; the other ranks read new ones
# meanwhile, so that a buffer which is used several times on purpose is out of the question.
_TIMES = 8


@dataclass(frozen=True, slots=True)
class Loop:
    """Ranks that read the same few batches (one, or some in turn) over and over."""

    ranks: tuple[int, ...]
    length: int


@dataclass(slots=True)
class OwnRepeats:
    """Follows the batches of each rank.

    Attributes:
        past: digests of the last observations, newest first, uint64 [P, R].
        runs: consecutive observations that were those of 1 to P before, [P, R].
        since: step of the first of them, [P, R].
    """

    past: UInt64 = field(default_factory=lambda: np.zeros((0, 0), np.uint64))
    runs: Int64 = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    since: Int64 = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    watch: Watch[Loop] = field(default_factory=lambda: Watch(clear_after=8))

    def take(self, step: int, who: Int64, digests: UInt64) -> None:
        """The batches of all ranks at a step.

        Args:
            who: ranks, [R].
            digests: of their batches, [R].
        """
        if self.past.shape[1:] != digests.shape:
            # Ranks that join later, or a job that goes on with fewer.
            self.past = np.zeros((0, len(digests)), np.uint64)
            self.runs = np.zeros((_LONGEST, len(digests)), np.int64)
            self.since = np.zeros((_LONGEST, len(digests)), np.int64)
        seen = len(self.past)
        same: Bool = self.past == digests
        begins = same & (self.runs[:seen] == 0)
        self.since[:seen][begins] = step
        self.runs[:seen] = np.where(same, self.runs[:seen] + 1, 0)
        self.past = np.concatenate((digests[None], self.past))[:_LONGEST]
        # Twice through the loop at least: one batch that came again by itself is no loop.
        needed = np.maximum(_TIMES, 2 * np.arange(1, _LONGEST + 1))[:, None]
        loops = self.runs >= needed
        stuck = loops.any(axis=0)
        if not stuck.any() or stuck.all():
            # Where all of them repeat, it is the order of the data.
            self.watch.good(step)
            return
        lengths = np.argmax(loops, axis=0)
        rows = np.flatnonzero(stuck)
        facts = Loop(tuple(who[rows].tolist()), int(lengths[rows].max()) + 1)
        since = int(self.since[lengths[rows], rows].min())
        episode = self.watch.bad(step, facts, first_step=since)
        if len(facts.ranks) > len(episode.facts.ranks):
            episode.facts = facts


def own_finding(episode: Episode[Loop]) -> Finding:
    """The finding as it stands."""
    loop, step = episode.facts, episode.first_step
    who = ranks(loop.ranks)
    verb, whose = agree(len(loop.ranks), "trains"), agree(len(loop.ranks), "reads")
    held = "one and the same batch" if loop.length == 1 else f"the same {loop.length} batches"
    return episode.finding(
        kind="data.replayed",
        key="own",
        severity="warning",
        title=f"{who.capitalize()} {verb} on {held} again and again since step {step}",
        ranks=loop.ranks,
        stage="batch",
        cause=(
            f"Since step {step} {who} {whose} {held}, bit for bit, while the other ranks read new "
            f"ones: seen at {count(episode.seen + _TIMES - 1, 'checked step')}. Its loader stands "
            "still or is begun anew at every step, or a buffer or cache before the model is no "
            "longer filled. The mean gradient counts these samples many times."
        ),
        remedy=(
            f"Look at the loader of {who}: workers that died, an iterator that is made anew, an "
            "exception that is swallowed and the last batch used again."
        ),
        evidence={"batches": loop.length, "own": list(loop.ranks)},
    )
