"""A rank all of whose targets are of one class, beside others that have several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count, ranks
from rankscope.server.window import Window

_SHARE = "target_share"
# Samples in a row at which it has to be so: batches of two targets of two classes, say, are of one
# class half of the time, on all ranks alike.
_IN_A_ROW = 32
# Share of the scatter of all their targets that those of the other ranks have at such a step: that
# of batches drawn at random is 1.
_OTHERS = 0.5


@dataclass(slots=True)
class OneSided(Condition[frozenset[int]]):
    """Follows the scatter of each rank's own targets.

    Attributes:
        since: rank -> the first step of those in a row at which its targets were of one class, and
            how many these are.
    """

    since: dict[int, tuple[int, int]] = field(default_factory=dict)
    judged: int = 0
    watch: Watch[frozenset[int]] = field(default_factory=lambda: Watch(clear_after=_IN_A_ROW))

    def take(self, window: Window) -> None:
        """Goes through the samples step by step."""
        names = window.ranks.tolist()
        for step, row in zip(*rank_rows(window, _SHARE), strict=True):
            known = dict(zip(names, row.tolist(), strict=True))
            self._take(int(step), {rank: v for rank, v in known.items() if np.isfinite(v)})

    def _take(self, step: int, shares: Mapping[int, float]) -> None:
        mixed = [share for share in shares.values() if share > 0]
        if not mixed or min(mixed) < _OTHERS or len(shares) < 2:
            # Where the others' are alike as well it is no rank's alone.
            self.since.clear()
            self.watch.good(step)
            return
        for rank, share in shares.items():
            first, times = self.since.get(rank, (step, 0))
            if share > 0:
                self.since.pop(rank, None)
            else:
                self.since[rank] = first, times + 1
        self.judged += 1
        found = {rank: first for rank, (first, times) in self.since.items() if times >= _IN_A_ROW}
        if not found:
            self.watch.good(step)
            return
        episode = self.watch.bad(step, frozenset(), first_step=min(found.values()))
        episode.facts |= frozenset(found)

    def finding(self, episode: Episode[frozenset[int]]) -> Finding:
        """What is reported of an episode."""
        who = tuple(sorted(episode.facts))
        return episode.finding(
            kind="data.unmixed",
            key="rank",
            severity="warning",
            title=f"Every target of {ranks(who)} is of one class, and those of the others are not",
            ranks=who,
            stage="batch",
            cause=(
                f"At each of {count(episode.seen + _IN_A_ROW - 1, 'checked step')} since step "
                f"{episode.first_step} all targets of {ranks(who)} were of one and the same class, "
                "while the other ranks' were mixed: data that were dealt out by class or by file "
                "and not shuffled, a shard that holds one class, labels that are read wrongly "
                "there. What it computes pulls all ranks towards that class."
            ),
            remedy=(
                f"Count the classes of what {ranks(who)} reads. Shuffle before the data are dealt "
                "out, with one seed on all ranks (`DistributedSampler(shuffle=True)`)."
            ),
            evidence={_SHARE: 0.0, "observed": episode.seen},
        )
