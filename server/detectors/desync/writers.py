"""Who wrote parameters between two steps, where as many ranks hold one version as another."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rankscope.server.detectors.desync.resets import Blame
from rankscope.server.detectors.mechanisms.wording import agree, count, ranks
from rankscope.server.window import Comparison, Window

STAGE = "outside_optimizer"
# Consecutive steps before which no rank wrote anything, from which on a write is none of those that
# a loop makes on all ranks (a projection, an average): one of these is missed, and the rank that
# does not write is the wrong one.
_QUIET = 8


@dataclass(slots=True)
class Writers:
    """What the ranks say of each step of writes since the step before.

    Attributes:
        quiet: consecutive steps at which none of two or more ranks had written.
    """

    quiet: int = 0

    def take(self, window: Window, step: int) -> None:
        """The next step, after it has been judged."""
        wrote = _wrote(window, step)
        if len(wrote) > 1:
            self.quiet = 0 if any(wrote.values()) else self.quiet + 1

    def blame(self, window: Window, first: Comparison, made: Blame) -> Blame:
        """Names those that wrote, where the comparison itself does not tell who is wrong.

        Args:
            first: the first comparison that found a difference.
            made: what is known from it.
        """
        if first.stage != STAGE or made.decided or self.quiet < _QUIET:
            return made
        wrote = _wrote(window, first.step)
        members = set(first.ranks.tolist())
        who = {rank for rank in members if wrote.get(rank)}
        if not who or who == members or not members <= wrote.keys():
            return made
        suspects = tuple(sorted(who))
        return replace(
            made,
            suspects=suspects,
            decided=True,
            groups=tuple(sorted(made.groups, key=lambda group: not who.isdisjoint(group))),
            reported=(
                f"It was on {ranks(suspects)} that they were written: "
                f"{ranks(tuple(sorted(members - who)))} {agree(len(members - who), 'holds')} what "
                f"the optimizer left, and so did all of them at the {count(self.quiet, 'step')} "
                "before."
            ),
        )


def _wrote(window: Window, step: int) -> dict[int, bool]:
    """Rank -> whether its parameters were written between the step before and this one."""
    series = window.digests.get(STAGE)
    column = int(np.searchsorted(window.steps, step))
    if series is None or column == len(window.steps) or window.steps[column] != step:
        return {}
    rows = np.flatnonzero(series.present[:, column])
    changed = (series.values[rows, column] != 0).tolist()
    return dict(zip(window.ranks[rows].tolist(), changed, strict=True))
