"""Whether ranks that nothing keeps equal exchange anything at all, or each trains alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors.desync.averaging_rounds import MARK
from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.window import Comparison, Window

_GRADIENTS = ("reduced_gradient", "clipped_gradient")
# Steps at which no two ranks had the same gradient, before anything is said of that.
_SAMPLES = 4


@dataclass(slots=True)
class Exchange:
    """What was seen of an exchange between the ranks.

    Ranks that train together share gradients at every step, or write their parameters outside the
    optimizer now and then: who averages them (local SGD), pulls them from a server or trades them
    with a neighbour does. What leaves neither trace brings the ranks closer together.

    Attributes:
        own_gradients: steps at which gradients were compared and every rank had its own.
        shared: whether any two ranks ever had the same gradient, or others' in its own.
        writes_checked: steps before which it was looked for that parameters were written.
        written: whether any rank ever wrote its parameters outside the optimizer.
        wrapped: whether a wrapper, a sharding or copies of their own were declared.
    """

    own_gradients: int = 0
    shared: bool = False
    writes_checked: int = 0
    written: bool = False
    wrapped: bool = True

    def observe(self, window: Window, *, rank_local: bool) -> None:
        """Takes what a window says beside the comparisons."""
        config = window.config
        self.wrapped = rank_local or "data_parallel" not in config
        self.wrapped |= bool(config.get("data_parallel") or config.get("sharded_over"))
        self.shared |= any(
            made.applied is not None and made.applied.exchanged for made in window.reductions
        )
        rounds, digests = window.series.get(MARK), window.digests.get("outside_optimizer")
        self.written |= rounds is not None and bool(rounds.present.any())
        # Not everything that writes is counted by torch: `parameter.data` has a counter of its own.
        if digests is not None:
            self.written |= bool(np.any(digests.values[digests.present]))
            self.writes_checked += int(digests.present.all(axis=0).sum())

    def take(self, comparisons: Sequence[Comparison]) -> None:
        """Takes all comparisons of one step."""
        for comparison in comparisons:
            if comparison.stage in _GRADIENTS:
                own = int(comparison.clusters.max(initial=0)) + 1 == len(comparison.ranks)
                self.shared |= not own
                self.own_gradients += own

    def none_seen(self, incident: Divergence, last_equal: int | None) -> bool:
        """Whether these ranks have never exchanged anything, as far as was seen.

        Args:
            incident: ranks that differ.
            last_equal: last step after which the parameters were equal; None for none.
        """
        return (
            not (self.wrapped or self.shared or self.written)
            and min(self.own_gradients, self.writes_checked) >= _SAMPLES
            and (incident.tentative or incident.stage == "start")
            and all(len(group) == 1 for group in incident.groups)
            and incident.met < 0
            # A step of size 0, at the beginning of a warm-up, leaves them equal.
            and (last_equal is None or last_equal <= incident.first_step)
            and not incident.closer
        )
