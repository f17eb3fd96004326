"""Values that are known of every step: one far outside its own recent past trips a wire. Pure.

Whatever else happens at such a step is seen only where the next ones are sampled in full, at once:
the answer of a server is hundreds of short steps away.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

# What is judged by its logarithm: half as much is as far away as twice as much.
_SCALES = frozenset(
    (
        "grad_norm",
        "grad_norm_local",
        "grad_norm_canary",
        "grad_norm_preclip",
        "clip_coefficient",
        "amp_scale",
        "step_seconds",
    )
)
# Counts of a step, and running counts, of which the increase is judged. They take a few values, and
# any other is far away.
_COUNTS = frozenset(("samples",))
_RUNNING = frozenset(("scheduler_steps", "steps_skipped", "micro_steps"))
_WATCHED = frozenset(("loss",)) | _SCALES | _COUNTS | _RUNNING
# What says how long a step took, and nothing of what it computed. On a busy machine it is far away
# whatever the training does: what it trips must not hide what the training's own values say.
_TIMES = frozenset(("step_seconds",))

# The recent past, in values, and how many of them there have to be before one is judged.
_PAST, _LEAST = 32, 16
# The bounds are computed anew after this number of values: to sort costs ten times a comparison.
_ANEW = 8
# Deviations beyond the median. A normal distribution does not come there; one with exponential
# tails (Laplace), which losses and norms of gradients seldom exceed, at one value in 1,300 as the
# MAD of 32 values varies (tests/agent/test_tripwires.py), as often as there are tokens for it.
_FACTOR = 10.0
# From the MAD to the standard deviation of a normal distribution.
_NORMAL = 1.4826
# What hardly varies is not far away within this: 5 % of a loss; of scales, a factor of 2, by which
# a loss scaler changes in the ordinary course of things.
_LEAST_SHARE, _LEAST_FACTOR = 0.05, math.log(2.0) * 1.001
# Counts that took more different values than this vary in the ordinary course of things.
_MOST_COUNTS = 8
# Full samples after a trip: what comes back at every third step is among them five times.
SAMPLES = 16
# At most `TOKENS` trips at once, half of them by one value, and one more every `_REFILL` steps: no
# more than 16 steps in 1,024 (1.6 %) are sampled for what turns out to be nothing. Of these later
# ones, too, times take half at most.
TOKENS, _REFILL = 8, 1024
# A logarithm for what is 0, below that of any number.
_NOTHING = -800.0


@dataclass(frozen=True, slots=True)
class Trip:
    """A value far outside its own recent past.

    Attributes:
        step: its step.
        usual: median of the last values; None where it took none but others so far.
    """

    metric: str
    step: int
    value: float
    usual: float | None

    def __str__(self) -> str:
        usual = (
            "" if self.usual is None else f"; the median of the steps before is {self.usual:.4g}"
        )
        return f"{self.metric} is {self.value:.4g} at step {self.step}{usual}"


class Tripwires:
    """Those of one rank.

    Args:
        first_step: first step of this process.
    """

    def __init__(self, first_step: int = 0) -> None:
        self._pasts: dict[str, _Past | _Counted] = {}
        self._tokens = Tokens(TOKENS, first_step)
        self._each: dict[str, Tokens] = {}
        self._first = first_step
        # Last steps that are sampled for what has tripped: for anything, and for other than times.
        self._until = self._values_until = -1

    def take(self, step: int, values: Mapping[str, float]) -> Trip | None:
        """Takes the values of a step; what has tripped, if anything has and is to be examined.

        While the steps after a trip are sampled nothing trips, but for this: the training's own
        values do after a slow step. Steps may come late, and their values in several parts.
        """
        found = []
        for name, value in values.items():
            if name in _WATCHED:
                past = self._pasts.get(name)
                if past is None:
                    past = self._pasts[name] = _past_of(name)
                if past.is_far(step, value):
                    found.append(name)
        for name in sorted(found, key=_TIMES.__contains__):
            if self._is_examined(step, name):
                return Trip(name, step, values[name], self._pasts[name].usual)
        return None

    def _is_examined(self, step: int, name: str) -> bool:
        """Whether a value that is far away is examined; takes the tokens for it."""
        is_time = name in _TIMES
        if step <= (self._until if is_time else self._values_until):
            return False
        each = self._each.get(name)
        if each is None:
            refill = 2 * _REFILL if is_time else _REFILL
            each = self._each[name] = Tokens(TOKENS // 2, self._first, refill)
        if not (each.has(step) and self._tokens.has(step)):
            return False
        each.take()
        self._tokens.take()
        self._until = max(self._until, step + SAMPLES)
        if not is_time:
            self._values_until = step + SAMPLES
        return True


class _Past:
    """The last values of a metric, and the bounds that follow from them."""

    __slots__ = ("_broken", "_high", "_last", "_log", "_low", "_since", "_usual")

    def __init__(self, *, log: bool) -> None:
        self._log = log
        self._last: deque[float] = deque(maxlen=_PAST)
        self._low, self._high = -math.inf, math.inf
        self._usual: float | None = None
        self._since = 0
        self._broken = False  # whether the last value was no number

    @property
    def usual(self) -> float | None:
        """The median of what came before."""
        return self._usual

    def is_far(self, step: int, value: float) -> bool:
        """Takes a value; whether it is far from those before it."""
        if not math.isfinite(value):
            # Each time that it happens anew; where all of the past is so, nothing is unusual.
            before, self._broken = self._broken, True
            return not before
        self._broken = False
        if self._log:
            value = math.log(value) if value > 0 else _NOTHING
        far = not self._low <= value <= self._high
        self._last.append(value)
        self._since += 1
        if self._since >= _ANEW and len(self._last) >= _LEAST:
            self._since = 0
            self._find_bounds()
        return far

    def _find_bounds(self) -> None:
        middle = statistics.median(self._last)
        deviation = statistics.median([abs(v - middle) for v in self._last])
        least = _LEAST_FACTOR if self._log else _LEAST_SHARE * abs(middle)
        reach = max(_FACTOR * _NORMAL * deviation, least)
        self._low, self._high = middle - reach, middle + reach
        self._usual = math.exp(middle) if self._log else middle


class _Counted:
    """The values that a count has taken; of a running count, what it has grown by at a step."""

    __slots__ = ("_before", "_known", "_running", "_seen")

    usual = None

    def __init__(self, *, running: bool) -> None:
        self._running = running
        self._known: set[float] = set()
        self._seen = 0
        self._before: tuple[int, float] | None = None

    def is_far(self, step: int, value: float) -> bool:
        """Takes a value; whether it is one that has not been there yet."""
        if self._running:
            before, self._before = self._before, (step, value)
            if before is None or step != before[0] + 1:
                return False
            value -= before[1]
        self._seen += 1
        if value in self._known or len(self._known) > _MOST_COUNTS:
            return False
        self._known.add(value)
        return self._seen > _LEAST


def _past_of(name: str) -> _Past | _Counted:
    if name in _COUNTS or name in _RUNNING:
        return _Counted(running=name in _RUNNING)
    return _Past(log=name in _SCALES)


class Tokens:
    """A token bucket: full at the beginning, with one more token every `refill` steps."""

    __slots__ = ("_left", "_most", "_refill", "_step")

    def __init__(self, most: int, step: int, refill: int = _REFILL) -> None:
        self._most = most
        self._left = float(most)
        self._step = step
        self._refill = refill

    def has(self, step: int) -> bool:
        """Whether there is one at a step."""
        since, self._step = max(step - self._step, 0), max(step, self._step)
        self._left = min(self._left + since / self._refill, self._most)
        return self._left >= 1

    def take(self) -> None:
        """Takes one."""
        self._left -= 1
