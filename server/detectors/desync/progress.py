"""Ranks that have not taken the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from rankscope.server.compare import labels_of
from rankscope.server.detectors.base import Check, Detector, Finding, Outcome, Status
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.policy import Count, Policy, Share, Times
from rankscope.server.detectors.statistics import rank_rows
from rankscope.server.detectors.wording import count, listing, ranks, sentences
from rankscope.server.window import Comparison, Float64, Int64, Window

_GRACE = 20
# What is counted, and how a person calls it.
_COUNTED = {
    "optimizer_steps": "steps of the optimizer",
    "steps_skipped": "skipped steps",
    # Whoever logs it.
    "epoch": "epochs",
}
# Backward passes of a rank whose gradients it threw away before it stepped.
_DISCARDED = "passes_discarded"
# Links at which a rank that has left a step out differs from the others.
_SHOWS = ("reduced_gradient", "clipped_gradient", "optimizer_state", "parameters")


@dataclass(frozen=True, slots=True)
class ProgressPolicy(Policy):
    """Thresholds of `desync.progress`.

    Attributes:
        same: relative difference up to which two norms are one, summed on machines of different
            kinds.
        epochs: epochs without a difference after which ranks are level again.
        late: steps on end at which a rank applied what the others did a step later.
    """

    same: Share = 1e-6
    epochs: Times = 1.5
    late: Count = 2


@dataclass(slots=True)
class Behind:
    """Ranks that counted differently.

    Attributes:
        what: one of `_COUNTED`, or `begin` for the step at which they began.
        values: by rank, at the first step.
        guilty: those outside the majority; all where there is none.
    """

    what: str
    values: dict[int, float]
    guilty: tuple[int, ...]
    decided: bool
    before: dict[int, float] = field(default_factory=dict)


class _Late(NamedTuple):
    """Ranks that were found to be a step behind, at a step, since another."""

    step: int
    facts: Behind
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
        discarded: ranks that have thrown away a pass more than the others, at `discarded_step`, and
            since when nothing that would show it was compared.
        level: whether the ranks were equal when they were compared last.
        usual: steps at which ranks threw away different numbers of passes, and stayed equal.
    """

    steps: int = 0
    judged: int = 0
    began: tuple[int, ...] = ()
    begin: Behind | None = None
    begin_step: int = 0
    last: dict[str, dict[int, float]] = field(default_factory=dict)
    norms: dict[tuple[int, ...], _Norms] = field(default_factory=dict)
    late: dict[int, tuple[int, int]] = field(default_factory=dict)
    discarded: Behind | None = None
    discarded_step: int = -1
    level: bool = True
    usual: int = 0
    shifted: Watch[Behind] = field(default_factory=lambda: Watch(clear_after=8))
    watch: Watch[Behind] = field(default_factory=lambda: Watch(clear_after=8))
    epochs: Watch[Behind] = field(default_factory=lambda: Watch(clear_after=8))
    epoch_since: int = -1


