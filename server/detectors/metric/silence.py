"""Is a series still posted, by ranks that post others? Pure.

Time is counted for each rank in the steps at which it posts anything at all: a rank that is slow,
gone, or sampled rarely, is silent as a whole, and others say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.metric.found import Event, MetricPolicy
from rankscope.server.window import Bool, Int64

# Times that a rank has posted a series before its silence counts.
_POSTS = 32


@dataclass(slots=True)
class Silence:
    """When ranks post one series. All arrays are int64, with a place for each number of a rank.

    Attributes:
        last: steps of its own that a rank had posted about when it last posted the series.
        gap: longest time between two posts.
        posts: how many there were.
        at: step of the last one.
        silent_since: since when a rank is silent; -1 for those that are not.
        until: last step of a silence that is over.
    """

    last: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    gap: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    posts: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    at: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    silent_since: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    until: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def take(
        self, ranks: Int64, steps: Int64, posted: Bool | None, clock: Int64, policy: MetricPolicy
    ) -> Iterator[Event]:
        """Judges the next steps.

        Args:
            ranks: int64 [R].
            steps: int64 [S].
            posted: bool [R, S]; None where no rank posted it at any of them.
            clock: int64 [R, S]: steps at which the rank has posted anything, this one included.
        """
        self._widen(int(ranks[-1]) + 1)
        if posted is None:
            posted = np.zeros(clock.shape, dtype=bool)
        marks = np.where(posted, clock, 0)
        latest = np.maximum.accumulate(np.maximum(marks, self.last[ranks, None]), axis=1)
        before = np.concatenate([self.last[ranks, None], latest[:, :-1]], axis=1)
        counts = self.posts[ranks, None] + np.cumsum(posted, axis=1)
        gaps = np.where(posted & (counts > 1), clock - before, 0)
        longest = np.maximum.accumulate(np.maximum(gaps, self.gap[ranks, None]), axis=1)
        quiet = clock - latest
        silent = (counts >= _POSTS) & (quiet > policy.silence + policy.silence_gaps * longest)
        ended = posted & (self.silent_since[ranks] >= 0)[:, None]
        if silent.any() or ended.any():
            yield from self._alerts(ranks, steps, posted, silent, quiet, longest, counts)
        self.last[ranks], self.gap[ranks] = latest[:, -1], longest[:, -1]
        self.posts[ranks] = counts[:, -1]
        newest = steps[len(steps) - 1 - np.argmax(posted[:, ::-1], axis=1)]
        self.at[ranks] = np.where(posted.any(axis=1), newest, self.at[ranks])

    def _alerts(
        self,
        ranks: Int64,
        steps: Int64,
        posted: Bool,
        silent: Bool,
        quiet: Int64,
        longest: Int64,
        counts: Int64,
    ) -> Iterator[Event]:
        at = self.at[ranks]
        for column, step in enumerate(steps.tolist()):
            back = posted[:, column]
            at[back] = step
            over = ranks[back & (self.silent_since[ranks] >= 0)]
            self.silent_since[over], self.until[over] = -1, step - 1
            new = np.flatnonzero(silent[:, column] & (self.silent_since[ranks] < 0))
            for row in new.tolist():
                self.silent_since[ranks[row]] = at[row] + 1
                others = (counts[:, column] >= _POSTS) & (np.arange(len(ranks)) != row)
                going = others & (quiet[:, column] <= 2 * np.maximum(longest[:, column], 1))
                alone = bool(others.any()) and 2 * int(going.sum()) > int(others.sum())
                yield Event(
                    question="silence",
                    ranks=(int(ranks[row]),) if alone or not others.any() else (),
                    first_step=int(at[row]) + 1,
                    seen_step=step,
                    size=float(quiet[row, column]),
                    usual=float(longest[row, column]),
                    times=float(quiet[row, column]) / max(float(longest[row, column]), 1.0),
                    extreme=alone,
                    count=int(counts[row, column]),
                    who=int(ranks[row]),
                )

    def _widen(self, count: int) -> None:
        """Ranks may come later; they have posted nothing yet."""
        new = count - len(self.last)
        if new > 0:
            self.last, self.gap, self.posts = (
                np.concatenate([held, np.zeros(new, dtype=np.int64)])
                for held in (self.last, self.gap, self.posts)
            )
            self.at, self.silent_since, self.until = (
                np.concatenate([held, np.full(new, -1, dtype=np.int64)])
                for held in (self.at, self.silent_since, self.until)
            )
