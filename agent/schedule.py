"""Which step is sampled at which tiers: nested powers of two, thinned to an overhead budget.

A tier with exponent k is due at steps divisible by 2^k. Ranks choose k on their own, from what they
measure of themselves; two ranks then still share every step divisible by the larger 2^k, with no
agreement needed (design, section 3). Pure: the caller reports what things cost, and it never reads
a clock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection

from rankscope.agent.allowance import Allowance

# From cheap to dear: loss, learning rate and timing; gradient norm and accuracy; one digest of the
# whole model; the links of the chain tensor by tensor; what changes slowly (optimizer state,
# buffers, random state). Where a tier is due, those before it are: which link broke first is only
# seen where all of them are sampled.
TIERS = ("basic", "signals", "word", "full", "state")

# What each tier may take of the budget that the one before it left over.
_SHARES = {"basic": 0.6, "signals": 0.5, "word": 0.4, "full": 0.7, "state": 1.0}
# What is done at every step, or nearly, is a cost of the median step, which must not show it (steps
# vary by more than a sample costs, so that their median moves with the mean of what is done often).
# At most this share of the budget for all such tiers together.
_EVERY_STEP = 0.45
_OFTEN = 2  # largest exponent of what is done often
# What the tier `signals` may take of a step in the first steps of a run, or this share of a budget
# that is larger than usual.
_DENSE_SHARE, _DENSE_BUDGET = 0.02, 0.5
# Where what is done at every step has used up the budget, sampling still gets this share of it.
_LEAST = 0.25
_MAX_EXPONENT = 10
# A run is under way after these seconds, if not by the number of its steps. From then on a tier
# takes no more than this share of the budget, unless it is due at most every `_OFTEN_ENOUGH`
# seconds: after 20 s batches go every four seconds, and two samples between two of them report
# nothing sooner. The share is that small because samples lengthen steps by up to twice what they
# measure of themselves (caches are cold after them, and ranks wait for each other), and because the
# median of steps whose times vary much is moved by what is done at one in 32.
_UNDER_WAY_SECONDS, _UNDER_WAY, _OFTEN_ENOUGH = 20.0, 0.08, 2.0
# What can be had at every step for this share of the budget goes on: nothing that lasts for a
# single step is missed then.
_WHOLE = 0.3
# A sample that takes 10 times `overhead` (a tenth of a step, at the usual one) exceeds the per-step
# overhead limit: it makes its step slow, however seldom. No more than one step in a thousand is to
# be slow, and batches cause some of these: once a run is under way, such samples come at one step
# in 4,096, or one in 48 s.
_PEAK, _PEAK_EXPONENT, _PEAK_SECONDS = 10.0, 12, 48.0
# A tier exceeds the limit by this number of samples at least, without those of the start, with cold
# caches.
_LEAST_SAMPLES = 5
_WINDOW = 15
# The plan is made anew after `_NOTES` notes of costs, and more often while there are few.
_NOTES, _FIRST_NOTES, _FEW_NOTES = 32, 8, 64
# Once a run is under way, the cost of one sample in `_NOTED` is noted where nothing but losses and
# rates is sampled; or of the first one after `_NOTED_SECONDS`.
_NOTED, _NOTED_SECONDS = 4, 1.0
# Where `_PACE_STEPS` steps or more pass between two notes, and their mean is `_OTHER_PACE` times
# that of the plan, or as much less, twice in a row, the training has changed its pace. Medians
# would say so thousands of steps later.
_OTHER_PACE, _PACE_STEPS = 2.0, 8
# A step that takes this many times as long as usual is a pause: an evaluation, a checkpoint, a
# person at a notebook. What is more than that does not count for how long the run has been under
# way.
_PAUSE = 5.0
# This number of dense-sampling requests is remembered, the last ones.
_DENSE_REQUESTS = 8
# A tier gets denser again only when it fits with this much room, so that noise in the measured
# times does not make it jump to and fro.
_ROOM = 0.7


class Schedule:
    """The sampling plan of one rank.

    Args:
        overhead: largest share of the step time that all probes together may take, in (0, 1].
        first_step: first step of this attempt.
        dense_steps: number of steps from there at which everything is due, whatever it costs.
        dense_basic_steps: the same for the tier `basic`, however long they take: a short run is
            recorded whole, and so is what a gate asks of it, on a busy machine as on a quiet one.
            In the first 20 s its tier `signals`, too, while it takes no more than 2 % of the step,
            or half of `overhead`: it shows at which step the ranks' gradients diverged.
        steps_under_way: number of steps, or else 20 s, after which a tier that is due more often
            than every two seconds takes 0.08 of `overhead` at most, or 0.3 where it is due at every
            step, and a sample that takes more than 10 times `overhead` of a step is taken at one
            step in 4,096, but every 48 s at least.
        allowance: seconds of the agent's own time that are spent on full samples before `overhead`
            governs (`Allowance`); infinite: every step is sampled in full to the end.
    """

    def __init__(
        self,
        *,
        overhead: float,
        first_step: int = 0,
        dense_steps: int = 8,
        dense_basic_steps: int = 1024,
        steps_under_way: int = 2048,
        allowance: float = 0.0,
    ) -> None:
        self._overhead = overhead
        self._dense_end = first_step + dense_steps
        self._dense_basic_end = self._dense_signals_end = first_step + dense_basic_steps
        self._dense_signals = True
        self._under_way = first_step + steps_under_way
        self._is_under_way = False
        self._elapsed = 0.0  # seconds that the steps noted so far took, without pauses
        self._planned = 0.0  # seconds a step that the plan was made for
        self._off_pace = False  # whether the last step noted took another time
        self._over_limit: set[str] = set()  # tiers up to which a sample takes too much of a step
        # Tier -> seconds that samples took up to it, those beyond the tier `basic` alone.
        self._sample_costs: dict[str, deque[tuple[float, float]]] = {
            t: deque(maxlen=_WINDOW) for t in TIERS[1:]
        }
        self._requests: list[tuple[int, int]] = []  # first and last step of each
        self._requested_until = -1  # the last of all
        self._exponents = dict.fromkeys(TIERS, 0)
        self._costs: dict[str, deque[float]] = {t: deque(maxlen=_WINDOW) for t in TIERS}
        self._base: deque[float] = deque(maxlen=_WINDOW)
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._noted = 0
        self._masks = self._as_masks()
        self._allowance = Allowance(allowance)

    @property
    def exponents(self) -> dict[str, int]:
        """Tier -> k: the tier is due at steps divisible by 2^k."""
        return dict(self._exponents)

    @property
    def allowance(self) -> Allowance:
        """What is left to sample beginnings by, and how often."""
        return self._allowance

    def ask_dense(self, until_step: int, from_step: int = 0) -> None:
        """Makes everything due at every step from `from_step` up to `until_step`."""
        # What another one asks for, too, takes no place: a long request is not forgotten for short
        # ones that lie within it.
        if any(a <= from_step and until_step <= b for a, b in self._requests):
            return
        others = [(a, b) for a, b in self._requests if not (from_step <= a and b <= until_step)]
        self._requests = [*others, (from_step, until_step)][-_DENSE_REQUESTS:]
        self._requested_until = max(self._requested_until, until_step)

    def due(self, tier: str, step: int) -> bool:
        """Whether a tier is to be sampled at a step."""
        return self.plan(step)[TIERS.index(tier)]

    def plan(self, step: int) -> tuple[bool, bool, bool, bool, bool]:
        """Whether each of `TIERS` is due at a step, in their order."""
        allowance = self._allowance
        if (
            (allowance.lasts and not step & allowance.mask)
            or step < self._dense_end
            or self._is_requested(step)
        ):
            return True, True, True, True, True
        basic, signals, word, full, state = self._masks
        return (
            not step & basic or step < self._dense_basic_end,
            not step & signals or (self._dense_signals and step < self._dense_signals_end),
            not step & word,
            not step & full,
            not step & state,
        )

    def next_due(self, step: int) -> int:
        """First step after `step` at which a tier is due."""
        if step + 1 < self._dense_basic_end:
            return step + 1
        interval = 1 << self._exponents[TIERS[0]]
        following = step + interval - step % interval
        if self._allowance.lasts:
            following = min(following, (step | self._allowance.mask) + 1)
        if step < self._requested_until:
            for first, last in self._requests:
                if step < last:
                    following = min(following, max(first, step + 1))
        return following

    def note(
        self,
        step: int,
        *,
        step_seconds: float,
        base: float,
        tiers: dict[str, float],
        again: Collection[str] = (),
        since: float | None = None,
    ) -> None:
        """Takes what a step cost.

        Args:
            step: the step.
            step_seconds: how long the whole step took.
            base: seconds spent on what is done at every step.
            tiers: seconds spent on each tier: of processor time, so that a machine that others
                keep busy does not make samples rarer.
            again: those of them that are not due at this step: what was sampled at the step before
                is read once more, and both together are what such a sample costs. How long the
                sampled step takes is judged without them.
            since: seconds since the last step that was noted; `step_seconds` if not given.
        """
        since = step_seconds if since is None else since
        if self._allowance.lasts:
            self._allowance.note(since / max(step_seconds, 1e-9), since, base + sum(tiers.values()))
        begins = self._begins(step, step_seconds, since)
        changed = since >= _PACE_STEPS * step_seconds and self._pace_has_changed(step_seconds)
        self._steps.append(step_seconds)
        self._base.append(base)
        for tier, seconds in tiers.items():
            # Losses and rates come by the way where only something beyond them is read again.
            costs = self._costs["word" if tier in again and tier == "basic" else tier]
            if tier in again and costs:
                costs[-1] += seconds
            else:
                costs.append(seconds)
        due = {tier: seconds for tier, seconds in tiers.items() if tier not in again}
        if step >= self._dense_end and len(due) > 1:
            self._note_sample(base, due)
        self._noted += 1
        regular = self._noted % (_NOTES if self._noted > _FEW_NOTES else _FIRST_NOTES) == 0
        if begins or changed or regular:
            self._adapt()

    def wants(self, step: int, since: float) -> bool:
        """Whether what a step has cost is to be noted where nothing beyond `basic` was due.

        Args:
            step: the step.
            since: seconds since the last step that was noted.
        """
        # Not those at which other tiers are due every so often: these have their own notes.
        return (
            not self._is_under_way
            or since >= _NOTED_SECONDS
            or (step >> self._exponents["basic"]) % _NOTED == 1
        )

    @property
    def is_made(self) -> bool:
        """Whether the cost of samples is known well enough for a plan."""
        return self._planned > 0

    def at_every_step(self) -> float:
        """Seconds that something may take of each step; 0 as long as there is no plan."""
        return _WHOLE * self._overhead * self._planned

    def share(self) -> float:
        """Share of the step time that the probes take at the present plan."""
        # At the end another thread asks, which may come in the midst of a note.
        steps, base = tuple(self._steps), tuple(self._base)
        if not (steps and base):
            return 0.0
        spent = statistics.median(base)
        for tier, costs in self._costs.items():
            if costs:
                spent += statistics.median(costs) / (1 << self._exponents[tier])
        return spent / max(statistics.median(steps), 1e-9)

    def _adapt(self) -> None:
        # Medians: a step that a page fault or a neighbour made slow must not thin the sampling.
        step_seconds = self._planned = statistics.median(self._steps)
        budget = self._overhead * step_seconds
        left = max(budget - statistics.median(self._base), _LEAST * budget)
        every_step = _EVERY_STEP * budget - statistics.median(self._base)
        dense = max(_DENSE_SHARE, _DENSE_BUDGET * self._overhead) * step_seconds
        least = 0  # a tier is never due where one before it is not
        for tier in TIERS:
            if not self._costs[tier]:
                # Nothing is measured in this tier (yet): no reason to thin it.
                self._exponents[tier] = least
                continue
            cost = statistics.median(self._costs[tier])
            allowance = left * _SHARES[tier]
            current = self._exponents[tier]
            while current < _MAX_EXPONENT and not _fits(cost, current, allowance, every_step):
                current += 1
            while current > 0 and _fits(cost, current - 1, allowance * _ROOM, every_step * _ROOM):
                current -= 1
            if self._is_under_way:
                current = self._thinned(tier, current, cost, step_seconds)
            # Losses are what a run is followed by: they come although they exceed the limit.
            if self._is_under_way and tier != "basic" and self._exceeds_limit(tier, _PEAK * budget):
                steps = _PEAK_SECONDS / max(step_seconds, 1e-9)
                at_most = math.floor(math.log2(max(steps, 1.0)))
                current = max(current, min(_PEAK_EXPONENT, at_most))
            least = current = max(current, least)
            if current <= _OFTEN:
                every_step -= cost / (1 << current)
            self._exponents[tier] = current
            left -= cost / (1 << current)
            if tier == "signals":
                self._dense_signals = cost <= dense * (1.0 if self._dense_signals else _ROOM)
        self._masks = self._as_masks()

    def _begins(self, step: int, step_seconds: float, since: float) -> bool:
        """Whether the run is under way from this step on."""
        if self._is_under_way:
            return False
        # Before there is a plan it is not known what a pause is.
        self._elapsed += since * min(1.0, _PAUSE * self._planned / max(step_seconds, 1e-9))
        if self._elapsed >= _UNDER_WAY_SECONDS:
            # Losses alone cost a fraction of a second for all of these steps, whatever they take.
            self._dense_signals_end = min(self._dense_signals_end, step + 1)
        self._is_under_way = step >= self._under_way or self._elapsed >= _UNDER_WAY_SECONDS
        return self._is_under_way

    def _pace_has_changed(self, step_seconds: float) -> bool:
        """Whether steps take another time than the plan is for, here and at the note before."""
        before, planned = self._off_pace, self._planned
        self._off_pace = self._is_under_way and not (
            planned / _OTHER_PACE <= step_seconds <= planned * _OTHER_PACE
        )
        if not (before and self._off_pace):
            return False
        last = self._steps[-1]
        self._off_pace = False
        self._steps.clear()
        self._steps.append(last)
        return True

    def _thinned(self, tier: str, exponent: int, cost: float, step_seconds: float) -> int:
        budget = self._overhead * step_seconds
        allowance = _UNDER_WAY * budget
        if exponent == 0 and cost <= _WHOLE * budget * (_ROOM if self._exponents[tier] else 1.0):
            return 0
        while exponent < _MAX_EXPONENT:
            room = _ROOM if exponent < self._exponents[tier] else 1.0
            interval = 1 << exponent
            if cost / interval <= allowance * room or step_seconds * interval * room >= (
                _OFTEN_ENOUGH
            ):
                break
            exponent += 1
        return exponent

    def _note_sample(self, base: float, tiers: dict[str, float]) -> None:
        seconds, dear = base + tiers.get("basic", 0.0), 0.0
        for tier, samples in self._sample_costs.items():
            if tier in tiers:
                dear += tiers[tier]
                samples.append((seconds + dear, dear))

    def _exceeds_limit(self, tier: str, limit: float) -> bool:
        samples = self._sample_costs[tier]
        if len(samples) < _LEAST_SAMPLES:
            return False
        if tier in self._over_limit:
            limit *= _ROOM
        # What adds little to losses and rates that exceed the limit themselves makes no step slow.
        exceeds = (
            statistics.median(seconds for seconds, _ in samples) > limit
            and statistics.median(dear for _, dear in samples) > limit / 2
        )
        (self._over_limit.add if exceeds else self._over_limit.discard)(tier)
        return exceeds

    def _is_requested(self, step: int) -> bool:
        return step <= self._requested_until and any(a <= step <= b for a, b in self._requests)

    def _as_masks(self) -> tuple[int, int, int, int, int]:
        basic, signals, word, full, state = ((1 << self._exponents[t]) - 1 for t in TIERS)
        return basic, signals, word, full, state


def _fits(cost: float, exponent: int, allowance: float, every_step: float) -> bool:
    limit = min(allowance, every_step) if exponent <= _OFTEN else allowance
    return cost / (1 << exponent) <= limit
