"""Ranks that have not taken the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rankscope.server.comparison.compare import labels_of
from rankscope.server.detectors.base import Detector, Outcome
from rankscope.server.detectors.desync.resumed import Begins, without_state
from rankscope.server.detectors.desync.sharded_steps import DISCARDED, PASSES, ShardedSteps
from rankscope.server.detectors.desync.step_count import (
    COUNTED,
    StepMismatch,
    begun_finding,
    counted_finding,
    ended_finding,
    late_finding,
)
from rankscope.server.detectors.mechanisms.episode import Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count
from rankscope.server.detectors.policy import Count, Policy, Share, Times
from rankscope.server.window import Check, Comparison, Float64, Int64, Window

_LENGTH = "step_seconds"
# Steps over which the ranks' paces are compared: the first ones load and compile.
_FEWEST_STEPS = 32
# Links at which a rank that has left a step out differs from the others.
_SHOWS = ("reduced_gradient", "clipped_gradient", "optimizer_state", "parameters")


@dataclass(frozen=True, slots=True)
class ProgressPolicy(Policy):
    """Thresholds of `desync.progress`.

    Attributes:
        same: relative difference up to which two norms count as equal, as summed on different kinds
            of machines.
        epochs: epochs without a difference after which it is over.
        late: consecutive steps at which a rank applied what the others applied one step later,
            before it is reported.
        short: share of the others' steps that a rank which has ended may lack, as of data that are
            dealt out unequally (`Join`).
        few: steps that it may lack in any case.
        pace: relative difference between the mean lengths of the ranks' steps, up to which they may
            be waiting for each other: of steps of 10 ms and more, what each does by itself between
            two of them comes to less.
    """

    same: Share = 1e-6
    epochs: Times = 1.5
    late: Count = 2
    short: Share = 1 / 3
    few: Count = 8
    pace: Share = 0.1


@dataclass(slots=True)
class Paces:
    """How long the ranks took for the steps that all of them took.

    Ranks that wait for each other are long at the same steps; those that do not are so each at
    steps of its own, and the mean over R of them scatters as much less.

    Attributes:
        steps: number of them; sums of the logarithms of their lengths and of the squares by rank,
            float64 [R], and those of the means over the ranks.
    """

    ranks: tuple[int, ...] = ()
    steps: int = 0
    sums: Float64 = field(default_factory=lambda: np.zeros(0))
    squares: Float64 = field(default_factory=lambda: np.zeros(0))
    mean: float = 0.0
    square: float = 0.0

    def take(self, window: Window) -> None:
        """Adds up the lengths of a window's steps."""
        ranks = tuple(window.ranks.tolist())
        if ranks != self.ranks:
            self.ranks, self.steps, self.mean, self.square = ranks, 0, 0.0, 0.0
            self.sums, self.squares = np.zeros(len(ranks)), np.zeros(len(ranks))
        _, rows = rank_rows(window, _LENGTH)
        common = rows[(np.isfinite(rows) & (rows > 0)).all(axis=1)]
        logs = np.log(common)
        means = logs.mean(axis=1) if len(logs) else np.zeros(0)
        self.steps += len(logs)
        self.sums, self.squares = self.sums + logs.sum(axis=0), self.squares + (logs**2).sum(axis=0)
        self.mean, self.square = self.mean + means.sum(), self.square + (means**2).sum()

    def level(self, near: float) -> bool:
        """Whether all took as long as the others, step by step, over enough steps to tell."""
        if self.steps < _FEWEST_STEPS or len(self.ranks) < 2:
            return False
        lengths = self.sums / self.steps
        each = float((self.squares / self.steps - lengths**2).mean())
        together = self.square / self.steps - (self.mean / self.steps) ** 2
        least = (1 + 1 / len(self.ranks)) / 2  # half way between ranks that wait and that do not
        return float(np.ptp(lengths)) <= near and together > least * each


class _Late(NamedTuple):
    """Ranks that were found to be a step behind, at a step, since another."""

    step: int
    facts: StepMismatch
    since: int


