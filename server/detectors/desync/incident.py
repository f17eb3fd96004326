"""What is known of ranks that diverged, while they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations, pairwise

import numpy as np

from rankscope.server.detectors.desync.averaging_rounds import MissedRound
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.window import (
    Applied,
    Comparison,
    RankLiveness,
    Reduction,
    TensorDifference,
    Window,
)

_MAX_SIZES = 64
# Steps after the onset that count as the first ones.
_EARLY = 8
# Steps examined tensor by tensor that show no further tensor, after which all are known: weights
# that begin at zero let a gradient through at the next step.
_SETTLED = 2


class Growth(StrEnum):
    """How the distance of the ranks developed."""

    UNKNOWN = "unknown"
    CONSTANT = "constant"
    SHRINKING = "shrinking"
    GROWING = "growing"
    EXPONENTIAL = "exponential"


# Steps that changed the parameters, after all of which these agreed, before that is no chance.
_ALWAYS = 8
# How near to 1 the factor of a mean is, and how near to their number that of a sum over ranks.
_THE_MEAN = 5e-4


@dataclass(slots=True, kw_only=True)
class Divergence(Incident):
    """Ranks that differ.

    Attributes:
        kind: out of `KINDS`.
        stage: the first link that broke.
        ranks: the suspect ranks.
        decided: whether a majority shows which ranks are suspect, or what else they did does.
        groups: ranks that agreed with each other when it began, the largest group first.
        agreed: links that were compared at the first step and agreed.
        by_norm: those of them of which only a norm was compared.
        last_equal: last step before at which the broken link was compared and agreed, or None.
        agreed_until: last step before at which it or the parameters were compared and agreed.
        unwatched: whether gradients were not compared at every step since.
        tensors: those that differed at the first sample tensor by tensor, most relevant first; of
            gradients that no majority shows to be right, at the sample with the most of them.
        tensor_count: how many there are in all; 0 until a sample tensor by tensor.
        tensor_stage, tensor_step: where and when that sample was.
        relative: largest distance over norm so far of the stage that broke; NaN while unknown.
        sizes: (step, distance, relative) of the parameters, at steps examined tensor by tensor.
        broken: stage -> steps at which it was compared and differed.
        compared: stage -> steps at which it was compared.
        setting: the hyperparameter that differed, as a person calls it; empty if it is not known.
        values: rank -> that hyperparameter when it began.
        missed: period of a synchronisation that did not take place; 0 for none.
        ended: whether there was none since, of any rank.
        lag: of workers of a parameter server, steps by which the suspects' parameters are old,
            and by which others were at most; (0, 0) for none.
        tentative: whether every rank was alone from the first comparison on, and nothing was seen
            that would keep them equal: they may be made equal later, on purpose.
        met: last step before which all ranks wrote their parameters; -1 for none.
        met_after: steps from the one before, or from the beginning, to that.
        unmet: whether such a step was examined that did not make them equal.
        in_part: whether the ranks are averaged in some tensors, and others are left out: that is a
            finding of its own.
        inside: whether the optimizer reduces these gradients in its own step.
        alone: whether nothing was ever seen of an exchange between these ranks: no wrapper, no
            gradient that two of them share, no parameters written outside the optimizer.
        parts: whether its ranks hold different parts of the model, and work on one batch together.
        own_batches: whether they were seen to read different batches when it began, all the same.
        at_start: whether it was there at the first step of a process.
        agreeing: whether the last comparison of the parameters found them equal.
        applied: of reduced gradients, what each of `applied_ranks` applied beside what went into
            the reduction, at the first step at which that was seen; None for unknown.
        not_held: names of tensors that the optimizer which is watched does not hold, as far as they
            were reported.
        reported: what the suspect ranks have reported, as a sentence.
        state_divergence: of parameters, the divergence of the optimizer's state that was seen
            later and must have come first.
        shown_by: of such a state, first step at which the parameters were seen to differ.
    """

    kind: str
    stage: str
    ranks: tuple[int, ...]
    decided: bool
    groups: tuple[tuple[int, ...], ...]
    agreed: tuple[str, ...]
    by_norm: tuple[str, ...]
    last_equal: int | None
    agreed_until: int | None = None
    unwatched: bool = False
    tensors: tuple[TensorDifference, ...] = ()
    tensor_count: int = 0
    tensor_stage: str = ""
    tensor_step: int = -1
    relative: float = math.nan
    sizes: list[tuple[int, float, float]] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    setting: str = ""
    values: Mapping[int, float] = field(default_factory=dict)
    missed: int = 0
    ended: bool = False
    lag: tuple[int, int] = (0, 0)
    agreeing: bool = False
    at_start: bool = False
    tentative: bool = False
    met: int = -1
    met_after: int = 0
    unmet: bool = False
    in_part: bool = False
    alone: bool = False
    inside: bool = False
    parts: bool = False
    own_batches: bool = False
    applied: Applied | None = None
    applied_ranks: tuple[int, ...] = ()
    not_held: frozenset[str] = frozenset()
    reported: str = ""
    state_divergence: Divergence | None = None
    shown_by: int | None = None
    _same_tensors: int = 0
    _stride: int = 1
    _offered: int = 0

    def covers(self, comparison: Comparison) -> bool:
        """Whether ranks that agree with each other show that it is over.

        Ranks sample steps of their own: those that agreed all the time agree still.
        """
        present = set(comparison.ranks.tolist())
        if not present.issuperset(self.ranks):
            return False
        return len(present) > len(self.ranks) or not self.decided

    def stands(self, step: int, liveness: Sequence[RankLiveness]) -> None:
        """Lasts until `step`, as nothing shows that it is over, while its ranks are there.

        Of ranks that have left nobody knows what they hold: it neither goes on nor is it over.
        """
        there = max((life.last_step for life in liveness if life.rank in self.ranks), default=-1)
        self.last_step = max(self.last_step, step if there < 0 else min(step, there))

    def averaged_at(self, step: int) -> None:
        """All ranks wrote their parameters before this step, as where these are averaged."""
        if step > self.met:
            self.met_after = step - (self.met if self.met >= 0 else self.first_step)
            self.met = step

    def widen(self, comparison: Comparison) -> None:
        """Learns who differs from whom, once more ranks have sampled than when it began.

        What was written between two steps is compared by model digests, in which tensors that more
        ranks hold cannot be seen: the parameters after the step report these. So they do where
        those ranks alone had sampled of which nothing shows which one is wrong.
        """
        present = {*comparison.ranks.tolist()}
        known = {rank for group in self.groups for rank in group}
        own = comparison.stage == self.stage
        untold = self.stage == "outside_optimizer" or not self.decided
        after = untold and comparison.stage == "parameters"
        narrower = comparison.decided and {*comparison.deviating} < {*self.ranks}
        if self.missed or self.lag[0] or not present > known:
            return
        if not (own or (after and narrower)) or self._joins(comparison):
            return
        self.ranks = comparison.deviating
        self.decided = comparison.decided and len(present) > 2
        self.groups = groups_of(comparison)
        self.tentative = self.tentative and all(len(group) == 1 for group in self.groups)

    def _joins(self, comparison: Comparison) -> bool:
        """Whether ranks that differed agree now: that is what became of it, and not who began."""
        of = dict(zip(comparison.ranks.tolist(), comparison.clusters.tolist(), strict=True))
        clusters = [{of[rank] for rank in group if rank in of} for group in self.groups]
        return any(one & other for one, other in combinations(clusters, 2))

    def take(self, comparisons: Sequence[Comparison]) -> None:
        """Learns from the comparisons of one step, the first one included."""
        for comparison in comparisons:
            stage = comparison.stage
            self.compared[stage] = self.compared.get(stage, 0) + 1
            if comparison.equal:
                continue
            self.broken[stage] = self.broken.get(stage, 0) + 1
            # Digests say nothing of the size, and norms give a lower bound only.
            sized = comparison.tensor_count > 0 or stage == "hyperparameters"
            largest = _largest(comparison.relative) if sized else math.nan
            if stage == self.stage or (stage == "parameters" and self.kind == "desync.parameters"):
                self.relative = float(np.fmax(self.relative, largest))
            if stage in ("parameters", "start") and comparison.tensor_count > 0:
                self._size(comparison.step, _largest(comparison.distance), largest)
        if not self.tensor_count and self.stage != "hyperparameters":
            self._name_tensors(comparisons)
        else:
            self._name_more(comparisons)

    def learn(self, window: Window) -> None:
        """Takes what a window says beside the comparisons."""
        self.take_reductions(window.reductions)
        held = window.config.get("optimizer_tensors")
        if isinstance(held, Mapping):
            missing = held.get("missing")
            names = missing if isinstance(missing, list | tuple) else ()
            self.not_held = frozenset(str(name) for name in names)

    def take_reductions(self, reductions: Sequence[Reduction]) -> None:
        """Learns what each rank applied: of the first reduction that shows it.

        One that shows that gradients were exchanged is better than one that shows too little.
        """
        members = {rank for group in self.groups for rank in group}
        for made in reductions:
            if self.stage != "reduced_gradient" or (self.applied and self.applied.reduced):
                return
            known, there = made.applied, tuple(int(r) for r in made.ranks)
            if known is None or made.step < self.first_step or not members <= set(there):
                continue
            if self.applied is None or known.reduced:
                self.applied, self.applied_ranks = known, there
                self._decide(known, there)

    def _decide(self, applied: Applied, there: tuple[int, ...]) -> None:
        """Those that applied the mean of what all put in show who is wrong.

        They may be the few: what one rank passes on to others, these agree in.
        """
        right = {r for r, n in zip(there, applied.averaged, strict=True) if n == applied.tensors}
        if right == set(there) and not self.decided:
            right = _right_multiples(dict(zip(there, applied.factors, strict=True)))
        if right not in [set(group) for group in self.groups]:
            return
        if self.decided and (self.stage != "reduced_gradient" or right == set(self.groups[0])):
            return
        self._blame(tuple(r for r in there if r not in right), right)

    def _decide_zeros(self) -> None:
        """Of two ranks the one that has no gradient of what the other has one of is wrong."""
        if sum(map(len, self.groups)) != 2:
            return
        first, second = (group[0] for group in self.groups)
        if all(t.factor == 0.0 for t in self.tensors):
            self._blame((second,), {first})
        elif all(0 < t.distance < math.inf and math.isinf(t.relative) for t in self.tensors):
            # What they are held against has no length, and what differs is finite.
            self._blame((first,), {second})
            self.tensors = tuple(replace(t, factor=0.0, relative=1.0) for t in self.tensors)

    def _blame(self, wrong: tuple[int, ...], right: set[int]) -> None:
        self.decided, self.tentative, self.ranks = True, False, wrong
        self.groups = (
            tuple(sorted(right)),
            *(group for group in self.groups if set(group) != right),
        )
        # What was taken for those that differ is what the others differ from.
        self.tensors = tuple(
            replace(t, ranks=wrong, factor=1.0 / t.factor if t.factor else math.nan)
            if set(t.ranks) == right
            else t
            for t in self.tensors
        )

    def _name_tensors(self, comparisons: Sequence[Comparison]) -> None:
        with_tensors = [c for c in comparisons if c.tensors]
        # The link that broke knows best; the parameters bear the traces of every other one.
        with_tensors.sort(key=lambda c: (c.stage != self.stage, c.stage != "parameters"))
        if with_tensors:
            chosen = with_tensors[0]
            self.tensors = tuple(sorted(chosen.tensors, key=_by_relevance))
            self.tensor_count = chosen.tensor_count
            self.tensor_stage, self.tensor_step = chosen.stage, chosen.step
            if self.stage == self.tensor_stage == "reduced_gradient" and not self.decided:
                self._decide_zeros()

    def _name_more(self, comparisons: Sequence[Comparison]) -> None:
        """Learns of further gradients that are not reduced.

        What is reduced is the same on all ranks, whatever became of their parameters: so what
        differs later was not reduced at first either, and was zero on all of them (behind weights
        that begin at zero). After some steps with the same tensors, others that differ are another
        matter: the job may reduce no more gradients on purpose.
        """
        if self.stage != "reduced_gradient" or self.tensor_stage != self.stage or self.decided:
            return
        for comparison in comparisons:
            if comparison.stage != self.stage or not comparison.tensor_count:
                continue
            if self._same_tensors >= _SETTLED:
                return
            if len(comparison.tensors) > len(self.tensors):
                self._name_tensors([comparison])
                self._same_tensors = 0
            else:
                self._same_tensors += 1

    def _size(self, step: int, distance: float, relative: float) -> None:
        if math.isnan(distance):
            return
        if self._offered % self._stride == 0:
            self.sizes.append((step, distance, relative))
            if len(self.sizes) > _MAX_SIZES:
                self.sizes = self.sizes[::2]
                self._stride *= 2
        self._offered += 1

    @property
    def from_start(self) -> bool:
        """Whether parameters differed before the first step."""
        return self.stage == "start" or (self.stage == "frozen" and self.at_start)

    @property
    def one_element(self) -> bool:
        """Whether it looks as if a single element of a single tensor were different."""
        if self.stage not in ("outside_optimizer", "parameters", "start", "frozen"):
            return False
        if len(self.tensors) != 1 or self.tensor_stage == "reduced_gradient":
            return False
        only = self.tensors[0]
        return only.buckets == 1 and math.prod(only.shape) > 1

    def misses(self, missed: MissedRound, wrote: Collection[int]) -> None:
        """It is a synchronisation that did not make all ranks equal.

        Args:
            wrote: ranks that have ever taken part in one.
        """
        self.missed, self.tentative = missed.period, False
        self.first_step, self.ended = missed.step, missed.ended
        if missed.ended and wrote:
            self.ranks = tuple(sorted(wrote))

    @property
    def written(self) -> bool:
        """Whether something else than an optimizer wrote the parameters: it moves whole tensors.

        That is so likely only where several steps went by since they were equal: within one, the
        update may have gone wrong in one place.
        """
        if (
            not self.one_element
            or self.stage != "parameters"
            or self.missed
            or self.state_divergence
        ):
            return False
        if "outside_optimizer" in self.agreed:
            return False
        return self.last_equal is None or self.last_equal < self.first_step - 1

    @property
    def subgroups(self) -> bool:
        """Whether every rank agrees with some other one, and not all with each other."""
        return len(self.groups) > 1 and all(len(group) > 1 for group in self.groups)

    def reduced_inside(self, stood: int) -> bool:
        """Whether these gradients never agreed, and what every step made of them always did.

        Then the optimizer's own step exchanges something: it reduces, or deals out its work.

        Args:
            stood: steps that changed nothing.
        """
        always = self.broken.get(self.stage, 0) == self.compared.get(self.stage, 0)
        moved_alike = self.compared.get("parameters", 0) - stood >= _ALWAYS
        apart = self.broken.get("parameters", 0) + self.broken.get("start", 0)
        gradients = self.stage == "reduced_gradient" and self.last_equal is None
        each = self.everywhere and all(len(group) == 1 for group in self.groups)
        return gradients and always and each and moved_alike and not apart

    @property
    def everywhere(self) -> bool:
        """Whether nearly all tensors differ: no tensor is special."""
        return self.tensor_count > 1 and len(self.tensors) >= min(0.9 * self.tensor_count, 64)

    @property
    def spread(self) -> bool:
        """Whether the difference is in more than one place, as that of arithmetic is."""
        return not self.one_element and (len(self.tensors) > 1 or self.tensor_count == 1)

    @property
    def bounded(self) -> bool:
        """Whether the ranks differ no more now than after their first steps.

        Ranks that go their own ways part as fast as independent steps do, with the square root of
        the time at least; less than its fourth root from the first steps to the last sample means
        that they were brought together in between. Ranks that go their own ways differ in all of
        their tensors: where some are equal, it is another fault, which learning may hold in check.
        """
        if self.tensors and not (self.everywhere or self.tensor_count == 1):
            return False
        early = [(s, d) for s, d, _ in self.sizes if s < self.first_step + _EARLY]
        if not early or not self.sizes[-1][1] > 0:
            return False
        since, most = max(early, key=lambda size: size[1])
        step, distance, _ = self.sizes[-1]
        longer = (step - self.first_step + 1) / (since - self.first_step + 1)
        return longer >= 4 and distance < most * longer**0.25

    @property
    def closer(self) -> bool:
        """Whether a sample found less than half of the distance that the one before it found.

        That is what an average of the parameters leaves, where nothing else shows it.
        """
        known = [d for _, d, _ in self.sizes if math.isfinite(d)]
        return any(after < 0.5 * before for before, after in pairwise(known))

    @property
    def growth(self) -> Growth:
        """How the parameters' distance developed since the beginning.

        The exponent p of distance ~ t^p over the later half of the observations: an offset that
        nothing repairs has 0, also where momentum made it grow at first; differing updates have
        0.5 (independent ones) to 1; an exponential fits its logarithm better than any power.
        """
        known = [(s, d) for s, d, _ in self.sizes if d > 0 and math.isfinite(d)]
        if len(known) < 6 or known[-1][0] - self.first_step < 8:
            return Growth.UNKNOWN
        late = known[len(known) // 2 - 1 :]
        since = np.array([s - self.first_step + 1 for s, _ in late], dtype=np.float64)
        size = np.log([d for _, d in late])
        power, power_error = _fit(np.log(since), size)
        rate, rate_error = _fit(since, size)
        if rate * (since[-1] - since[0]) > math.log(8) and rate_error < 0.5 * power_error:
            return Growth.EXPONENTIAL
        if power > 0.25:
            return Growth.GROWING
        return Growth.SHRINKING if power < -0.25 else Growth.CONSTANT


def groups_of(comparison: Comparison) -> tuple[tuple[int, ...], ...]:
    """Ranks that hold the same, the largest group first."""
    return tuple(
        tuple(int(r) for r in comparison.ranks[comparison.clusters == label])
        for label in range(int(comparison.clusters.max(initial=0)) + 1)
    )


def _largest(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    known = values[~np.isnan(values)]
    # Where one rank's distance is not known, the largest of the others is no answer.
    return float(known.max()) if len(known) == len(values) and len(known) else math.nan


def _right_multiples(factors: Mapping[int, float]) -> set[int]:
    """Ranks that did nothing else to the mean, where all applied multiples of it; none: unknown.

    Clipping and loss scales are the same for all tensors of a rank, a divisor that is wrong in one
    bucket is not. Of whole gradients nothing tells the rank that clipped from one that forgot to,
    but a sum, or a mean that was divided twice, is not meant beside the mean.

    Args:
        factors: rank -> times what the mean is it applied; NaN where tensors have several.
    """
    even = {rank for rank, factor in factors.items() if math.isfinite(factor)}
    if len(even) < len(factors):
        return even
    mean = {rank for rank, factor in factors.items() if abs(factor - 1.0) <= _THE_MEAN}
    size = len(factors)
    others = [factor for rank, factor in factors.items() if rank not in mean]
    divided = any(
        all(abs(factor / times - 1.0) <= _THE_MEAN for factor in others)
        for times in (size, 1.0 / size)
    )
    return mean if divided else set()


def _by_relevance(tensor: TensorDifference) -> float:
    return math.inf if math.isnan(tensor.relative) else -tensor.relative


def _fit(
    x: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    y: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> tuple[float, float]:
    """Slope of the least-squares line and its sum of squared residuals."""
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y) / float(x @ x)
    return slope, float(((y - slope * x) ** 2).sum())
