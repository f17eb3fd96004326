"""Puts what ranks posted, in whatever order, into windows of aligned steps.

A window holds the steps about which every living rank has said all it will say. A rank that is
missing, silent or far behind holds the others up for a while only. Memory is bounded: a rank that
lags more than `MAX_LAG` steps behind the fastest is waited for no longer, of the fingerprints the
oldest are given up (`PendingFingerprints`), and what comes later than its step was evaluated is
counted and not examined.

A rank that restarts begins another attempt, mostly at an earlier step. What has been evaluated
stays as it is; of what has not, the new attempt's points count from its first step on, and nothing
of the attempts before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from rankscope.agent.wire import BATCH_PART, LABELS, SAMPLE_DIGESTS, STAGES
from rankscope.server.comparison import compression, conservation
from rankscope.server.comparison.averages import STAGE as AVERAGE
from rankscope.server.comparison.averages import Averages
from rankscope.server.comparison.local_gradients import Found, LocalGradients
from rankscope.server.comparison.outside import STAGE as OUTSIDE
from rankscope.server.comparison.parts import find_parts, same_at_first
from rankscope.server.comparison.replicas import REPLICATED, Replicas
from rankscope.server.comparison.steps import CLIPPING, COMPARED_SERIES, PUSHED, Comparisons
from rankscope.server.detectors.push.applied import SERIES as APPLIED
from rankscope.server.evaluation.judged_until import judged_until, reported_until
from rankscope.server.evaluation.pending import Pending, PendingLayers, superseded_from
from rankscope.server.evaluation.pending_fingerprints import PendingFingerprints
from rankscope.server.window import (
    Average,
    Columns,
    Comparison,
    FingerprintPart,
    Int64,
    LivenessPart,
    NewData,
    Occurrence,
    Series,
    Window,
    is_wanted,
)

# What detectors read as it is: what goes into a step, and what changes in it or before it.
WATCHED_DIGESTS = (
    "batch",
    BATCH_PART,
    LABELS,
    *SAMPLE_DIGESTS,
    "start",
    "outside_optimizer",
    "parameters",
    "rng/torch",
    "rng/cuda",
    "rng/numpy",
    "rng/python",
)

# Numbers of single tensors that detectors read.
WATCHED_LAYERS = (
    "grad_norm",
    "weight_norm",
    "update_ratio",
    "dead_units_lasting",
    "saturated_units_lasting",
)

# Ranks that were never seen are reported one by one up to this many.
_MAX_MISSING = 1024

# Events that say why no further step ends: to wait for that step is to wait for ever.
_AT_ONCE = (
    "failed",
    "stalled",
    "unstepped",
    "checkpoint",
    "parameters.moved",
    "amp.skipping",
    "gradient.skipped",
)

_PARAMETERS = "parameters"

# Steps a window: bounds what is in memory during a replay.
_BLOCK = 512


class Aligner:
    """The state of one run's alignment.

    Args:
        metrics: series that detectors want.

    Attributes:
        metrics, stages: scalars, and digests and fingerprints, that it reads.
        last_step: last step that is in a window; -1 before the first.
        late: points and fingerprints that came after their step had been evaluated.
    """

    def __init__(self, metrics: Collection[str]) -> None:
        compared = {name for name, _, _ in COMPARED_SERIES}
        self.metrics = frozenset(metrics) | compared | {*CLIPPING, PUSHED}
        self.stages = frozenset((*REPLICATED, *WATCHED_DIGESTS, "local_gradient", AVERAGE))
        self._wanted = frozenset(metrics)
        self.last_step = -1
        self.late = 0
        self._series = Pending(np.float64)
        self._digests = Pending(np.uint64)
        self._layers = PendingLayers()
        # First and last step that each attempt of a rank has posted anything about.
        self._begins: dict[int, dict[int, int]] = defaultdict(dict)
        self._ends: dict[tuple[int, int], int] = {}
        # By rank, the newest attempt and the digest of the parameters that it began with.
        self._started: dict[int, tuple[int, int]] = {}
        # By rank and attempt, the first step from which a later attempt's points count.
        self._superseded: dict[tuple[int, int], int] = {}
        # Last step of each rank about which nothing more is in the database, during a replay.
        self._read: dict[int, int] = {}
        self._liveness: dict[int, LivenessPart] = {}
        self._replicas = Replicas()
        self._fingerprints = PendingFingerprints(self._replicas.own, self._begins)
        self._comparisons = Comparisons(self._replicas)
        self._world_size = 1
        self._config: Mapping[str, Any] = {}
        self._configs: dict[int, Mapping[str, Any]] = {}
        self._events: list[Occurrence] = []
        self._local = LocalGradients(self._replicas)
        self._averaging = Averages()
        self._more = False
        # Whether steps are versions of an asynchronous parameter server's model.
        self._by_pushes = False

    @property
    def given_up(self) -> int:
        """Fingerprints that there was no room for."""
        return self._fingerprints.given_up

    def add(self, data: NewData) -> None:
        """Takes what is new in the database."""
        lowest: dict[int, int] = {}
        for part in (*data.columns, *data.digests):
            first, last = int(part.steps[0]), int(part.steps[-1])  # they ascend
            for rank in part.ranks.tolist():
                self._heard(rank, part.attempt, first, last)
                if first < lowest.get(rank, first + 1):
                    lowest[rank] = first
        self._by_pushes |= any(APPLIED[0] in part.names for part in data.columns)
        for part in data.digests:
            self._learn_start(part)
        for target, parts in ((self._series, data.columns), (self._digests, data.digests)):
            for part in parts:
                fresh = self._fresh(part)
                if len(fresh.steps):
                    target.add(fresh)
        for made in data.fingerprints:
            if made.fingerprint.stage not in self.stages:
                continue
            self._heard(made.rank, made.attempt, made.fingerprint.step, made.fingerprint.step)
            self._add_fingerprint(made)
        for layers in data.layers:
            self._layers.add(layers, self.last_step)
        for rank, first in lowest.items():
            # What the next page holds of a rank is later than the earliest of this one: the parts
            # of a step never arrive a whole page (thousands of batches) apart.
            self._read[rank] = max(self._read.get(rank, -1), first - 1)
        if self._superseded:
            self._series.forget(self._superseded)
            self._digests.forget(self._superseded)
        self._liveness = {life.liveness.rank: life for life in data.liveness}
        self._replicas.learn(data.tables)
        self._world_size = data.world_size
        self._config = data.config
        self._configs = {**self._configs, **data.configs}
        self._events += data.events
        self._more = data.more

    def windows(self, now: float) -> Iterator[Window]:
        """Windows of what is complete; at least one, which may have no steps."""
        frontier = self._frontier(now)
        while True:
            steps = self._steps(frontier)
            rest = steps[_BLOCK:]
            steps = steps[:_BLOCK]
            through = int(steps[-1]) if len(rest) else frontier
            yield self._window(steps, through, now)
            if not len(rest):
                return

    # ------------------------------------------------------------------------------- what comes in

    def _heard(self, rank: int, attempt: int, first: int, last: int) -> None:
        begins = self._begins[rank]
        if first < begins.get(attempt, first + 1):
            begins[attempt] = first
            if len(begins) > 1:
                for one in begins:
                    from_step = superseded_from(one, begins)
                    if from_step < inf:
                        self._superseded[rank, one] = int(from_step)
        if last > self._ends.get((rank, attempt), last - 1):
            self._ends[rank, attempt] = last

    def _learn_start(self, part: Columns) -> None:
        """At once: ranks that begin at different steps are at no time at the same one."""
        if "start" not in part.names:
            return
        held = part.values[:, part.names.index("start"), -1]
        for rank, digest in zip(part.ranks.tolist(), held.tolist(), strict=True):
            if part.attempt >= self._started.get(rank, (part.attempt, 0))[0]:
                self._started[rank] = part.attempt, digest

    def _fresh(self, part: Columns) -> Columns:
        if part.steps[0] > self.last_step:
            return part
        late = int(np.searchsorted(part.steps, self.last_step, side="right"))
        self.late += late * len(part.ranks) * len(part.names)
        return replace(part, steps=part.steps[late:], values=part.values[..., late:])

    def _add_fingerprint(self, made: FingerprintPart) -> None:
        step = made.fingerprint.step
        if step > self.last_step:
            self._fingerprints.add(made)
            return
        begins = self._begins[made.rank]
        # Again, or for the first time where the others went back to: ranks may be added.
        anew = made.attempt == max(begins) and step == begins[made.attempt]
        if anew and (len(begins) > 1 or step > 0) and made.fingerprint.stage == "start":
            # The steps since the checkpoint are not judged again, but what was loaded is.
            self._fingerprints.add(made, restarted=True)
        else:
            self.late += 1

    # -------------------------------------------------------------------------- how far it reaches

    def _frontier(self, now: float) -> int:
        """Last step that nothing more is to be expected about."""
        reached = {rank: self._reached(life, now) for rank, life in self._liveness.items()}
        return judged_until(
            self._liveness, reached, world_size=self._world_size, more=self._more, now=now
        )

    def _reached(self, entry: LivenessPart, now: float) -> int:
        """Last step about which a rank has said all it will say."""
        rank = entry.liveness.rank
        if self._more:
            return self._read.get(rank, -1)
        return reported_until(entry, self._ends.get((rank, entry.attempt), -1), now)

    def _steps(self, through: int) -> Int64:
        # Scalars and digests that came together share the array of their steps.
        held = {id(s): s for s in (*self._series.steps(), *self._digests.steps())}
        others = (self._fingerprints.steps(), self._layers.steps())
        steps = np.unique(np.concatenate([*others, *held.values()]))
        return steps[steps <= through]

    # ---------------------------------------------------------------------------------- the window

    def _window(self, steps: Int64, through: int, now: float) -> Window:
        ranks = np.array(sorted(self._liveness), dtype=np.int64)
        series: dict[str, Series] = {}
        digests: dict[str, Series] = {}
        comparisons: tuple[Comparison, ...] = ()
        local = Found()
        averages: tuple[Average, ...] = ()
        negligible: dict[int, int] = {}
        if len(steps):  # else nothing that waits is complete
            series = self._series.take(ranks, steps, through)
            digests = self._digests.take(ranks, steps, through)
            self._find_parts(series, digests, ranks, steps)
            local = self._reductions(series, ranks, steps, through)
            averages = self._averages(ranks, through)
            negligible = conservation.negligible(
                {
                    key[0]: self._fingerprints.of_lowest_rank(key).sketches
                    for key in self._fingerprints.keys(through, ("reduced_gradient",))
                }
            )
            self._fingerprints.join_restarted()
            comparisons = tuple(
                c
                for c in self._compared(series, digests, ranks, steps, through, now)
                if not _is_lost(c, series, ranks, steps)
            )
        self.last_step = max(self.last_step, through)
        due = [e for e in self._events if e.step <= self.last_step or e.kind in _AT_ONCE]
        if due:
            self._events = [e for e in self._events if e not in due]
            due.sort(key=lambda e: (e.step, e.rank))
        return Window(
            world_size=self._world_size,
            ranks=ranks,
            steps=steps,
            series={name: s for name, s in series.items() if is_wanted(name, self._wanted)},
            comparisons=comparisons,
            liveness=tuple(self._liveness[int(r)].liveness for r in ranks),
            now=now,
            last_step=self.last_step,
            config=self._config,
            digests={name: digests[name] for name in WATCHED_DIGESTS if name in digests},
            reductions=tuple(local.reductions),
            configs=self._configs,
            events=tuple(due),
            classes=tuple(
                tuple(int(r) for r in ranks[rows])
                for rows in self._replicas.classes("parameters", ranks)
            ),
            begins={rank: tuple(sorted(b.values())) for rank, b in self._begins.items()},
            started={rank: digest for rank, (_, digest) in self._started.items()},
            negligible=negligible,
            rank_local=self._replicas.own.ranks,
            layers=self._layers.take(through, self._begins),
            element_sums=tuple(local.sums),
            gradient_products=tuple(local.products),
            averages=averages,
        )

    # ----------------------------------------------------------------------------- the comparisons

    def _find_parts(
        self,
        series: Mapping[str, Series],
        digests: Mapping[str, Series],
        ranks: Int64,
        steps: Int64,
    ) -> None:
        """Which tensors are cut between ranks, of those that begin in this window."""
        losses = series.get("loss")
        # Of a model whose `forward` is not called, labels stand for the batch.
        batches = [digests[name] for name in ("batch", BATCH_PART, LABELS) if name in digests]
        if losses is None or not batches:
            return
        for key in self._fingerprints.keys(int(steps[-1]), ("start",)):
            step = key[0]
            if step not in steps:
                continue
            start = self._fingerprints.of_all_attempts(key)
            column = int(np.searchsorted(steps, step))
            alike = np.zeros((len(ranks), len(ranks)), dtype=bool)
            for batch in batches:
                alike |= same_at_first(
                    losses.values[:, column],
                    batch.values[:, column],
                    losses.present[:, column] & batch.present[:, column],
                )
            found = find_parts(self._replicas, start, ranks, alike)
            if found:
                self._replicas.separate(found)

    def _reductions(
        self, series: Mapping[str, Series], ranks: Int64, steps: Int64, through: int
    ) -> Found:
        """What local gradients show, step by step."""
        found = Found()
        compressed = compression.of_config(self._config)
        for key in sorted(self._fingerprints.keys(through, ("local_gradient",))):
            local = self._fingerprints.take(key)
            came_out = self._fingerprints.of_all_attempts((key[0], "reduced_gradient"))
            reduced = {rank: [*tables.values()][-1] for rank, tables in came_out.items()}
            counts = _counts(series, ranks, steps, key[0])
            found.add(self._local.observe(key[0], ranks, local, reduced, compressed, counts))
        return found

    def _averages_follow(self) -> tuple[str, ...]:
        """The parameters, where no wrapper keeps them equal: they may be averaged."""
        known = "data_parallel" in self._config and not self._config["data_parallel"]
        return (_PARAMETERS,) if known else ()

    def _averages(self, ranks: Int64, through: int) -> tuple[Average, ...]:
        """What became of the mean of the parameters where all ranks of a class wrote them."""
        found: list[Average] = []
        # What comes after many steps without is compared as well.
        stages = (AVERAGE, OUTSIDE, *self._averages_follow())
        due = self._fingerprints.keys(through, stages)
        # What was written before a step before what the ranks held after it.
        for key in sorted(due, key=lambda k: (k[0], k[1] == _PARAMETERS)):
            prints = self._fingerprints.held(key)
            if key[1] == _PARAMETERS:
                self._averaging.held(key[0], prints)
                continue
            if key[1] == AVERAGE:
                self._fingerprints.take(key)
            for rows in self._replicas.classes("parameters", ranks):
                members = ranks[rows].tolist()
                table = self._replicas.table(members[0], _PARAMETERS)
                names = () if table is None else table.names
                made = self._averaging.averaged(key[0], members, prints, names)
                if len(rows) > 1 and made is not None:
                    found.append(made)
        return tuple(found)

    def _compared(
        self,
        series: Mapping[str, Series],
        digests: Mapping[str, Series],
        ranks: Int64,
        steps: Int64,
        through: int,
        now: float,
    ) -> tuple[Comparison, ...]:
        """The comparisons of a window, in the order of steps and of the chain within a step."""
        chain = {stage: n for n, stage in enumerate(STAGES)}
        # In that order, too: what a step began with says which tensors are replicas.
        keys = sorted(self._fingerprints.keys(through), key=lambda k: (k[0], chain[k[1]]))
        fingerprints = ((key, self._fingerprints.take(key)) for key in keys)
        found = self._comparisons.of(series, digests, fingerprints, ranks, steps)
        classes = self._replicas.classes("parameters", ranks)
        paired = [int(rank) for rows in classes if len(rows) > 1 for rank in ranks[rows]]
        self._note_missing(found, sorted(paired), now)
        return tuple(found[key] for key in sorted(found, key=lambda k: (k[0], chain[k[1]])))

    def _note_missing(
        self, found: dict[tuple[int, str], Comparison], members: Sequence[int], now: float
    ) -> None:
        """Names the ranks that had said nothing about a step when it was compared."""
        reached = {rank: self._reached(self._liveness[rank], now) for rank in members}
        slowest = min(reached.values(), default=-1)
        expected = range(min(self._world_size, _MAX_MISSING))
        unseen = {rank for rank in expected if rank not in self._liveness}
        # A worker that has ended pulled no later version: of what it held, it has said all.
        done = {
            rank
            for rank, life in self._liveness.items()
            if self._by_pushes and life.liveness.state == "finished"
        }
        for key, comparison in found.items():
            if key[0] <= slowest and not unseen:
                continue
            late = {rank for rank, step in reached.items() if step < key[0]} - done
            missing = (late | unseen) - set(comparison.ranks.tolist())
            if missing:
                found[key] = replace(comparison, missing=tuple(sorted(missing)))


def _counts(
    series: Mapping[str, Series], ranks: Int64, steps: Int64, step: int
) -> dict[str, dict[int, float]]:
    """What ranks' gradients may be means of at a step: name -> rank -> number."""
    column = int(np.searchsorted(steps, step))
    found: dict[str, dict[int, float]] = {}
    for name in conservation.COUNTS:
        if name in series and column < len(steps) and steps[column] == step:
            rows = np.flatnonzero(series[name].present[:, column])
            values = series[name].values[rows, column]
            found[name] = dict(zip(ranks[rows].tolist(), values.tolist(), strict=True))
    return found


def _is_lost(
    comparison: Comparison, series: Mapping[str, Series], ranks: Int64, steps: Int64
) -> bool:
    """Whether digests alone differ, of ranks none of which has finite numbers any more.

    NaN has many bit patterns, and digests show no more than that some bits differ.
    """
    if comparison.equal or comparison.tensors or comparison.stage in ("start", "batch"):
        return False
    column = np.flatnonzero(steps == comparison.step)
    if not len(column):
        return False
    lost = np.zeros(len(ranks), dtype=bool)
    for name in ("loss", "grad_norm"):
        if name in series:
            one = series[name]
            lost |= one.present[:, column[0]] & ~np.isfinite(one.values[:, column[0]])
    return bool(lost[np.isin(ranks, comparison.ranks)].all())