@dataclass(frozen=True, slots=True)
class _Norms:
    """Gradient norms of one step, float64 [R]; `level` where all are there and the same."""

    step: int
    ranks: list[int]
    values: Float64
    level: bool

    def by_rank(self) -> dict[int, float]:
        """Those that are finite."""
        pairs = zip(self.ranks, self.values.tolist(), strict=True)
        return {rank: value for rank, value in pairs if np.isfinite(value)}


@dataclass(slots=True)
class ProgressState:
    """What is remembered: steps compared, and the last values of each.

    Attributes:
        discarded: ranks that have discarded a pass more than the others, at `discarded_step`, and
            since when nothing that would show it was compared.
        level: whether the ranks were equal when they were compared last; `agreed`: the last step at
            which their reduced gradients were; -1 where they were not.
        usual: steps at which ranks threw away different numbers of passes, and stayed equal.
        applied: gradient norms by rank at the newest step.
        ahead: rank -> a step that it took without a backward pass, as the others did not, and
            since then the steps at which it applied what they had applied a step before.
    """

    judged: int = 0
    began: Begins = field(default_factory=Begins)
    begin: StepMismatch | None = None
    begin_step: int = 0
    ended: StepMismatch | None = None
    last: dict[str, dict[int, float]] = field(default_factory=dict)
    norms: dict[tuple[int, ...], _Norms] = field(default_factory=dict)
    late: dict[int, tuple[int, int]] = field(default_factory=dict)
    discarded: StepMismatch | None = None
    discarded_step: int = -1
    level: bool = True
    agreed: int = -1
    usual: int = 0
    applied: tuple[int, dict[int, float]] = (-1, {})
    paces: Paces = field(default_factory=Paces)
    shards: ShardedSteps = field(default_factory=ShardedSteps)
    ahead: dict[int, tuple[int, int]] = field(default_factory=dict)
    shifted: Watch[StepMismatch] = field(default_factory=lambda: Watch(clear_after=8))
    watch: Watch[StepMismatch] = field(default_factory=lambda: Watch(clear_after=8))
    epochs: Watch[StepMismatch] = field(default_factory=lambda: Watch(clear_after=8))
    epoch_since: int = -1