class Progress(Detector[ProgressState]):
    """Ranks that have taken different numbers of steps, or began at different ones.

    A rank that skips a step by its own overflow check, or resumes at another step than the others,
    leaves them: schedules, seeds and checkpoints no longer belong together.

    Statistic:
        `optimizer_steps`, `steps_skipped` and the whole part of `epoch` (where it is logged) of a
        step, equal on all ranks that hold the same tensors, and the step at which each rank's
        newest process began. Over after 8 steps of agreement. A rank whose gradient norm is,
        twice on end, that of the others one step later has not taken a step that they took; nor has
        one that threw away a backward pass before its step, as the others did not, where gradients,
        state or parameters are no longer equal at the next comparison.

    Severity:
        Critical; warning for the epoch alone, which counts as over after one and a half epochs
        without a difference.

    Evidence:
        `what` (the series, or `begin`), `values` by rank at the first step, `decided`.

    Source:
        facebookresearch/fairscale#181 (`found_inf` not reduced), PaddlePaddle/PaddleNLP#7256
        (resumed at another step), NVIDIA-NeMo/Megatron-Bridge#5944 (epochs of unequal lengths).
    """

    kinds: ClassVar[tuple[str, ...]] = ("desync.progress",)
    policies: ClassVar[type[Policy]] = ProgressPolicy
    wants: ClassVar[tuple[str, ...]] = (*_COUNTED, "grad_norm", _DISCARDED)
    min_ranks: ClassVar[int] = 2

    policy: ProgressPolicy

    def start(self) -> ProgressState:
        """Nothing compared yet."""
        return ProgressState()

    def advance(self, window: Window, state: ProgressState) -> Outcome:
        """Compares the counters step by step."""
        state.steps += len(window.steps)
        classes = [c for c in window.replicas if len(c) > 1]
        self._begun(window, state)
        found: dict[int, list[Behind]] = {}
        epochs: dict[int, Behind] = {}
        judged: set[int] = set()
        for what in _COUNTED:
            steps, rows = rank_rows(window, what)
            if not len(steps):
                continue
            if what == "epoch":
                # Some log it as a fraction, each of the length of its own part.
                rows = np.floor(rows)
            last = state.last.setdefault(what, {})
            for members in classes:
                columns = np.flatnonzero(np.isin(window.ranks, members))
                held = rows[:, columns]
                told = ~np.isnan(held)
                enough = told.sum(axis=1) > 1
                if what != "epoch":
                    judged |= set(steps[enough].tolist())
                lowest = np.where(told, held, np.inf).min(axis=1)
                highest = np.where(told, held, -np.inf).max(axis=1)
                who = window.ranks[columns]
                for row in np.flatnonzero(enough & (lowest != highest)).tolist():
                    behind = _behind(what, who[told[row]], held[row][told[row]])
                    before = _newest(window.ranks, rows[:row], last)
                    behind.before = {int(r): before[int(r)] for r in who if int(r) in before}
                    if what == "epoch":
                        epochs[int(steps[row])] = behind
                    else:
                        found.setdefault(int(steps[row]), []).append(behind)
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
        behind_by_one: list[_Late] = []
        for members in classes:
            behind_by_one += self._shifts(window, state, members)
        behind_by_one += self._discards(window, state, classes)
        # In the order of their steps, whatever showed it: the first one opens the alert.
        for late in sorted(behind_by_one, key=lambda found: found.step):
            state.shifted.bad(late.step, late.facts, first_step=late.since)
        findings = [_finding(e) for e in state.watch.take(window.last_step)]
        findings += [_finding(e) for e in state.epochs.take(window.last_step)]
        findings += [_shift(e) for e in state.shifted.take(window.last_step)]
        if state.begin is not None:
            findings.append(_apart(state.begin, state.begin_step, window.last_step))
        return Outcome({"desync.progress": _check(window, state)}, tuple(findings))

    def _epochs(self, state: ProgressState, steps: list[int], found: Mapping[int, Behind]) -> None:
        """Ranks in another epoch: shown at the boundaries alone, so one incident over them all."""
        for step in steps:
            behind = found.get(step)
            if behind is None:
                state.epochs.good(step)
                continue
            length = (step - state.epoch_since) / max(*behind.values.values(), 1.0)
            state.epochs.clear_after = max(8, round(self.policy.epochs * length))
            episode = state.epochs.bad(step, behind)
            episode.clear_after = max(episode.clear_after, state.epochs.clear_after)

    def _shifts(
        self, window: Window, state: ProgressState, members: tuple[int, ...]
    ) -> Iterator[_Late]:
        """Ranks that apply at one step what the others do at the next."""
        if len(members) < 3:
            return  # nothing tells which of two is late
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
                found = Behind("grad_norm", values, (rank,), True)
                yield _Late(step, found, since)

    def _discards(
        self, window: Window, state: ProgressState, classes: list[tuple[int, ...]]
    ) -> Iterator[_Late]:
        """Ranks that computed a gradient, threw it away and parted from the others then."""
        told: dict[int, dict[int, float]] = {}
        for step, row in zip(*rank_rows(window, _DISCARDED), strict=True):
            values = np.nan_to_num(row)
            told[int(step)] = dict(zip(window.ranks.tolist(), values.tolist(), strict=True))
        shown: dict[int, list[Comparison]] = {}
        for comparison in window.comparisons:
            if comparison.stage in _SHOWS:
                shown.setdefault(comparison.step, []).append(comparison)
        for step in sorted({*told, *shown}):
            if step in told and state.discarded is None and state.level:
                state.discarded = _discarding(told[step], classes)
                state.discarded_step = step
            held = shown.get(step, [])
            behind = state.discarded
            if behind is not None:
                held = [c for c in held if _shows(c, behind.guilty)]
            if not held:
                continue
            state.level = all(c.equal for c in held)
            if behind is not None:
                state.usual += state.level
                if not state.level and not state.usual:
                    yield _Late(step, behind, state.discarded_step)
                state.discarded = None

    def _begun(self, window: Window, state: ProgressState) -> None:
        if len(window.ranks) < window.world_size or not len(window.steps):
            return
        begins = [window.begins.get(int(rank), ()) for rank in window.ranks]
        attempts = {len(b) for b in begins}
        if len(attempts) != 1 or 0 in attempts:
            return  # only some were started again: they catch up with the others
        began = tuple(b[-1] for b in begins)
        if began == state.began:
            return
        state.began = began
        state.begin = None
        if len(set(began)) > 1:
            state.begin = _behind("begin", window.ranks, np.array(began, dtype=np.float64))
            state.begin_step = min(began)


