"""How many of the ranks the comparisons were of: what part of them agreed says nothing of all."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.server.detectors.mechanisms.wording import count, ranks
from rankscope.server.window import Check, Comparison

# Of the comparisons of a link, the share at the end that may lack ranks: the last batches of a run
# come one after the other. What differs stays different, so that a later one that has all ranks
# makes up for those before it.
_AT_THE_END = 0.25


@dataclass(slots=True)
class Coverage:
    """Of the comparisons of one link those that lacked ranks.

    Attributes:
        partial: their number, and that of those since the last one that lacked none.
        fewest, of: ranks that were compared in the smallest of them, and that should have been.
        since: step of the first one since the last that lacked none.
        missing: ranks that the last one lacked.
    """

    partial: int = 0
    since_whole: int = 0
    fewest: int = 0
    of: int = 0
    since: int = 0
    missing: tuple[int, ...] = ()

    def take(self, comparison: Comparison) -> None:
        """The next comparison of the link."""
        self.missing = comparison.missing
        if not comparison.missing:
            self.since_whole = 0
            return
        if not self.since_whole:
            self.since = comparison.step
        self.partial += 1
        self.since_whole += 1
        there = len(comparison.ranks)
        if not self.of or there < self.fewest:
            self.fewest, self.of = there, there + len(comparison.missing)

    def too_few(self, checked: int, grace: int) -> Check | None:
        """The answer where part of the ranks were compared and nothing later makes up for it.

        Args:
            checked: comparisons of the link.
            grace: so many at the end may always lack ranks, but for a share of all.
        """
        if self.since_whole <= min(grace, _AT_THE_END * checked):
            return None
        return Check.insufficient(
            f"Only {self.fewest:,} of {count(self.of, 'rank')} were compared at "
            f"{self.since_whole:,} of {count(checked, 'checked step')}, from step {self.since:,} "
            f"on: {ranks(self.missing)} had reported nothing of them."
        )

    def said(self) -> str:
        """What an answer adds where earlier comparisons lacked ranks."""
        if not self.partial:
            return ""
        return (
            f" At {self.partial:,} of these steps fewer ranks had reported, {self.fewest:,} of "
            f"{self.of:,} at least."
        )
