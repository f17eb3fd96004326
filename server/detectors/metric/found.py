"""What the questions find, and by which thresholds."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.server.detectors.policy import Count, Observations, Policy, Share, Sigmas, Times


@dataclass(frozen=True, slots=True)
class MetricPolicy(Policy):
    """Thresholds of `metric.anomaly`.

    Attributes:
        blocks: consecutive blocks of 16 observations that a new level lasts.
        min_z: mean of them over the scatter of such means before.
        min_times: the same as a multiple of the furthest such mean before.
        min_others: an outlier as a multiple of the furthest of the other ranks.
        lasting_blocks: consecutive blocks from which on it lasts.
        extreme_z: scatter from which on it is extreme.
        extreme_times: multiple of the furthest before, for the same.
        drift_chance: that a rank drifts as far after the moves before, for a warning; its root for
            information.
        min_spread: a rank's shift as a multiple of the range in which the others always were.
        start_times: a rank that differs from the first block on, as a multiple of the others.
        start_level: the same as a share of the level.
        spike_z: standard deviations of single values that stand out.
        single_times: multiple of all values before, of a single one that is reported.
        recurring: outliers of one rank, or spikes, at least.
        chance: probability that this many are of one rank, or at equal distances.
        silence: steps without the series, while its rank posts others.
        silence_gaps: and this many times the longest gap before.
        calm: observations without it after which it is over.
    """

    blocks: Count = 2
    min_z: Sigmas = 8.0
    min_times: Times = 1.5
    min_others: Times = 3.0
    lasting_blocks: Count = 4
    extreme_z: Sigmas = 12.0
    extreme_times: Times = 3.0
    drift_chance: Share = 1e-6
    min_spread: Times = 3.0
    start_times: Times = 5.0
    start_level: Share = 0.25
    spike_z: Sigmas = 10.0
    single_times: Times = 10.0
    recurring: Count = 5
    chance: Share = 1e-9
    silence: Observations = 64
    silence_gaps: Times = 8.0
    calm: Observations = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that one series shows.

    Attributes:
        question: `shift`, `outlier`, `recurring`, `level`, `spike`, `spikes` or `silence`.
        ranks: of which it is; empty for all.
        size: how far from what is usual.
        usual: the level of the series.
        times: size over the furthest that was seen before.
        extreme: whether that is more than a healthy run shows, and lasts or recurs.
        from_start: whether it was so from the first block on.
        period: steps from one to the next, 0 for none.
        count: how many there were, of what recurs.
        who: rank that is silent, also where all are.
    """

    question: str
    ranks: tuple[int, ...]
    first_step: int
    seen_step: int
    size: float
    usual: float
    times: float
    extreme: bool
    from_start: bool = False
    period: int = 0
    count: int = 1
    who: int = -1