def _newest(ranks_: Int64, rows: Float64, last: Mapping[int, float]) -> dict[int, float]:
    """Each rank's last value in rows, float64 [S, R]; what was known before where there is none."""
    if len(rows) and not np.isnan(rows[-1]).any():
        return dict(zip(ranks_.tolist(), rows[-1].tolist(), strict=True))
    known = dict(last)
    told = ~np.isnan(rows)
    for column in np.flatnonzero(told.any(axis=0)).tolist():
        newest = int(np.flatnonzero(told[:, column])[-1])
        known[int(ranks_[column])] = float(rows[newest, column])
    return known


def _shows(comparison: Comparison, guilty: tuple[int, ...]) -> bool:
    """Whether some ranks are compared with others."""
    present = set(comparison.ranks.tolist())
    return present.issuperset(guilty) and len(present) > len(guilty)


def _discarding(told: Mapping[int, float], classes: list[tuple[int, ...]]) -> Behind | None:
    """Ranks that threw away a pass where others that hold the same threw away none."""
    for members in classes:
        values = {rank: told.get(rank, 0.0) for rank in members}
        guilty = tuple(rank for rank, value in values.items() if value)
        if guilty and len(guilty) < len(members):
            return Behind(_DISCARDED, values, guilty, decided=True)
    return None


def _behind(what: str, who: Int64, values: Float64) -> Behind:
    labels, decided = labels_of(values)
    decided = decided and len(who) > 2
    guilty = who[labels > 0] if decided else who
    return Behind(
        what,
        {int(r): float(v) for r, v in zip(who, values, strict=True)},
        tuple(int(r) for r in guilty),
        decided,
    )


def _finding(episode: Episode[Behind]) -> Finding:
    behind, step = episode.facts, episode.first_step
    what, guilty = _COUNTED[behind.what], behind.guilty
    who = ranks(guilty).capitalize()
    verb = "has" if len(guilty) == 1 else "have"
    told = _told(behind, what)
    if behind.what == "epoch":
        title = f"{who} {'is' if len(guilty) == 1 else 'are'} in another epoch since step {step}"
        cause = (
            f"At step {step}, {told}. Their epochs are not equally long: the data are dealt out "
            "unequally (sampler lengths, filtered samples, `drop_last` on some ranks only), or a "
            "loader was started again earlier. Seeds, schedules and the order of the samples that "
            "follow the epoch are no longer those of the other ranks."
        )
        remedy = (
            "Give every rank the same number of batches an epoch (DistributedSampler with "
            "`drop_last`, or one length agreed on by all), and count epochs by common steps."
        )
    elif behind.what == "steps_skipped" or _one_missing(behind):
        title = f"{who} {verb} skipped other steps than the rest, at step {step}"
        cause = (
            f"At step {step}, {told}: an overflow was seen on some ranks only, and each decided "
            "alone whether to step. What they hold differs by this step."
        )
        remedy = (
            "Reduce `found_inf` over all ranks (MAX) before the decision to skip, or unscale "
            "after the reduction; then broadcast parameters and optimizer state."
        )
    else:
        title = f"{who} {verb} taken another number of steps at step {step}"
        cause = (
            f"At step {step}, {told}: a rank was resumed from another checkpoint, took further "
            "steps, or left some out."
        )
        remedy = (
            "Restore the same checkpoint, its step and its optimizer on every rank, and call "
            "`optimizer.step()` under the same conditions everywhere."
        )
    if not behind.decided:
        title = title.replace("another", "different").replace(
            "other steps than the rest", "different steps"
        )
    return Finding(
        kind="desync.progress",
        key="epoch" if behind.what == "epoch" else "",
        severity="warning" if behind.what == "epoch" else "critical",
        title=title,
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=step,
        ranks=guilty,
        stage="parameters" if step else "start",
        cause=sentences(cause, _guess(behind)),
        remedy=remedy,
        clear_after=episode.clear_after,
        evidence={
            "what": behind.what,
            "values": {str(r): v for r, v in behind.values.items()},
            "decided": behind.decided,
        },
    )