class Progress(Detector[ProgressState]):
    """Ranks that have taken different numbers of steps, or began at different ones.

    A rank that skips a step by its own overflow check, or resumes at another step than the others,
    leaves them: schedules, seeds and checkpoints no longer belong together.

    Statistic:
        `optimizer_steps`, `steps_skipped` and the whole part of `epoch` (where it is logged) of a
        step, equal on all ranks that hold the same tensors, or parts of them that FSDP deals out,
        and the step at which each rank's newest process began. Over after 8 steps of agreement. A
        rank whose gradient norm is, twice in a row, that of the others one step later has not taken
        a step that they took; nor has one that threw away more backward passes before its step than
        the others did, where gradients, state or parameters are no longer equal at the next
        comparison (of a model that FSDP deals out, at once). A rank that stepped without a backward
        pass, as the others did not, and whose norm is theirs of one step before twice in a row
        since, has taken a step more. A rank that reduced its gradients with the others, or holds a
        part of what they train (where one part is no other's copy, and 32 steps or more took all
        ranks as long, within a tenth in the mean and more at the same steps), and ended without an
        error, more than 8 steps and a third of theirs before them, has stopped training, or what is
        watched of it.

    Severity:
        Critical; warning for a rank that ended early, and for the epoch alone, which counts as over
        after one and a half epochs without a difference.

    Evidence:
        `what` (the series, `begin` or `end`), `values` by rank at the first step, `decided`.

    Source:
        facebookresearch/fairscale#181 (`found_inf` not reduced), PaddlePaddle/PaddleNLP#7256
        (resumed at another step), NVIDIA-NeMo/Megatron-Bridge#5944 (epochs of unequal lengths).
    """

    kinds = ("desync.progress",)
    lasting = "an additional step of one rank stays in its count"
    wants = (*COUNTED, "grad_norm", DISCARDED, PASSES, _LENGTH)
    min_ranks = 2

    policy: ProgressPolicy

    def advance(self, window: Window, state: ProgressState) -> Outcome:
        """Compares the counters step by step."""
        classes = [c for c in window.replicas if len(c) > 1]
        # Each holds a part of what FSDP deals out, and gathers those of the others at each pass.
        together = [g for g in window.data_parallel if len(g) > 1]
        self._begun(window, state)
        found: dict[int, list[StepMismatch]] = {}
        epochs: dict[int, StepMismatch] = {}
        judged: set[int] = set()
        for what in COUNTED:
            steps, rows = rank_rows(window, what)
            if not len(steps):
                continue
            if what == "epoch":
                # Some log it as a fraction, each of the length of its own part.
                rows = np.floor(rows)
            last = state.last.setdefault(what, {})
            for members in together:
                columns = np.flatnonzero(np.isin(window.ranks, members))
                held = rows[:, columns]
                reported = ~np.isnan(held)
                enough = reported.sum(axis=1) > 1
                if what != "epoch":
                    judged |= set(steps[enough].tolist())
                lowest = np.where(reported, held, np.inf).min(axis=1)
                highest = np.where(reported, held, -np.inf).max(axis=1)
                who = window.ranks[columns]
                for row in np.flatnonzero(enough & (lowest != highest)).tolist():
                    mismatch = _mismatch(what, who[reported[row]], held[row][reported[row]])
                    before = _newest(window.ranks, rows[:row], last)
                    mismatch.before = {int(r): before[int(r)] for r in who if int(r) in before}
                    if what == "epoch":
                        epochs[int(steps[row])] = mismatch
                    else:
                        found.setdefault(int(steps[row]), []).append(mismatch)
            if what == "epoch" and len(steps):
                state.epoch_since = int(steps[0]) if state.epoch_since < 0 else state.epoch_since
                self._epochs(state, steps.tolist(), epochs)
            state.last[what] = _newest(window.ranks, rows, last)
        for step in sorted(judged):
            state.judged += 1
            if step in found:
                state.watch.bad(step, found[step][0])
            else:
                state.watch.good(step)
        late_steps: list[_Late] = []
        for members in classes:
            late_steps += self._shifts(window, state, members)
        late_steps += self._extra(window, state, classes)
        late_steps += self._discards(window, state, classes)
        late_steps += [_Late(step, found, step) for step, found in state.shards.take(window)]
        # In the order of their steps, whatever showed it: the first one opens the alert.
        for late in sorted(late_steps, key=lambda found: found.step):
            state.shifted.bad(late.step, late.facts, first_step=late.since)
        findings = [counted_finding(e) for e in state.watch.take(window.last_step)]
        findings += [counted_finding(e) for e in state.epochs.take(window.last_step)]
        findings += [late_finding(e) for e in state.shifted.take(window.last_step)]
        state.paces.take(window)
        state.ended = self._ended(window, state, together)
        if state.ended is not None:
            findings.append(ended_finding(state.ended, window.last_step))
        if state.begin is not None:
            findings.append(begun_finding(state.begin, state.begin_step, window.last_step))
        return Outcome({"desync.progress": _check(state)}, tuple(findings))

    def _epochs(
        self, state: ProgressState, steps: list[int], found: Mapping[int, StepMismatch]
    ) -> None:
        """Ranks in another epoch: shown at the boundaries alone, so one incident over them all."""
        for step in steps:
            mismatch = found.get(step)
            if mismatch is None:
                state.epochs.good(step)
                continue
            length = (step - state.epoch_since) / max(*mismatch.values.values(), 1.0)
            state.epochs.clear_after = max(8, round(self.policy.epochs * length))
            episode = state.epochs.bad(step, mismatch)
            episode.clear_after = max(episode.clear_after, state.epochs.clear_after)

    def _shifts(
        self, window: Window, state: ProgressState, members: tuple[int, ...]
    ) -> Iterator[_Late]:
        """Ranks that apply at one step what the others do at the next."""
        if len(members) < 3:
            return  # nothing shows which of two is late
        steps, rows = rank_rows(window, "grad_norm")
        columns = np.flatnonzero(np.isin(window.ranks, members))
        who = window.ranks[columns].tolist()
        for step, row in zip(steps.tolist(), rows[:, columns], strict=True):
            before = state.norms.get(members)
            there = bool(np.isfinite(row).all())
            level = there and bool(row.max() - row.min() <= self.policy.same * abs(row[0]))
            state.norms[members] = _Norms(step, who, row, level)
            if level or before is None:
                state.late = {r: late for r, late in state.late.items() if r not in members}
            elif not before.level or state.late:
                norms = _Norms(step, who, row, level)
                yield from self._late(state, before.by_rank(), before.step, norms)

    def _late(
        self, state: ProgressState, before: Mapping[int, float], at: int, norms: _Norms
    ) -> Iterator[_Late]:
        now, step = norms.by_rank(), norms.step
        common = float(np.median(list(now.values()))) if len(now) > 2 else 0.0
        most = [r for r, v in now.items() if abs(v - common) <= self.policy.same * common]
        if 2 * len(most) <= len(now):
            return
        for rank in set(norms.ranks) - set(most):
            others = [before[r] for r in most if r in before]
            late = (
                rank in before
                and at == step - 1
                and bool(others)
                and abs(before[rank] - common) <= self.policy.same * common
                and all(abs(before[rank] - other) > self.policy.same * common for other in others)
            )
            if not late:
                state.late.pop(rank, None)
                continue
            times, since = state.late.get(rank, (0, step - 1))
            state.late[rank] = (times + 1, since)
            if times + 1 >= self.policy.late:
                values = {r: before.get(r, float("nan")) for r in norms.ranks}
                found = StepMismatch("grad_norm", values, (rank,), True)
                yield _Late(step, found, since)

    def _extra(
        self, window: Window, state: ProgressState, classes: list[tuple[int, ...]]
    ) -> Iterator[_Late]:
        """Ranks that stepped once more with the gradient that they had."""
        passes = window.series.get(PASSES)
        for step, row in zip(*rank_rows(window, "grad_norm"), strict=True):
            now = dict(zip(window.ranks.tolist(), row.tolist(), strict=True))
            at, before = state.applied
            state.applied = (int(step), now)
            for rank, (since, times) in [*state.ahead.items()]:
                rest = next(c for c in classes if rank in c)
                others = [before.get(r, np.nan) for r in rest if r not in state.ahead]
                present = [now[r] for r in rest if r not in state.ahead]
                shifted = at == step - 1 and bool(others)
                for was, is_ in zip(others, present, strict=True):
                    near = self.policy.same * abs(was)
                    shifted &= abs(now[rank] - was) <= near < abs(is_ - was)
                if not shifted:
                    del state.ahead[rank]
                    continue
                state.ahead[rank] = since, times + 1
                if times + 1 >= self.policy.late:
                    values = {r: now[r] for r in rest}
                    yield _Late(int(step), StepMismatch(PASSES, values, (rank,), True), since)
            if passes is None:
                continue
            column = int(np.searchsorted(window.steps, step))
            reported = passes.present[:, column] & (passes.values[:, column] > 0)
            had = set(window.ranks[reported].tolist())
            for members in classes:
                # Of a rank that applied nothing either, it is not known whether it was sampled.
                idle = {r for r in members if r not in had and np.isfinite(now[r])}
                if idle and 2 * len(idle) <= len(members) and had.issuperset(set(members) - idle):
                    state.ahead |= {r: (int(step), 0) for r in idle if r not in state.ahead}

    def _discards(
        self, window: Window, state: ProgressState, classes: list[tuple[int, ...]]
    ) -> Iterator[_Late]:
        """Ranks that computed a gradient, discarded it and then diverged from the others."""
        reported: dict[int, dict[int, float]] = {}
        for step, row in zip(*rank_rows(window, DISCARDED), strict=True):
            values = np.nan_to_num(row)
            reported[int(step)] = dict(zip(window.ranks.tolist(), values.tolist(), strict=True))
        shown: dict[int, list[Comparison]] = {}
        for comparison in window.comparisons:
            if comparison.stage in _SHOWS:
                shown.setdefault(comparison.step, []).append(comparison)
        for step in sorted({*reported, *shown}):
            if step in reported and state.discarded is None and state.level:
                state.discarded = _discarding(reported[step], classes)
                state.discarded_step = step
            held = shown.get(step, [])
            mismatch = state.discarded
            if mismatch is not None:
                held = [c for c in held if _shows(c, mismatch.suspects)]
            if not held:
                continue
            state.level = all(c.equal for c in held)
            if mismatch is not None:
                state.usual += state.level
                if not state.level and not state.usual:
                    yield _Late(step, mismatch, state.discarded_step)
                state.discarded = None

    def _ended(
        self, window: Window, state: ProgressState, together: list[tuple[int, ...]]
    ) -> StepMismatch | None:
        """Ranks that trained with others to their last step, and ended long before them."""
        for comparison in window.comparisons:
            if comparison.stage == "reduced_gradient":
                state.agreed = comparison.step if comparison.equal else -1
        lives = {life.rank: life for life in window.liveness}
        whole = tuple(window.ranks[window.members].tolist())
        if len(window.replicas) > 1 and state.paces.level(self.policy.pace):
            # Stages and shards, each of which waits for the others at every step.
            together = [*together, whole]
        for members in together:
            if members in window.replicas and state.agreed < 0:
                continue  # each goes its own way: workers may end when they like
            last = {rank: lives[rank].last_step for rank in members if rank in lives}
            most = max(last.values(), default=-1)
            enough = most - max(self.policy.few, self.policy.short * most)
            short = tuple(
                rank
                for rank, step in last.items()
                if lives[rank].state == "finished" and 0 <= step < enough
            )
            if short and len(short) < len(last):
                values = {rank: float(step) for rank, step in last.items()}
                return StepMismatch("end", values, short, decided=True)
        return None

    def _begun(self, window: Window, state: ProgressState) -> None:
        began = state.began.changed(window)
        if began is None:
            return
        state.begin = None
        # That some began without the state of their optimizer is `desync.optimizer`.
        if len(set(began)) > 1 and without_state(window) is None:
            members = window.ranks[window.members]
            state.begin = _mismatch("begin", members, np.array(began, dtype=np.float64))
            state.begin_step = min(began)


