"""What storage, detectors and figures say to each other: aligned facts of one run.

Shapes: R ranks, S steps, T tensors. Nothing here knows SQL, HTTP or the time of day.

A window is a *block of new steps*, not a view back: detectors remember what they need in their own
state. So memory is bounded by construction, and a run gives the same findings whether it arrives
step by step or is replayed in one go (a property test holds every detector to it).
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.agent import wire
from rankscope.server.window.baselines import Baselines
from rankscope.server.window.gradient_products import GradientProducts

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


def is_wanted(name: str, among: Collection[str]) -> bool:
    """Whether a name is among others, in which a star stands for any characters."""
    return name in among or any(_pattern(n).fullmatch(name) for n in among if "*" in n)


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in name.split("*")), re.DOTALL)


@dataclass(frozen=True, slots=True)
class Series:
    """One metric, aligned.

    Attributes:
        values: float64 [R, S] (uint64 for digests); NaN is a value that the trainer had, not a
            missing one.
        present: bool [R, S]: where the rank did post a value. `values` is 0 elsewhere.
    """

    values: npt.NDArray[Any]
    present: Bool


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How far one tensor differs between ranks.

    Attributes:
        ranks: those whose tensor differs from the reference.
        distance: largest L2 distance of one of them from the reference; NaN without sketches.
        relative: the same over the L2 norm of the reference; NaN without sketches.
        buckets: number of sketch buckets that differ: 1 hints at a single changed element.
        table: what of it: `parameters` is the tensor itself, `optimizer/exp_avg` its momentum.
        factor: what the reference is multiplied by to give the tensor of the rank that is furthest
            from it, 0 where that one is zero; NaN where it is no multiple.
        partner: tensor of the reference that this rank has in its place, bit for bit; or empty.
    """

    name: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    distance: float
    relative: float
    buckets: int = 0
    table: str = "parameters"
    factor: float = math.nan
    partner: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One link of the chain at one step, compared between the ranks of a replica class.

    Attributes:
        stage: one of `wire.STAGES`.
        ranks: int64 [R], those that took part.
        clusters: int64 [R]: ranks with the same number hold the same bits. The reference is
            cluster 0: the largest one; there is none (`decided` is False) where two are as large.
        distance: float64 [R]: L2 distance from the reference (from the lowest rank, where it is not
            decided); 0 for equal bits, NaN where no sketch shows.
        relative: `distance` over the L2 norm of the reference.
        tensors: those that differ, in the model's order; empty where only model digests were
            compared.
        missing: ranks that should have posted and did not.
    """

    step: int
    stage: str
    ranks: Int64
    clusters: Int64
    distance: Float64
    relative: Float64
    decided: bool = True
    tensors: tuple[TensorDifference, ...] = ()
    tensor_count: int = 0
    missing: tuple[int, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all ranks hold the same bits."""
        return not self.clusters.any()

    @property
    def deviating(self) -> tuple[int, ...]:
        """Ranks outside the reference; all of them where there is no majority."""
        if self.equal:
            return ()
        chosen = self.ranks[self.clusters != 0] if self.decided else self.ranks
        return tuple(int(r) for r in chosen)


