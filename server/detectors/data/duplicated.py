"""Ranks that train on the same batches although each should have its own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.data.batches import (
    BATCHES,
    RESULTS,
    batch_digests,
    result_digests,
)
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.wording import count, listing, ranks, sentences
from rankscope.server.detectors.policy import Observations, Policy
from rankscope.server.window import Bool, Check, Int64, Series, Window

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class DuplicatedPolicy(Policy):
    """Thresholds of `data.duplicated`.

    Attributes:
        some: consecutive compared steps at which the same ranks had the same batch, before it is
            reported.
        everyone: the same where all ranks had one batch.
    """

    some: Observations = 4
    everyone: Observations = 2


@dataclass(slots=True)
class Same:
    """Ranks with the same batches.

    Attributes:
        groups: those with one batch.
        size: ranks that should have different ones.
        losses: whether their losses were the same to the last bit as well; None: not posted.
    """

    groups: Groups
    size: int
    losses: bool | None


@dataclass(slots=True)
class DuplicatedState:
    """What is remembered.

    Attributes:
        seen: whether digests of batches are posted; else what comes of them is compared.
        judged: steps at which two or more replicas had posted their batches.
        constant: those at which a rank's own batch was the one before it.
        groups, streak, since: ranks with the same batch, at this many consecutive observations.
        last: batch of each rank at its last observation.
    """

    seen: bool = False
    judged: int = 0
    constant: int = 0
    ranks: int = 0
    groups: Groups = ()
    streak: int = 0
    since: int = 0
    last: dict[int, int] = field(default_factory=dict)
    watch: Watch[Same] = field(default_factory=lambda: Watch(clear_after=8))


class Duplicated(Detector[DuplicatedState]):
    """Data-parallel ranks that train on the same batches: their work is done several times over.

    Statistic:
        Equal digests of the batch on ranks that hold replicas of the same tensors, or shards that
        FSDP has dealt out (ranks of one tensor-parallel group share a batch and hold different
        parts). All replicas alike at two
        consecutive steps, or some of them at four. A rank whose batch is the one before it has
        synthetic input, or all of the data in one batch, and is not judged. Over after 8 steps
        without. Where no batch is seen (loops that call `monitor.step`), two ranks of three or more
        whose loss and norm of the own gradient are equal to the last bit have one, too.

    Severity:
        Warning; critical where all ranks have the same batch.

    Evidence:
        `groups` (ranks with one batch), `distinct` (batches that there are), `ranks_in_it`,
        `losses_equal` (their losses are the same to the last bit), `observed`.

    Source:
        huggingface/datasets#5360 and a dozen like it: a loader without a distributed sampler.
    """

    kinds = ("data.duplicated",)
    wants = RESULTS
    min_ranks = 2

    policy: DuplicatedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """As many consecutive batches as it takes where not all ranks share them."""
        return (Reach(BATCHES, self.policy.some, LASTS_SAMPLED),)

    def advance(self, window: Window, state: DuplicatedState) -> Outcome:
        """Goes through the batches step by step."""
        classes = [c for c in window.data_parallel if len(c) > 1]
        columns = np.arange(len(window.steps))
        digests = batch_digests(window)
        first = 0
        if not state.seen:
            posted = np.zeros(0) if digests is None else digests.present.any(axis=0)
            first = int(np.argmax(posted)) if posted.any() else len(columns)
            if (results := result_digests(window)) is not None and classes:
                self._go(window, state, results, classes, columns[:first])
        if digests is not None and first < len(columns):
            if not state.seen:
                # Nothing that was computed of a batch is equal to its digest.
                state.seen, state.streak, state.groups, state.last = True, 0, (), {}
            if classes:
                self._go(window, state, digests, classes, columns[first:])
        findings = tuple(_finding(e, window) for e in state.watch.take(window.last_step))
        return Outcome({"data.duplicated": _check(state, bool(classes))}, findings)

    def _go(
        self,
        window: Window,
        state: DuplicatedState,
        series: Series,
        classes: list[tuple[int, ...]],
        columns: Int64,
    ) -> None:
        """Goes through some columns of a window."""
        rows = {int(rank): row for row, rank in enumerate(window.ranks)}
        paired = np.array(sorted(rows[r] for c in classes for r in c))
        distinct = _all_distinct(window, series, state)
        before = -1
        several = series.present[paired].sum(axis=0) > 1
        for column in columns[several[columns]].tolist():
            if distinct[column]:
                before = column
                state.judged += state.seen
                state.ranks = max(state.ranks, len(window.ranks))
                state.streak, state.groups = 0, ()
                state.watch.good(int(window.steps[column]))
                continue
            if before >= 0:
                state.last = _digests_at(window, series, before)
                before = -1
            self._step(window, state, column, classes, _digests_at(window, series, column))
        if before >= 0:
            state.last = _digests_at(window, series, before)

    def _step(
        self,
        window: Window,
        state: DuplicatedState,
        column: int,
        classes: list[tuple[int, ...]],
        now: dict[int, int],
    ) -> None:
        step = int(window.steps[column])
        last, state.last = state.last, {**state.last, **now}
        state.judged += state.seen
        state.ranks = max(state.ranks, len(now))
        if any(last.get(rank) == batch for rank, batch in now.items()):
            state.constant += 1
            state.streak, state.groups = 0, ()
            return
        groups: list[tuple[int, ...]] = []
        size = 0
        for members in classes:
            by_batch: dict[int, list[int]] = defaultdict(list)
            for rank in members:
                if rank in now:
                    by_batch[now[rank]].append(rank)
            size = max(size, len(members))
            # Results that all who report have in common may be those of the whole job.
            most = len(members) if state.seen else sum(map(len, by_batch.values())) - 1
            groups += [tuple(same) for same in by_batch.values() if 1 < len(same) <= most]
        found = tuple(sorted(groups))
        if not found:
            state.streak, state.groups = 0, ()
            state.watch.good(step)
            return
        again = found == state.groups
        state.streak = state.streak + 1 if again else 1
        state.since = state.since if again else step
        state.groups = found
        everyone = found == tuple(sorted(classes))
        if (
            state.streak >= (self.policy.everyone if everyone else self.policy.some)
            or state.watch.open(step) is not None
        ):
            same = Same(found, size, _losses(window, column, found))
            state.watch.bad(step, same, first_step=state.since)


def _digests_at(window: Window, series: Series, column: int) -> dict[int, int]:
    """Rank -> digest of its batch at a step, of those that report one."""
    there = series.present[:, column]
    digests = series.values[there, column].tolist()
    return dict(zip(window.ranks[there].tolist(), digests, strict=True))


def _all_distinct(window: Window, series: Series, state: DuplicatedState) -> Bool:
    """Steps, bool [S], at which each rank has a batch of its own, and another than at the last."""
    known = [state.last.get(rank) for rank in window.ranks.tolist()]
    first = np.array([digest is None for digest in known])
    last = np.array([digest or 0 for digest in known], dtype=np.uint64)
    values = np.column_stack([last, series.values])
    again = values[:, 1:] == values[:, :-1]
    again[:, 0] &= ~first
    ordered = np.sort(series.values, axis=0)
    shared = (ordered[1:] == ordered[:-1]).any(axis=0)
    # A rank that does not report one keeps what it reported before: that is not examined here.
    whole = np.logical_and.reduce(series.present, axis=0)
    whole[1:] &= whole[:-1]
    distinct: Bool = whole & ~shared & ~again.any(axis=0)
    return distinct


def _losses(window: Window, column: int, groups: Groups) -> bool | None:
    losses = window.series.get("loss")
    if losses is None:
        return None
    rows = {int(rank): row for row, rank in enumerate(window.ranks)}
    for group in groups:
        held = [rows[r] for r in group]
        if not losses.present[held, column].all():
            return None
        values = losses.values[held, column]
        if not np.isfinite(values).all():
            return None  # of what is no number nobody can say that it differs
        if len(set(values.tolist())) > 1:
            return False
    return True


def _drawn(window: Window) -> str:
    """What makes losses of one batch differ, as far as the model's modules show."""
    modules = window.config.get("modules")
    names = sorted(str(n) for n in modules if "Drop" in str(n)) if isinstance(modules, dict) else []
    if names:
        return f"the model has {listing(names, most=3)}, whose masks are each rank's own"
    return (
        "the ranks hold different parameters or buffers, possibly, or something random is in the "
        "forward pass or between the digest and the loss"
    )