_SKIPPED = (
    "has skipped a step that they took, for an overflow that it saw alone or under another "
    "condition of its own, and its parameters, schedule and counters are one step behind."
)


def _shift(episode: Episode[Behind]) -> Finding:
    behind, step = episode.facts, episode.first_step
    who = ranks(behind.guilty)
    return Finding(
        kind="desync.progress",
        key="late",
        severity="critical",
        title=f"{who.capitalize()} did not take step {step}, which the others took",
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=step,
        ranks=behind.guilty,
        stage="parameters",
        cause=(
            f"Since step {step}, {who} applies at each step the gradient that the others apply "
            f"one step later: it {_SKIPPED}"
            if behind.what == "grad_norm"
            else f"Before its step {step}, {who} computed a gradient and threw it away, the others "
            f"did not, and the ranks are no longer equal since: it {_SKIPPED}"
        ),
        remedy=(
            "Decide on all ranks together whether a step is skipped (reduce `found_inf` with MAX "
            "before the decision), then broadcast parameters and optimizer state, or restart from "
            f"a checkpoint before step {step}."
        ),
        clear_after=episode.clear_after,
        evidence={
            "what": behind.what,
            "values": {str(r): v for r, v in behind.values.items()},
            "decided": True,
            "observed": episode.seen,
        },
    )


def _apart(behind: Behind, step: int, last_step: int) -> Finding:
    who = ranks(behind.guilty).capitalize()
    begun = "began" if behind.decided else "began each"
    return Finding(
        kind="desync.progress",
        key="begin",
        severity="critical",
        title=f"{who} {begun} at another step than the rest",
        seen_step=step,
        last_step=max(step, last_step),
        first_step=step,
        ranks=behind.guilty,
        stage="start",
        cause=sentences(
            f"The ranks did not begin at the same step: {_told(behind, 'step')}. The checkpoint "
            "was found on some ranks only, or they resumed from different ones: schedules, seeds "
            "and save points disagree.",
            _guess(behind),
        ),
        remedy=(
            "Decide on one rank which checkpoint is loaded and broadcast that decision, or put "
            "checkpoints where all nodes can read them."
        ),
        clear_after=0,
        evidence={
            "what": "begin",
            "values": {str(r): v for r, v in behind.values.items()},
            "decided": behind.decided,
        },
    )


def _told(behind: Behind, what: str) -> str:
    by_value: dict[float, list[int]] = {}
    for rank, value in behind.values.items():
        by_value.setdefault(value, []).append(rank)
    said = []
    for value, held in sorted(by_value.items(), key=lambda item: len(item[1])):
        verb = "has" if len(held) == 1 else "have"
        if what == "step":
            said.append(f"{ranks(held)} at step {value:,.0f}")
        elif what == "epochs":
            said.append(f"{ranks(held)} {'is' if len(held) == 1 else 'are'} in epoch {value:,.0f}")
        else:
            said.append(f"{ranks(held)} {verb} {value:,.0f} {what}")
    return listing(said, most=4)


def _one_missing(behind: Behind) -> bool:
    """Whether they were level at the step before, and differ by one now."""
    return (
        len(set(behind.before.values())) == 1
        and max(behind.values.values()) - min(behind.values.values()) == 1
    )


def _guess(behind: Behind) -> str:
    if behind.decided:
        return ""
    if len(behind.values) == 2:
        return "With two ranks, nothing tells which one is wrong."
    return "No value is that of most ranks, so nothing tells which ones are wrong."


def _check(window: Window, state: ProgressState) -> Check:
    episode = state.watch.open(window.last_step)
    if state.begin is not None:
        return Check(Status.OPEN, f"{_apart(state.begin, state.begin_step, 0).title}.")
    if episode is not None:
        return Check(Status.OPEN, f"{_finding(episode).title}.")
    apart = state.epochs.open(window.last_step)
    if apart is not None:
        return Check(Status.OPEN, f"{_finding(apart).title}.")
    late = state.shifted.open(window.last_step)
    if late is not None:
        return Check(Status.OPEN, f"{_shift(late).title}.")
    if not state.judged:
        if state.steps < _GRACE:
            return Check(Status.INSUFFICIENT_DATA, "No counters have been compared yet.")
        return Check(Status.MISSING_INPUT, "No two replicas post optimizer_steps.")
    return Check(
        Status.OK, f"All ranks had taken the same steps at {count(state.judged, 'checked step')}."
    )
