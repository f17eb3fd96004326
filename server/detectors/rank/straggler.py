"""Ranks that keep the others waiting, and collectives that are slow for all of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.incident import Incident
from rankscope.server.detectors.policy import (
    Count,
    Observations,
    Policy,
    Seconds,
    Share,
    Steps,
    Times,
)
from rankscope.server.detectors.rank.jitter import Jittering
from rankscope.server.detectors.rank.lateness import (
    QUEUEING,
    Late,
    Lateness,
    LatenessPolicy,
    Timed,
    TimingSample,
    medians,
    rows_of_hosts,
    timed,
    without_queueing,
)
from rankscope.server.detectors.rank.rounds import NAMES as OF_ROUNDS
from rankscope.server.detectors.rank.rounds import Rounds
from rankscope.server.detectors.statistics import Spacing
from rankscope.server.detectors.walking import median
from rankscope.server.detectors.wording import agree, count, duration, number, percent, ranks
from rankscope.server.window import Check, Status, Window

_GRACE = 20
_WHY_LATE = (
    "Look at what {who} does between two averages and the others do not: loading, logging, checks "
    "or saving under `if rank == ...`, longer batches. Look at its machine, too: another job on "
    "it, a throttled device, fewer cores."
)
_NAMES = ("step_seconds", "compute_seconds", "wait_seconds", "data_seconds", *QUEUEING)


@dataclass(frozen=True, slots=True)
class StragglerPolicy(LatenessPolicy):
    """When a rank is late, and when the collectives themselves are slow.

    When a rank counts as late is in `LatenessPolicy`, which `rank.starved` shares: a threshold of
    this kind alone overrides it here.

    Attributes:
        collective_skipped: samples at the beginning that are not counted: connections are made
            there.
        collective_usual: smallest number of samples that show what is usual.
        collective_factor: time of the collectives over the usual one, from which on it is reported.
        collective_own: largest growth of the ranks' own time meanwhile: where that grows too, the
            machine is busy.
        collective_queued: additional time over what ranks wait for a processor meanwhile, at the
            least: the threads that reduce wait for theirs as well.
        collective_least_seconds: smallest additional time.
        collective_least_share: smallest additional time as a share of the step.
        collective_looks: consecutive samples that have to exceed the limits.
        collective_steps: smallest number of steps over which these samples extend.
        collective_calm: samples without it after which it is over.
    """

    collective_skipped: Count = 2
    collective_usual: Observations = 5
    collective_factor: Times = 2.0
    collective_own: Times = 1.5
    collective_queued: Times = 2.0
    collective_least_seconds: Seconds = 0.01
    collective_least_share: Share = 0.3
    collective_looks: Observations = 8
    collective_steps: Steps = 20
    collective_calm: Observations = 8


@dataclass(slots=True, kw_only=True)
class _Slow(Incident):
    """Collectives that are slow.

    Attributes:
        usual, now: seconds that the last rank to arrive waits: median before, and since then.
        step_seconds: median length of a step since then.
    """

    usual: float
    now: float
    step_seconds: float


@dataclass(slots=True)
class _Collectives:
    """How long the reduction takes once all ranks are there, sample by sample.

    Attributes:
        tensors: number that is reduced; where another number is, nothing is usual yet.
    """

    tensors: int = 0
    samples: int = 0
    usual: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=64))
    slow: list[tuple[int, float, float, float, float]] = field(default_factory=list)
    quiet: int = -1
    spacing: Spacing = field(default_factory=Spacing)
    current: _Slow | None = None
    ended: list[_Slow] = field(default_factory=list)

    def reduces(self, tensors: int) -> None:
        """So many tensors are reduced: more of them take longer."""
        if self.tensors not in (0, tensors):
            self.samples = 0
            self.usual.clear()
            self.slow.clear()
        self.tensors = tensors


@dataclass(slots=True)
class StragglerState:
    """What is remembered."""

    lateness: Lateness
    by_round: Lateness
    rounds: Rounds = field(default_factory=Rounds)
    collectives: _Collectives = field(default_factory=_Collectives)
    steps: int = 0
    timed: int = 0


class RankStraggler(Detector[StragglerState]):
    """A rank computes longer than the others, which wait for it; or the collectives are slow.

    In a synchronous job every rank's step is as long as that of the slowest one: the straggler is
    not the one with the longest step but the one that waits least. Where all wait alike and longer
    than before, no rank is to blame: that is `collective.slow`.

    Statistic:
        What a rank takes for itself: `compute_seconds` minus `wait_seconds`, at steps at which all
        replicas of a class report both. A rank is late by more than 5 ms and 20 % of the step
        behind the median of its class (of two in the middle the faster one). What it waited for a
        processor (`queued_seconds`) longer than the median of the ranks on its machine does not
        count: a machine that has too much to do makes now this one late and now that one. Nor is it
        late by what another rank takes for its data (`data_seconds`) longer than the median: it may
        have waited for that one in its passes, as where buffers are broadcast in the forward pass.
        Nor where half of the others were not idle for as long (`step_seconds` minus
        `processor_seconds` minus `queued_seconds`): nobody waited for it. It is a straggler where
        it was late at 90 % of 8 samples or more, over 20 steps or more, 8 samples without and it is
        over. It jitters (key `jitter`) where it was late by 10 ms and half of a usual step at 5 of
        the last 64 samples, in time in between, and where that is more of all such delays than
        chance gives one rank (binomial, at most 0.001). The onset is where the steps became longer
        (change point of the logarithm, least squares). Collectives: the shortest wait of any rank
        of the class, that of the last to arrive. They are slow at more than twice their lower
        quartile so far, 10 ms and 30 % of the step more than that, at each of 8 consecutive samples
        over 20 steps or more (a busy machine lets some through), while what the ranks take for
        themselves is less than 1.5 times what it was, and what one of them waits for a processor is
        less than half of what is more. Where another number of tensors is reduced (layers that are
        trained from there on), what is usual is learned anew.

        Rounds: ranks that train for themselves between averages of their parameters (seen to differ
        in between, and to write them before a step) wait for the last one in the averaging, within
        the next step's `data_seconds`. What a rank takes for itself is there the time from one
        average to the next without what it waited beyond what it usually needs for data, and
        without what it waited for a processor longer than the median. Late (key `rounds`), or now
        and then (key `jitter`), is who comes after the others by the same limits, a round in place
        of a step.

    Severity:
        Warning; a straggler for which more than half of the step is waited is critical. One that
        jitters is info where it costs less than 20 % of the time.

    Evidence:
        Straggler: `own_seconds`, `others_seconds`, `step_seconds`, `step_seconds_before`,
        `lost_share` (of the step, that the others wait), `looks`; one that jitters: `late_seconds`,
        `step_seconds`, `lost_share`, `times` of `samples`. Collectives: `usual_seconds`,
        `seconds`, `step_seconds`.

    Source:
        Greyhound (ATC'25): fail-slow of ranks and of links; NVIDIA's resiliency extension takes a
        rank for a straggler at 75 % of the others' speed, a third more time than they take.
    """

    kinds: ClassVar[tuple[str, ...]] = ("rank.straggler", "collective.slow")
    wants: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys((*_NAMES, *OF_ROUNDS)))
    min_ranks: ClassVar[int] = 2

    policies: ClassVar[type[Policy]] = StragglerPolicy
    policy: StragglerPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """As many times as the median is of."""
        return (Reach(("wait_seconds", "compute_seconds"), 8, TO_THE_END),)

    def start(self) -> StragglerState:
        """Nothing timed yet."""
        return StragglerState(Lateness(self.policy), Lateness(self.policy))

    def advance(self, window: Window, state: StragglerState) -> Outcome:
        """Goes through the steps that were timed."""
        state.steps += len(window.steps)
        columns = [np.flatnonzero(np.isin(window.ranks, c)) for c in window.data_parallel]
        columns = [rows for rows in columns if len(rows) > 1]
        hosts = rows_of_hosts(window)
        block = timed(window, _NAMES)
        own = block.series["compute_seconds"] - block.series["wait_seconds"]
        # Of a class that is not whole nobody knows who is the slowest.
        known = np.full(own.shape, np.nan)
        late: list[Mapping[int, float]] = [{}] * len(own)
        shortest = np.full(len(own), -np.inf)
        fair = without_queueing(hosts, own, block.series["queued_seconds"])
        for rows in columns:
            whole = np.logical_and.reduce(np.isfinite(own[:, rows]), axis=1)
            part = np.where(whole[:, None], fair[:, rows], np.nan)
            # All begin a step together: who computes for longer by no more than another one has
            # taken for its data may have waited for that one inside its passes.
            data = np.sort(np.nan_to_num(block.series["data_seconds"][:, rows]), axis=1)
            found = state.lateness.late(
                window.ranks[rows],
                part,
                block.lengths,
                block.idle[:, rows],
                data[:, -1] - data[:, (len(rows) - 1) // 2],
            )
            late = [{**before, **more} for before, more in zip(late, found, strict=True)]
            known[np.ix_(whole, rows)] = own[np.ix_(whole, rows)]
            waits = block.series["wait_seconds"][:, rows].min(axis=1)
            # The last to arrive waits for the reduction alone.
            shortest = np.where(whole, np.fmax(shortest, waits), shortest)
        there, took = np.isfinite(known), medians(known)
        queued = np.nan_to_num(block.series["queued_seconds"]).max(axis=1, initial=0.0)
        judged = there.any(axis=1) & (block.lengths > 0)
        reported = (
            *(block.steps, block.lengths, block.lengths_alone),
            *(shortest, took, queued, judged),
        )
        reductions = deque(window.reductions)
        for n, (step, length, alone, least, middle, lost, usable) in enumerate(
            zip(*(c.tolist() for c in reported), strict=True)
        ):
            while reductions and reductions[0].step <= step:
                state.collectives.reduces(reductions.popleft().tensor_count)
            state.timed += 1
            state.lateness.times.push(step, alone)
            if usable:
                who = window.ranks[there[n]]
                state.lateness.observe(TimingSample(step, who, fair[n][there[n]], late[n], length))
                self._reduced(state, step, least, middle, length, lost)
        findings = [_straggling(late) for late in state.lateness.take()]
        findings += [_jittering(late, self.policy) for late in state.lateness.now_and_then()]
        findings += self._by_round(window, state, block)
        slow = state.collectives
        findings += [_slow(incident) for incident in slow.ended]
        slow.ended = []
        if slow.current is not None:
            findings.append(_slow(slow.current))
        return Outcome(self._checks(state, window), tuple(findings))

    def _by_round(self, window: Window, state: StragglerState, block: Timed) -> list[Finding]:
        """Who comes late to the averages of ranks that train for themselves in between."""
        lateness = state.by_round
        averaged = state.rounds.averaged(window, block)
        for sample in state.rounds.take(window.ranks, block, averaged):
            unknown = np.full((1, len(sample.ranks)), np.nan)
            length = np.array([sample.step_seconds])
            late = lateness.late(sample.ranks, sample.took[None], length, unknown)
            lateness.times.push(sample.step, sample.step_seconds)
            lateness.observe(replace(sample, late=late[0]))
        found = [_late_to_rounds(late) for late in lateness.take()]
        return found + [_late_to_some(late, self.policy) for late in lateness.now_and_then()]

    def _reduced(
        self,
        reported: StragglerState,
        step: int,
        seconds: float,
        own: float,
        length: float,
        queued: float,
    ) -> None:
        policy, state = self.policy, reported.collectives
        state.samples += 1
        state.spacing.push(step)
        if state.samples <= policy.collective_skipped:
            return
        current = state.current
        if current is not None and current.over(step):
            state.ended.append(current)
            state.current = current = None
        usual = math.nan
        if len(state.usual) >= policy.collective_usual:
            # What a busy machine does to single steps is in the upper half.
            usual = _lower_quartile([took for took, _ in state.usual])
        least = max(policy.collective_least_seconds, policy.collective_least_share * length)
        if not (seconds > policy.collective_factor * usual and seconds - usual > least):
            state.usual.append((seconds, own))
            state.slow.clear()
            state.quiet = step
            return
        state.slow = [*state.slow, (step, seconds, own, length, queued)][
            -max(policy.collective_looks, policy.collective_steps) :
        ]
        first = state.slow[0][0]
        if current is None:
            if (
                len(state.slow) < policy.collective_looks
                or step - first < policy.collective_steps - 1
            ):
                return
            _, took, own_times, _, waited = zip(*state.slow, strict=True)
            if median(own_times) > policy.collective_own * median([o for _, o in state.usual]):
                return
            if median(took) - usual < policy.collective_queued * median(waited):
                return
            # A sample alone may have been slow long before.
            onset = reported.lateness.times.rise(state.quiet, step)
            current = state.current = _Slow(
                first_step=first if onset is None else onset,
                seen_step=step,
                last_step=step,
                clear_after=0,
                usual=usual,
                now=seconds,
                step_seconds=length,
            )
        current.last_step = step
        current.clear_after = max(
            state.spacing.steps(policy.collective_calm), policy.collective_steps
        )
        current.now = median([took for _, took, _, _, _ in state.slow])
        current.step_seconds = median([length for _, _, _, length, _ in state.slow])

    def _checks(self, state: StragglerState, window: Window) -> dict[str, Check]:
        late, jitter = state.lateness.current, state.lateness.jitter.current
        rounds = state.by_round.current
        if not state.lateness.judged and state.by_round.judged:
            some = state.by_round.jitter.current
            if rounds is not None and not rounds.over(window.last_step):
                straggler = _check(state, window, rounds, _late_to_rounds)
            else:
                to_some = partial(_late_to_some, policy=self.policy)
                straggler = _check(state, window, some, to_some)
        elif late is None or late.over(window.last_step):
            straggler = _check(state, window, jitter, partial(_jittering, policy=self.policy))
        else:
            straggler = _check(state, window, late, _straggling)
        return {
            "rank.straggler": straggler,
            "collective.slow": _check(state, window, state.collectives.current, _slow),
        }


def _lower_quartile(values: Sequence[float]) -> float:
    """Interpolated, as numpy's; of some dozens several times as fast."""
    ordered = sorted(values)
    place = (len(ordered) - 1) / 4
    low = ordered[int(place)]
    return low + (ordered[min(int(place) + 1, len(ordered) - 1)] - low) * (place % 1)


def _straggling(late: Late) -> Finding:
    who, step = ranks(late.ranks), late.first_step
    verb = agree(len(late.ranks), "takes")
    before = ""
    if late.before < 0.8 * late.step_seconds:
        before = (
            f" Before step {step} a step took {duration(late.before)}, now it is "
            f"{duration(late.step_seconds)}."
        )
    return Finding(
        kind="rank.straggler",
        severity="critical" if late.lost > 0.5 else "warning",
        title=f"{who.capitalize()} {verb} {number(late.own / max(late.others, 1e-9))} times as "
        f"long as the others since step {step}",
        seen_step=late.seen_step,
        last_step=late.last_step,
        first_step=step,
        ranks=late.ranks,
        cause=(
            f"{who.capitalize()} {verb} {duration(late.own)} for the forward and backward pass of "
            f"a step, loading left out, the others {duration(late.others)}; then they wait, for "
            f"{percent(late.lost)} of every step.{before}"
        ),
        remedy=(
            f"Profile a step of {who}: longer batches than elsewhere, logging, checks or saving "
            f"under `if rank == ...`. Look at the machine of {who}, too: another job on it, a "
            "throttled or faulty device, fewer cores or threads, a slow memory or bus."
        ),
        clear_after=late.clear_after,
        evidence={
            "own_seconds": late.own,
            "others_seconds": late.others,
            **late.evidence(),
        },
    )


def _slow(incident: _Slow) -> Finding:
    step = incident.first_step
    times = number(incident.now / incident.usual)
    return Finding(
        kind="collective.slow",
        severity="warning",
        title=f"Collectives take {times} times as long on every rank since step {step}",
        seen_step=incident.seen_step,
        last_step=incident.last_step,
        first_step=step,
        cause=(
            f"Once all ranks have their gradients, the reduction takes {duration(incident.now)} of "
            f"a step of {duration(incident.step_seconds)}, and took {duration(incident.usual)} "
            "before. All ranks wait alike: no rank computes longer than the others, what lies "
            "between them is slow."
        ),
        remedy=(
            "Look at the network: a link that fell back to a lower rate or loses packets, another "
            "job's traffic, an interface other than the one meant (`NCCL_SOCKET_IFNAME`, "
            "`GLOO_SOCKET_IFNAME`); or what runs between the last gradient and the step."
        ),
        clear_after=incident.clear_after,
        evidence={
            "usual_seconds": incident.usual,
            "seconds": incident.now,
            "step_seconds": incident.step_seconds,
        },
    )


def _jittering(late: Jittering, policy: StragglerPolicy) -> Finding:
    who, step = f"rank {late.rank}", late.first_step
    of = f"{late.times} of {count(late.samples, 'step')}"
    return Finding(
        kind="rank.straggler",
        key="jitter",
        severity="warning" if late.lost >= policy.jitter_lost else "info",
        title=f"Rank {late.rank} is late by {duration(late.late_seconds)} now and then since step "
        f"{step}: at {of}",
        seen_step=late.seen_step,
        last_step=late.last_step,
        first_step=step,
        ranks=(late.rank,),
        cause=(
            f"At {of} the forward and backward pass of {who}, loading left out, took "
            f"{duration(late.late_seconds)} longer than the others', and as long as theirs in "
            f"between, where a step takes {duration(late.usual_seconds)}. The others wait for it: "
            f"{percent(late.lost)} of the last steps' time. No other rank is late so often."
        ),
        remedy=(
            f"Look at what {who} does at some steps only: logging, checks or saving under "
            "`if rank == ...` within the passes, batches of very different lengths, garbage "
            f"collection, memory that is given back and asked for again. Look at the machine of "
            f"{who}, too: a device that throttles, another job that wakes up now and then."
        ),
        clear_after=late.clear_after,
        evidence=late.evidence(),
    )


def _late_to_rounds(late: Late) -> Finding:
    """Of ranks that are late to each average."""
    who, step = ranks(late.ranks), late.first_step
    verb, comes = agree(len(late.ranks), "takes"), agree(len(late.ranks), "comes")
    return Finding(
        kind="rank.straggler",
        key="rounds",
        severity="critical" if late.lost > 0.5 else "warning",
        title=f"{who.capitalize()} {comes} last to the averages since step {step}: the others wait "
        f"{percent(late.lost)} of the time",
        seen_step=late.seen_step,
        last_step=late.last_step,
        first_step=step,
        ranks=late.ranks,
        cause=(
            f"Between two averages of the parameters {who} {verb} {duration(late.own)}, the others "
            f"{duration(late.others)}; then they wait in the averaging, for "
            f"{percent(late.lost)} of the time."
        ),
        remedy=_WHY_LATE.format(who=who),
        clear_after=late.clear_after,
        evidence={
            "own_seconds": late.own,
            "others_seconds": late.others,
            **late.evidence(),
        },
    )


def _late_to_some(late: Jittering, policy: StragglerPolicy) -> Finding:
    """Of one that is late to an average now and then."""
    who, step = f"rank {late.rank}", late.first_step
    of = f"{late.times} of {count(late.samples, 'round')}"
    return Finding(
        kind="rank.straggler",
        key="jitter",
        severity="warning" if late.lost >= policy.jitter_lost else "info",
        title=f"Rank {late.rank} comes {duration(late.late_seconds)} late to averages now and then "
        f"since step {step}: to {of}",
        seen_step=late.seen_step,
        last_step=late.last_step,
        first_step=step,
        ranks=(late.rank,),
        cause=(
            f"To {of} {who} came {duration(late.late_seconds)} after the others, and with them in "
            f"between, where it is {duration(late.usual_seconds)} from one average of the "
            "parameters to the next. The others wait for it in the averaging: "
            f"{percent(late.lost)} of the last rounds' time. No other rank is late so often."
        ),
        remedy=_WHY_LATE.format(who=who),
        clear_after=late.clear_after,
        evidence=late.evidence(),
    )


def _check(
    state: StragglerState,
    window: Window,
    incident: Incident | None,
    finding: Callable[..., Finding],
) -> Check:
    if incident is not None and not incident.over(window.last_step):
        return Check(Status.OPEN, f"{finding(incident).title}.")
    judged, rounds = state.lateness.judged, state.by_round.judged
    if rounds >= 8 and not judged:
        return Check(
            Status.OK,
            f"How late each rank came to an average was compared at {count(rounds, 'round')}.",
        )
    if judged >= 8:
        return Check(
            Status.OK,
            f"How long each rank takes for itself was compared at {count(judged, 'step')}.",
        )
    if judged or state.steps < _GRACE:
        return Check(
            Status.INSUFFICIENT_DATA, f"{count(judged, 'step')} of 8 with the times of all ranks."
        )
    return Check(
        Status.MISSING_INPUT,
        "No two replicas report how long they wait for the others (`wait_seconds`): it is known on "
        "CPUs, between the last gradient and the optimizer's step.",
    )
