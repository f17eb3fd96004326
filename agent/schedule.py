"""Which step is looked at how closely: nested powers of two, thinned to an overhead budget.

A tier with exponent k is due at steps divisible by 2^k. Ranks choose k on their own, from what they
measure of themselves; two ranks then still share every step divisible by the larger 2^k, with no
agreement needed (design, section 3). Pure: it is told what things cost and never looks at a clock.
"""

from __future__ import annotations

import statistics
from collections import deque

# From cheap to dear: gradient norm and accuracy, one digest of the whole model, then everything
# tensor by tensor.
TIERS = ("signals", "word", "full")

# What each tier may take of the budget that the one before it left over.
_SHARES = {"signals": 0.5, "word": 0.6, "full": 1.0}
_MAX_EXPONENT = 10
_WINDOW = 15
# A tier gets denser again only when it fits with this much room, so that noise in the measured
# times does not make it jump to and fro.
_ROOM = 0.7


class Schedule:
    """The sampling plan of one rank.

    Args:
        overhead: largest share of the step time that all probes together may take, in (0, 1].
        first_step: first step of this attempt.
        dense_steps: number of steps from there at which everything is due, whatever it costs.
    """

    def __init__(self, *, overhead: float, first_step: int = 0, dense_steps: int = 8) -> None:
        self._overhead = overhead
        self._dense_end = first_step + dense_steps
        self._dense_until = -1
        self._exponents = dict.fromkeys(TIERS, 0)
        self._costs: dict[str, deque[float]] = {t: deque(maxlen=_WINDOW) for t in TIERS}
        self._base: deque[float] = deque(maxlen=_WINDOW)
        self._steps: deque[float] = deque(maxlen=_WINDOW)

    @property
    def exponents(self) -> dict[str, int]:
        """Tier -> k: the tier is due at steps divisible by 2^k."""
        return dict(self._exponents)

    def ask_dense(self, until_step: int) -> None:
        """Makes everything due at every step up to `until_step`."""
        self._dense_until = max(self._dense_until, until_step)

    def due(self, tier: str, step: int) -> bool:
        """Whether a tier is to be sampled at a step."""
        if step < self._dense_end or step <= self._dense_until:
            return True
        return step % (1 << self._exponents[tier]) == 0

    def note(self, step: int, *, step_seconds: float, base: float, tiers: dict[str, float]) -> None:
        """Takes what a step cost.

        Args:
            step: the step.
            step_seconds: how long the whole step took.
            base: seconds spent on what is done at every step.
            tiers: seconds spent on each tier that was due.
        """
        self._steps.append(step_seconds)
        self._base.append(base)
        for tier, seconds in tiers.items():
            self._costs[tier].append(seconds)
        if step % 8 == 7:
            self._adapt()

    def share(self) -> float:
        """Share of the step time that the probes take at the present plan."""
        if not self._steps:
            return 0.0
        spent = statistics.median(self._base)
        for tier, costs in self._costs.items():
            if costs:
                spent += statistics.median(costs) / (1 << self._exponents[tier])
        return spent / max(statistics.median(self._steps), 1e-9)

    def _adapt(self) -> None:
        # Medians: a step that a page fault or a neighbour made slow must not thin the sampling.
        left = self._overhead * statistics.median(self._steps) - statistics.median(self._base)
        for tier in TIERS:
            if not self._costs[tier]:
                continue
            cost = statistics.median(self._costs[tier])
            allowance = left * _SHARES[tier]
            current = self._exponents[tier]
            while current < _MAX_EXPONENT and cost / (1 << current) > allowance:
                current += 1
            while current > 0 and cost / (1 << (current - 1)) <= allowance * _ROOM:
                current -= 1
            self._exponents[tier] = current
            left -= cost / (1 << current)