def _finding(episode: Episode[Same], window: Window) -> Finding:
    same = episode.facts
    suspects = tuple(sorted(r for group in same.groups for r in group))
    whole = all(len(group) == same.size for group in same.groups)
    step = episode.first_step
    shared = listing([ranks(group) for group in same.groups], most=4)
    losses = {
        True: "Their losses are the same to the last bit as well.",
        False: f"Their losses differ all the same: {_drawn(window)}.",
    }
    return episode.finding(
        kind="data.duplicated",
        severity="critical" if whole else "warning",
        title=f"{ranks(suspects).capitalize()} train on the same batches since step {step}",
        ranks=suspects,
        stage="batch",
        cause=sentences(
            f"At each step, {shared} {'each ' if len(same.groups) > 1 else ''}got one and the same "
            f"batch: {count(len(same.groups[0]), 'rank')} do the work of one, and the batch is "
            "smaller than it looks.",
            losses.get(same.losses, "") if same.losses is not None else "",
        ),
        remedy=(
            "Give each rank its own part of the data: `DistributedSampler` in the `DataLoader`, "
            "`split_dataset_by_node` or shards by rank for an iterable data set, with the same "
            "seed on all ranks. If ranks share a batch on purpose, silence this kind."
        ),
        evidence={
            "groups": [list(group) for group in same.groups],
            "distinct": same.size - sum(len(g) - 1 for g in same.groups),
            "ranks_in_it": same.size,
            "losses_equal": same.losses,
            "observed": episode.seen,
        },
    )


def _check(state: DuplicatedState, replicas: bool) -> Check:
    if not replicas:
        return Check.not_applicable(
            "No two ranks hold the same tensors, or shards of FSDP: so it is not known which "
            "should have batches of their own."
        )
    if not state.judged:
        return Check.missing(
            "No two ranks post digests of their batches.",
            early="No batches have been compared yet.",
        )
    if 2 * state.constant > state.judged:
        return Check.not_applicable(
            "A rank's batch is the one before it at most steps: synthetic input, or all of the "
            "data in one batch."
        )
    return Check.ok(
        f"{count(state.ranks, 'rank')} had batches of their own at "
        f"{count(state.judged - state.constant, 'compared step')}."
    )
