"""What the questions find, and by which thresholds."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.server.detectors.policy import Count, Observations, Policy, Share, Sigmas, Times


@dataclass(frozen=True, slots=True)
class MetricPolicy(Policy):
    """Thresholds of `metric.anomaly`.

    Attributes:
        blocks: consecutive blocks of 16 observations for which a new level has to last.
        min_z: mean of these blocks over the scatter of earlier such means, from which on it is a
            move.
        min_times: smallest move as a multiple of the furthest earlier one.
        min_others: smallest move of an outlier as a multiple of the furthest of the other ranks'.
        lasting_blocks: consecutive blocks from which on a move is lasting.
        extreme_z: as `min_z`, from which on a move is extreme.
        extreme_times: as `min_times`, from which on a move is extreme.
        drift_chance: probability that a rank drifts as far by chance after its earlier moves, below
            which it is a warning; below its square root, information.
        min_spread: smallest shift of a rank as a multiple of the range in which the others always
            were.
        start_times: difference of a rank from the first block on that is reported, as a multiple of
            the others'.
        start_level: the same as a share of the level.
        spike_z: standard deviations from which on a single value stands out.
        single_times: single value that is reported, as a multiple of the largest earlier one.
        recurring: smallest number of outliers of one rank, or of spikes, that recur.
        chance: probability that as many are of one rank, or at equal distances, by chance.
        silence: steps without the series, while its rank posts others, before it is reported.
        silence_gaps: the same as a multiple of the longest earlier gap.
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
