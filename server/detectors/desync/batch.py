"""Ranks that work on one batch together, and do not any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.data.batches import BATCHES, batch_digests
from rankscope.server.detectors.desync.learned_groups import (
    Group,
    Groups,
    Ranks,
    groups_of,
    suspects_of,
)
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.incident import AGREED_UNTIL
from rankscope.server.detectors.mechanisms.restarts import restarts
from rankscope.server.detectors.mechanisms.wording import count, listing, ranks
from rankscope.server.detectors.policy import Observations, Policy
from rankscope.server.window import Check, Window

_LOSS = "loss"


@dataclass(frozen=True, slots=True)
class SharedPolicy(Policy):
    """Thresholds of `desync.batch`.

    Attributes:
        shared: consecutive compared steps at which ranks had one batch, new each time, before they
            are taken for a group that shares its batches.
    """

    shared: Observations = 4


@dataclass(slots=True)
class Different:
    """A group whose ranks got different batches.

    Attributes:
        group: the ranks.
        suspects: those without the batch of most; all of them where there is none.
        shared: observations at which they had had one.
        agreed_until: the last of them.
        losses_differ_since: first step at which their losses differed; None where that is not
            known.
    """

    group: Ranks
    suspects: Ranks
    shared: int
    agreed_until: int
    losses_differ_since: int | None


@dataclass(slots=True)
class Shared(Group):
    """A group of ranks that share their batches.

    Attributes:
        same_loss: last step at which all of them had one and the same loss.
        other_loss: first step after it at which they had not; None for none.
    """

    same_loss: int = -1
    other_loss: int | None = None

    @property
    def losses_differ_since(self) -> int | None:
        """Since when their losses differ, where these were the same while they shared."""
        return self.other_loss if self.same_loss >= self.agreed_until else None


@dataclass(slots=True)
class SharedState:
    """What is remembered.

    Attributes:
        groups: ranks that share their batches.
        last: batch of each rank at its last observation.
    """

    applicable: bool = False
    groups: Groups[Shared, Different] = field(default_factory=Groups)
    last: dict[int, int] = field(default_factory=dict)


class BatchShared(Detector[SharedState]):
    """Ranks that hold different parts of a model have to read the same batch, and no longer do.

    Each computes its part of one result: of tensor-parallel (or context-parallel) ranks with
    different batches, what comes out is the result of neither.

    Statistic:
        Ranks that hold different parts of the model, all of which had one and the same batch at
        four consecutive observations, a new one each time, are a group. From then on their batches'
        digests have to be equal. Ranks that hold replicas of the same tensors are no group: they
        should have batches of their own (`data.duplicated`). Which ranks share is learned anew
        after a restart. Ranks that compute one result have one loss, to the last bit: where they
        had up to the last observation that found one batch, they have read different ones since
        the step from which on it differs. Over after 8 steps without.

    Severity:
        Critical.

    Evidence:
        `group`, `shared` (observations at which they had one batch before), `agreed_until` (the
        last of them), `losses_apart` (first step with different losses, if any), `observed`.

    Source:
        facebookresearch/metaseq#566: a loader seeded by the global rank under tensor parallelism.
    """

    kinds = ("desync.batch",)
    wants = (_LOSS,)
    min_ranks = 2

    policy: SharedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """The batches that make ranks a group, and one more."""
        return (Reach(BATCHES, self.policy.shared + 1, TO_THE_END),)

    def advance(self, window: Window, state: SharedState) -> Outcome:
        """Goes through the batches step by step."""
        series = batch_digests(window)
        sets = window.data_parallel
        part = {rank: number for number, c in enumerate(sets) for rank in c}
        state.applicable = len(sets) > 1
        if series is not None and state.applicable:
            later = restarts(window)
            done = 0
            for column in np.flatnonzero(series.present.sum(axis=0) > 1).tolist():
                # A batch is read before its loss is known.
                _follow_losses(window, state, done, column)
                done = column
                state.groups.begin(later, int(window.steps[column]))
                rows = np.flatnonzero(series.present[:, column])
                batches = series.values[rows, column].tolist()
                now = dict(zip(window.ranks[rows].tolist(), batches, strict=True))
                self._step(state, int(window.steps[column]), now, part)
            _follow_losses(window, state, done, len(window.steps))
        findings = tuple(_finding(e) for e in state.groups.episodes(window.last_step))
        return Outcome({"desync.batch": _check(window, state, self.policy)}, findings)

    def _step(
        self, state: SharedState, step: int, now: dict[int, int], part: dict[int, int]
    ) -> None:
        last, state.last = state.last, {**state.last, **now}
        # A batch that is the one before it is synthetic, or all the data there are.
        stale = {batch for rank, batch in now.items() if last.get(rank) == batch}
        fresh = {rank: batch for rank, batch in now.items() if batch not in stale}
        state.groups.observe(
            step,
            now,
            groups_of(fresh, part),
            needed=self.policy.shared,
            made=Shared,
            differs=_differs,
        )


def _differs(group: Ranks, known: Shared, held: Mapping[int, int]) -> tuple[Different, int | None]:
    since = known.losses_differ_since
    return Different(group, suspects_of(held), known.times, known.agreed_until, since), since


def _follow_losses(window: Window, state: SharedState, first: int, end: int) -> None:
    """Takes the losses of all groups at the columns from `first` to `end`, without the last."""
    losses = window.series.get(_LOSS)
    if losses is None or not state.groups.known or first >= end:
        return
    columns = slice(first, end)
    steps = window.steps[columns]
    groups = state.groups.known
    members = np.searchsorted(window.ranks, [rank for group in groups for rank in group])
    sizes = np.array([len(group) for group in groups])
    begins = np.cumsum(sizes) - sizes
    values = losses.values[members, columns]
    there = losses.present[members, columns] & np.isfinite(values)
    reported = np.logical_and.reduceat(there, begins, axis=0)
    same = np.minimum.reduceat(values, begins) == np.maximum.reduceat(values, begins)
    for known, posted, alike in zip(state.groups.known.values(), reported, same, strict=True):
        last = np.flatnonzero(posted & alike)
        if len(last):
            known.same_loss, known.other_loss = int(steps[last[-1]]), None
        if known.other_loss is None:
            sets = np.flatnonzero(posted & (steps > known.same_loss))
            known.other_loss = int(steps[sets[0]]) if len(sets) else None


def _finding(episode: Episode[Different]) -> Finding:
    found, step = episode.facts, episode.first_step
    group, suspects = found.group, found.suspects
    alone = suspects != group
    reads, them = ("reads", "it") if len(suspects) == 1 else ("read", "them")
    title = (
        f"{ranks(suspects).capitalize()} {reads} another batch than the ranks that share the model "
        f"with {them}"
        if alone
        else f"{ranks(group).capitalize()} share a model and read different batches"
    )
    unknown = "" if alone else " Nothing shows which of them is wrong."
    since = ""
    if found.losses_differ_since is not None:
        since = (
            f" Since step {found.losses_differ_since} they no longer have one and the same loss."
        )
    return episode.finding(
        kind="desync.batch",
        severity="critical",
        title=f"{title} since step {step}",
        ranks=suspects,
        stage="batch",
        cause=(
            f"{ranks(group).capitalize()} hold different parts of the model and had one and the "
            f"same batch at {count(found.shared, 'step')} before; at step {episode.seen_step} "
            f"they had not.{since} What they compute together belongs to no batch: a loader that "
            "is seeded or sharded by the global rank, or a rank that drew one batch "
            f"more.{unknown}"
        ),
        remedy=(
            "Give all ranks of a tensor-parallel or context-parallel group the same batch: shard "
            "and seed the data by the data-parallel rank, or read on one rank and broadcast inside "
            "the group."
        ),
        evidence={
            "group": list(group),
            "shared": found.shared,
            AGREED_UNTIL: found.agreed_until,
            "losses_apart": found.losses_differ_since,
            "observed": episode.seen,
        },
    )


def _check(window: Window, state: SharedState, policy: SharedPolicy) -> Check:
    if not state.applicable and window.replicas:
        return Check.not_applicable(
            "All ranks hold the same tensors, or shards of them: each has batches of its own."
        )
    if state.groups.known:
        reported = listing([ranks(group) for group in sorted(state.groups.known)], most=4)
        return Check.ok(f"{reported.capitalize()} had the same batches, as they have to.")
    early = "Too few batches have been seen yet." if state.groups.judged < policy.shared else ""
    if not state.groups.judged:
        return Check.missing("No two ranks post digests of their batches.", early=early)
    why = "No ranks that hold different parts share their batches."
    return Check.not_applicable(why, early=early)