def _newest(ranks_: Int64, rows: Float64, last: Mapping[int, float]) -> dict[int, float]:
    """Each rank's last value in rows, float64 [S, R]; what was known before where there is none."""
    if len(rows) and not np.isnan(rows[-1]).any():
        return dict(zip(ranks_.tolist(), rows[-1].tolist(), strict=True))
    known = dict(last)
    reported = ~np.isnan(rows)
    for column in np.flatnonzero(reported.any(axis=0)).tolist():
        newest = int(np.flatnonzero(reported[:, column])[-1])
        known[int(ranks_[column])] = float(rows[newest, column])
    return known


def _shows(comparison: Comparison, suspects: tuple[int, ...]) -> bool:
    """Whether some ranks are compared with others."""
    present = set(comparison.ranks.tolist())
    return present.issuperset(suspects) and len(present) > len(suspects)


def _discarding(
    reported: Mapping[int, float], classes: list[tuple[int, ...]]
) -> StepMismatch | None:
    """Ranks that threw away more passes than others that hold the same, which all had as many.

    Of two networks that play against each other, each throws away what the other's steps give it.
    """
    for members in classes:
        values = {rank: reported.get(rank, 0.0) for rank in members}
        least = min(values.values())
        suspects = tuple(rank for rank, value in values.items() if value > least)
        if suspects and 2 * len(suspects) <= len(members):
            return StepMismatch(DISCARDED, values, suspects, decided=True)
    return None


def _mismatch(what: str, who: Int64, values: Float64) -> StepMismatch:
    labels, decided = labels_of(values)
    decided = decided and len(who) > 2
    suspects = who[labels > 0] if decided else who
    return StepMismatch(
        what,
        {int(r): float(v) for r, v in zip(who, values, strict=True)},
        tuple(int(r) for r in suspects),
        decided,
    )


def _check(state: ProgressState) -> Check:
    if not state.judged:
        return Check.missing(
            "No two ranks that train the same tensors post optimizer_steps.",
            early="No counters have been compared yet.",
        )
    return Check.ok(f"All ranks had taken the same steps at {count(state.judged, 'checked step')}.")