@dataclass(frozen=True, slots=True)
class Misreduced:
    """One tensor whose reduced gradient is not the mean of what went in.

    Attributes:
        relative: its distance from what it should be, over the size of what went in.
        how: what it is instead: `nothing`, the mean times another `factor`, the mean of the step
            before (`stale`), that of another tensor (`swapped`), one in which some ranks do not
            count as in the others (`ranks`), with weights of its own (`weights`), or something
            `other`.
        factor: times what the other tensors have; for `ranks`, times what these count there, NaN
            where they differ.
        partner: the other tensor.
        ranks: who counts otherwise, or whose part is that of the other tensor; empty for all.
        buckets: number of sketch buckets that differ; few of many: a part of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    relative: float
    how: str
    factor: float = 1.0
    partner: str = ""
    ranks: tuple[int, ...] = ()
    buckets: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What ranks that do not agree on the reduced gradient applied, beside what went in.

    Attributes:
        tensors: number of those that show it.
        averaged: by rank, in how many of them it applied a multiple of the ranks' mean.
        own: by rank, in how many it applied a multiple of its own gradient.
        factors: by rank, times what the mean is they were; NaN where tensors have none in common.
        unreduced: tensors of which every rank applied its own, the first ones of
            `unreduced_count`.
        changed: those of which some rank applied neither, the first ones.
        rest: by rank, norm of what it applied beside a multiple of the mean, over that multiple's.
        received: by rank, whether the other ranks' gradients are in what it applied.
        stale: by rank, in how many it applied a multiple of the mean of the step before.
        subsets: by rank, places of the ranks of whose gradients alone it applied a multiple of the
            mean, in all tensors; empty where that is not so.
    """

    tensors: int
    averaged: tuple[int, ...]
    own: tuple[int, ...]
    factors: tuple[float, ...]
    unreduced: tuple[str, ...] = ()
    unreduced_count: int = 0
    changed: tuple[str, ...] = ()
    rest: tuple[float, ...] = ()
    received: tuple[bool, ...] = ()
    stale: tuple[int, ...] = ()
    subsets: tuple[tuple[int, ...], ...] = ()

    @property
    def exchanged(self) -> bool:
        """Whether any rank applied other ranks' gradients, in any tensor."""
        return any(self.averaged) or any(self.received)

    @property
    def reduced(self) -> bool:
        """Whether most ranks did: a reduction took place."""
        seen = [bool(a or r) for a, r in zip(self.averaged, self.received, strict=True)]
        return 2 * sum(seen) > len(seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What came out of one step's reduction beside what went into it.

    Attributes:
        ranks: int64 [R], whose gradients went in.
        known: number of tensors of which both sides are known and not all zeros.
        compressed: number of those of them of which a communication hook sends an approximation;
            they need not be the mean.
        unknown: names of tensors that could not be examined.
        ratio: times what the mean is reduced gradients are, for most tensors; clipping and loss
            scales are in it. NaN where there is no such factor.
        ratio_error: how far it may be off, for rounding.
        weighted_by: what ranks count by in that mean (`tokens`, `samples`); empty for equally.
        wrong: tensors that do not have it, or the weights of most, of `wrong_count`.
        common: those that have it, the first ones; only where others have another factor.
        pattern: what else the whole is: `weights` of the ranks, `accumulated` (the reduced gradient
            of the step before and this step's mean), `stale` (the mean, or what came out, at the
            step `before`), `late` (one rank, `late`, put in what it had at that step), or `other`;
            empty where the ratio says all, and where all tensors are
            compressed.
        weights: what the pattern's parts count; of `weights`, one for each rank: 1/N times `ratio`
            in a mean.
        weight_errors: their standard errors.
        before: the sampled step before, with which this one was compared; -1 for none.
        agreed: whether the ranks agree on what came out; where they do not, nothing else is known
            but what each of them `applied`.
        applied: that, where it could be found out.
        cosine: of what came out to the mean of what went in, over all tensors, from their sketches;
            free of clipping and loss scales. NaN where one of them is zero or not finite.
        kept: norm of what came out over that of the mean, over all tensors, without `ratio`, or
            with clipping and loss scales in it where the pattern is `other`; NaN where `ratio` is
            not known otherwise.
        emptied: number of tensors with elements that went in and came out as zeros, and came out
            at the sampled step before.
        shares: what of each rank's gradient has come out, where that is an approximation; one for
            each of `ranks`, or empty.
    """

    step: int
    ranks: Int64
    tensor_count: int
    known: int = 0
    compressed: int = 0
    unknown: tuple[str, ...] = ()
    ratio: float = float("nan")
    ratio_error: float = 0.0
    weighted_by: str = ""
    wrong_count: int = 0
    wrong: tuple[Misreduced, ...] = ()
    common: tuple[str, ...] = ()
    pattern: str = ""
    weights: tuple[float, ...] = ()
    weight_errors: tuple[float, ...] = ()
    before: int = -1
    late: int = -1
    agreed: bool = True
    applied: Applied | None = None
    cosine: float = float("nan")
    kept: float = float("nan")
    emptied: int = 0
    shares: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """What became of the mean of the parameters where ranks wrote them between two steps.

    Attributes:
        step: the one before which they were written.
        ranks: that hold replicas; all of them wrote.
        share: distance of the mean of all ranks after from that before, over the root mean square
            of what each rank wrote: 0 where they were averaged.
        weights: what each of `ranks` counts, as far as what they hold now is a sum of what they
            held; empty where that was not looked for.
        left: what these weights do not explain, as a share of the same.
        scale: times the weighted sum that they hold; 1 where it was not looked for.
        earlier: what counts beside the weights what all held after the average before.
        apart: tensors that most ranks hold alike now and these ranks do not, where all of them hold
            other tensors alike: (name, ranks).
    """

    step: int
    ranks: tuple[int, ...]
    share: float
    weights: tuple[float, ...] = ()
    left: float = float("inf")
    scale: float = 1.0
    earlier: float = 0.0
    apart: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementSums:
    """Sums over all elements of the ranks' own gradients, of tensors small enough to know them.

    Attributes:
        ranks: int64 [R], of one replica class.
        names: [V].
        sizes: int64 [V], numbers of elements.
        sums, norms: float64 [R, V], signed sums and L2 norms.
    """

    step: int
    ranks: Int64
    names: tuple[str, ...]
    sizes: Int64
    sums: Float64
    norms: Float64


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNumbers:
    """One number for each tensor, or module, of a table: of one rank at one step.

    Attributes:
        metric: for example `grad_norm`.
        table: names, shapes and dtypes in the model's order; modules have the shape () and the
            name of their class for a dtype.
        values: float64 [T]; NaN where there is none.
    """

    step: int
    rank: int
    metric: str
    table: wire.TensorTable
    values: Float64


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Something that a rank reported once (`wire.Event`).

    Attributes:
        at: when the server received it, seconds since 1970; NaN where that is not known.
    """

    rank: int
    step: int
    kind: str
    text: str
    data: Mapping[str, Any]
    at: float = math.nan


@dataclass(frozen=True, slots=True)
class RankLiveness:
    """When and how a rank was last heard of. Times are the server's, in seconds since 1970.

    Attributes:
        state: `running`, `finished` or `failed`, as the rank itself said.
        last_step: last step it reported as complete, -1 before the first.
        longest_gap: longest time between two of its posts so far, seconds.
        typical_gap: median time between its posts, seconds.
        attempt: number of its process, counted from 0.
    """

    rank: int
    first_seen: float
    last_seen: float
    last_step: int
    state: str = "running"
    phase: str = ""
    error: str = ""
    host: str = ""
    heartbeat_seconds: float = 5.0
    longest_gap: float = 0.0
    typical_gap: float = 0.0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """A block of steps about which every rank (or every rank that is still alive) has reported.

    Attributes:
        world_size: number of ranks that the job declares.
        ranks: int64 [R], ascending: the ranks seen so far.
        steps: int64 [S], ascending, all later than those of the window before; may be empty.
        series: metric -> aligned values at `steps`; a metric that no rank posted is absent.
        comparisons: of these steps, in the order of (step, chain). Before them, what ranks held
            that have begun anew at an earlier step: steps are not evaluated a second time.
        liveness: one for each of `ranks`.
        now: time of the evaluation, seconds since 1970.
        last_step: last step evaluated with this window, -1 before the first.
        config: what the ranks said of themselves at attach (`Hello.config` of the lowest rank).
        digests: stage or other name -> uint64 values at `steps`, for what is not compared by
            itself: batches, random states, the parameters.
        reductions: of these steps, in their order.
        configs: what each rank said of itself at attach, as far as it is known.
        events: what ranks reported once, each once: of all steps up to `last_step`, and at once why
            one does not end.
        classes: ranks that hold replicas of the same tensors, the largest set first; a rank that
            is alone with what it holds is a set of its own. Empty: all of `ranks` are one.
        begins: first step of each of a rank's processes, ascending.
        started: digest of what each rank's newest process held when it began, where it is known.
        negligible: step -> tensors whose gradient is negligible beside that of the others, at steps
            at which gradients were fingerprinted.
        layers: numbers of single tensors of the first few ranks at these steps, in the order of
            (step, metric, rank).
        element_sums: of local gradients at these steps, in their order.
        gradient_products: of these, too.
        averages: of parameters that all ranks wrote before these steps, in their order.
        rank_local: ranks that train copies of their own of some tensors, which are compared with
            nothing; digests of their whole models are their own.
        baselines: earlier runs of the project that this one is held against, the same in all
            windows of a run; None where nobody looked for any.
        derived: what was computed of it, by what it is: dozens of detectors ask for the same means.
    """

    world_size: int
    ranks: Int64
    steps: Int64
    series: Mapping[str, Series]
    comparisons: tuple[Comparison, ...] = ()
    liveness: tuple[RankLiveness, ...] = ()
    now: float = 0.0
    last_step: int = -1
    config: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, Series] = field(default_factory=dict)
    reductions: tuple[Reduction, ...] = ()
    configs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    events: tuple[Occurrence, ...] = ()
    classes: tuple[tuple[int, ...], ...] = ()
    begins: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    started: Mapping[int, int] = field(default_factory=dict)
    negligible: Mapping[int, int] = field(default_factory=dict)
    layers: tuple[LayerNumbers, ...] = ()
    element_sums: tuple[ElementSums, ...] = ()
    gradient_products: tuple[GradientProducts, ...] = ()
    averages: tuple[Average, ...] = ()
    rank_local: frozenset[int] = frozenset()
    baselines: Baselines | None = None
    derived: dict[tuple[str, str], tuple[npt.NDArray[Any], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def members(self) -> Int64:
        """The rows of `ranks` that the job has now, int64.

        Started again with fewer ranks, it goes on without the others.
        """
        return np.flatnonzero(self.ranks < self.world_size)

    @property
    def complete_configs(self) -> Mapping[int, Mapping[str, Any]]:
        """What all members said of themselves at attach; empty until all of them have."""
        configs = {r: c for r, c in self.configs.items() if c and r < self.world_size}
        whole = len(configs) == len(self.members) == self.world_size
        return configs if whole else {}

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks that hold the same tensors; each rank is in one."""
        return self.classes or (tuple(int(r) for r in self.ranks),)

    @property
    def data_parallel(self) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks each of which reads batches of its own; each rank is in one.

        Those that hold replicas, and those over which FSDP deals one replica out: these say so at
        attach, since ranks that share a batch (tensor parallelism) hold parts, too.
        """
        # Who has come without describing itself has none.
        dealt = {
            rank: (described or {}).get("sharded_over") for rank, described in self.configs.items()
        }
        if not any(dealt.values()):
            return self.replicas
        sets = {rank: set(group) for group in self.replicas for rank in group}
        said: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for rank, described in dealt.items():
            if not isinstance(described, Mapping) or rank not in sets:
                continue
            first, step, count = (described.get(key) for key in ("first", "step", "count"))
            if not (isinstance(first, int) and isinstance(step, int) and isinstance(count, int)):
                continue
            if step > 0 < count:
                said[first, step, count].append(rank)
        for (first, step, count), members_named in said.items():
            # A few bytes can name more ranks than anybody could count: only those that there are
            # are gone through, or those that are named, whichever are fewer.
            named = range(first, first + step * count, step)
            there = named if count < len(sets) else sets
            members = [*members_named, *(r for r in there if r in named and r in sets)]
            together: set[int] = set()
            for part in {id(sets[r]): sets[r] for r in members}.values():
                together |= part
            sets.update(dict.fromkeys(together, together))
        distinct = {id(group): group for group in sets.values()}
        return tuple(sorted((tuple(sorted(g)) for g in distinct.values()), key=_largest_first))


def _largest_first(group: tuple[int, ...]) -> tuple[int, int]:
    return -len(group), group[0]
