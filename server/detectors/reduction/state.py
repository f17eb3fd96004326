"""What is remembered of the reductions of a run, while they are examined one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope.server.detectors.mechanisms.episode import Watch
from rankscope.server.detectors.mechanisms.loss_weights import LossWeights
from rankscope.server.detectors.reduction.averages import AveragedParameters
from rankscope.server.detectors.reduction.clipped import ClippedBefore
from rankscope.server.detectors.reduction.counted import CountedShares
from rankscope.server.detectors.reduction.explain import Fault
from rankscope.server.detectors.reduction.gain import ReductionGain
from rankscope.server.detectors.reduction.means import Means
from rankscope.server.detectors.reduction.shards import ShardClipping
from rankscope.server.detectors.reduction.unreduced import UnreducedGradients


@dataclass(slots=True)
class Streak:
    """Reductions in a row with the same weights of the ranks, or the same factor."""

    weights: tuple[float, ...]
    since: int
    count: int = 1


@dataclass(slots=True)
class Divided:
    """Reductions in a row in which the same tensors were divided by the same number."""

    tensors: tuple[tuple[str, int], ...]
    since: int
    count: int = 0


@dataclass(slots=True)
class ReductionState:
    """What is remembered.

    Attributes:
        compared: reductions examined; `unequal` of them gave the ranks different results.
        kept: those that gave the mean, up to one factor for all.
        scaled: those of them whose factor is neither 1 nor one of the number of ranks.
        plain: those of them whose factor is 1.
        streaks: lowest rank of a replica class -> those in a row that were not `plain`.
        divided: lowest rank of a replica class -> number of samples in a row with the same tensors
            divided by the same number, which gets mixed up with that of the ranks.
        factors: lowest rank of a replica class -> factor of its last reduction.
        unexplained: those that were something else, from the start on.
        tensors: most tensors examined in one; `unknown` are those that could not be, and
            `compressed` the number of those that need not be the mean.
    """

    compared: int = 0
    unequal: int = 0
    kept: int = 0
    scaled: int = 0
    plain: int = 0
    streaks: dict[int, Streak] = field(default_factory=dict)
    divided: dict[int, Divided] = field(default_factory=dict)
    factors: dict[int, float] = field(default_factory=dict)
    unexplained: int = 0
    tensors: int = 0
    tensor_count: int = 0
    compressed: int = 0
    ranks: int = 0
    unknown: tuple[str, ...] = ()
    watch: Watch[Fault] = field(default_factory=lambda: Watch(clear_after=8, gathers=True))
    notes: Watch[Fault] = field(default_factory=lambda: Watch(clear_after=8))
    means: Means = field(default_factory=Means)
    shards: ShardClipping = field(default_factory=ShardClipping)
    averages: AveragedParameters = field(default_factory=AveragedParameters)
    unreduced: UnreducedGradients = field(default_factory=UnreducedGradients)
    losses: LossWeights = field(default_factory=LossWeights)
    clipped: ClippedBefore = field(default_factory=ClippedBefore)
    gain: ReductionGain = field(default_factory=ReductionGain)
    counted: CountedShares = field(default_factory=CountedShares)
