"""Whether what a rank does now and then comes at equal distances."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rankscope.server.window import Int64


@dataclass(frozen=True, slots=True)
class Beat:
    """Events at equal distances.

    Attributes:
        period: samples from one to the next.
        samples: numbers of the samples at which there was one, ascending; the last is the newest.
        chance: probability that any of a rank's distances gives as many by chance.
    """

    period: int
    samples: tuple[int, ...]
    chance: float


def tail(trials: int, least: int, chance: float) -> float:
    """Probability of at least this many successes."""

    def exactly(n: int) -> float:
        ways = math.lgamma(trials + 1) - math.lgamma(n + 1) - math.lgamma(trials - n + 1)
        return math.exp(ways + n * math.log(chance) + (trials - n) * math.log(1 - chance))

    return sum(exactly(n) for n in range(least, trials + 1))


def beat(samples: Int64, span: int, *, least: int, shortest: int) -> Beat | None:
    """The distance at which a rank's events come back most surely, the newest being one of them.

    Of each distance the samples are counted that lie so far apart, from the newest event back to an
    older one, the oldest among them, and how many of them are events: half at least. Chance gives
    each of them one (binomial) as often as there is one at all other samples; its probability is
    that for one distance and one oldest event, times the number of both that there are to choose
    from.

    Args:
        samples: int64 [N], ascending: numbers of the samples at which there was an event.
        span: number of samples among which they are.
        least: events that make a beat.
        shortest: distance.

    Returns:
        None where there are too few at any distance.
    """
    if len(samples) < least:
        return None
    back = samples[-1] - samples
    periods = np.arange(shortest, int(back[0]) // (least - 1) + 1)
    on = back[:, None] % periods == 0
    counts = on.sum(axis=0)
    trials = (back[:, None] * on).max(axis=0, initial=0) // periods + 1
    best: tuple[float, int] | None = None
    for place in np.flatnonzero((counts >= least) & (2 * counts >= trials)).tolist():
        count, tried = int(counts[place]), int(trials[place])
        elsewhere = max(len(samples) - count, 1) / max(span - tried, 2)
        elsewhere = min(elsewhere, 0.5)
        chance = elsewhere * tail(tried - 2, count - 2, elsewhere)
        if best is None or chance < best[0]:
            best = chance, place
    if best is None:
        return None
    chance, place = best
    found = tuple(samples[on[:, place]].tolist())
    choices = int((back[0] // periods).sum())
    return Beat(int(periods[place]), found, min(chance * choices, 1.0))
