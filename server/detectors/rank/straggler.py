"""Ranks that keep the others waiting, and collectives that are slow for all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    duration,
    number,
    percent,
    ranks,
)
from rankscope.server.detectors.rank.collectives import (
    Collectives,
    CollectivesPolicy,
    Reduced,
    finding_of_slow,
)
from rankscope.server.detectors.rank.findings import finding_of_jitter, finding_of_late
from rankscope.server.detectors.rank.gpus import NAMES as OF_GPUS
from rankscope.server.detectors.rank.gpus import Gpus
from rankscope.server.detectors.rank.jitter import Jittering
from rankscope.server.detectors.rank.lateness import (
    QUEUEING,
    Late,
    Lateness,
    Timed,
    TimingSample,
    medians,
    rows_of_hosts,
    timed,
    without_queueing,
)
from rankscope.server.detectors.rank.rounds import NAMES as OF_ROUNDS
from rankscope.server.detectors.rank.rounds import Rounds
from rankscope.server.window import Check, Window

_WHY_LATE = (
    "Look at what {who} does between two averages and the others do not: loading, logging, checks "
    "or saving under `if rank == ...`, longer batches. Look at its machine, too: another job on "
    "it, a throttled device, fewer cores."
)
_NAMES = ("step_seconds", "compute_seconds", "wait_seconds", "data_seconds", *QUEUEING)
# Share of a step that a rank waits for a processor, from which on its machine is crowded.
_CROWDED = 0.1


@dataclass(frozen=True, slots=True)
class StragglerPolicy(CollectivesPolicy):
    """When a rank is late, and when the collectives themselves are slow.

    When a rank counts as late is in `LatenessPolicy`, which `rank.starved` shares: a threshold of
    this kind alone overrides it here.
    """


@dataclass(slots=True)
class StragglerState:
    """What is remembered."""

    lateness: Lateness
    by_round: Lateness
    rounds: Rounds = field(default_factory=Rounds)
    collectives: Collectives = field(default_factory=Collectives)
    gpus: Gpus = field(default_factory=Gpus)
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
        less than half of what is more and less than a third of the time for which it has one. Where
        another number of tensors is reduced (layers that are
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
        `step_seconds`, `lost_share`, `times` of `samples`. Both, where NVML is read: `gpus`, for
        each of the ranks the last reading and what its GPU throttled for at more than half of the
        last 16 readings; the cause says so. Collectives: `usual_seconds`, `seconds`,
        `step_seconds`.

    Source:
        Greyhound (ATC'25): fail-slow of ranks and of links; NVIDIA's resiliency extension takes a
        rank for a straggler at 75 % of the others' speed, a third more time than they take.
    """

    kinds = ("rank.straggler", "collective.slow")
    wants = tuple(dict.fromkeys((*_NAMES, *OF_ROUNDS, *OF_GPUS)))
    min_ranks = 2

    policy: StragglerPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """As many times as the median is of."""
        return (Reach(("wait_seconds", "compute_seconds"), 8, TO_THE_END),)

    def start(self) -> StragglerState:
        """Nothing timed yet."""
        return StragglerState(Lateness(self.policy), Lateness(self.policy))

    def advance(self, window: Window, state: StragglerState) -> Outcome:
        """Goes through the steps that were timed."""
        state.gpus.take(window)
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
        waited, ran = (np.nan_to_num(block.series[name]) for name in QUEUEING)
        queued = waited.max(axis=1, initial=0.0)
        # On a device it is not known for what a thread had a processor.
        crowded = (ran > 0) & (waited > _CROWDED * block.lengths[:, None])
        shares = np.divide(waited, waited + ran, out=np.zeros_like(ran), where=crowded)
        busy = np.median(shares, axis=1)
        judged = there.any(axis=1) & (block.lengths > 0)
        reported = (
            *(block.steps, block.lengths, block.lengths_alone),
            *(shortest, took, queued, busy, judged),
        )
        reductions = deque(window.reductions)
        for n, (step, length, alone, least, middle, lost, contended, usable) in enumerate(
            zip(*(c.tolist() for c in reported), strict=True)
        ):
            while reductions and reductions[0].step <= step:
                state.collectives.reduces(reductions.popleft().tensor_count)
            state.timed += 1
            state.lateness.times.push(step, alone)
            if usable:
                who = window.ranks[there[n]]
                state.lateness.observe(TimingSample(step, who, fair[n][there[n]], late[n], length))
                reduced = Reduced(step, least, middle, length, lost, contended)
                state.collectives.observe(reduced, self.policy, state.lateness.times)
        findings = [_straggling(late) for late in state.lateness.take()]
        findings += [_jittering(late, self.policy) for late in state.lateness.now_and_then()]
        findings += self._by_round(window, state, block)
        findings = [state.gpus.beside(finding) for finding in findings]
        findings += [finding_of_slow(slow) for slow in state.collectives.take()]
        return Outcome(dict.fromkeys(self.kinds, _check(state)), tuple(findings))

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


def _straggling(late: Late) -> Finding:
    who, step = ranks(late.ranks), late.first_step
    verb = agree(len(late.ranks), "takes")
    before = ""
    if late.before < 0.8 * late.step_seconds:
        before = (
            f" Before step {step} a step took {duration(late.before)}, now it is "
            f"{duration(late.step_seconds)}."
        )
    return finding_of_late(
        late,
        kind="rank.straggler",
        own="own_seconds",
        title=f"{who.capitalize()} {verb} {number(late.own / max(late.others, 1e-9))} times as "
        f"long as the others since step {step}",
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
    )


def _jittering(late: Jittering, policy: StragglerPolicy) -> Finding:
    who, of = f"rank {late.rank}", f"{late.times} of {count(late.samples, 'step')}"
    return finding_of_jitter(
        late,
        policy,
        kind="rank.straggler",
        title=f"Rank {late.rank} is late by {duration(late.late_seconds)} now and then since step "
        f"{late.first_step}: at {of}",
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
    )


def _late_to_rounds(late: Late) -> Finding:
    """Of ranks that are late to each average."""
    who, step = ranks(late.ranks), late.first_step
    verb, comes = agree(len(late.ranks), "takes"), agree(len(late.ranks), "comes")
    return finding_of_late(
        late,
        kind="rank.straggler",
        key="rounds",
        own="own_seconds",
        title=f"{who.capitalize()} {comes} last to the averages since step {step}: the others wait "
        f"{percent(late.lost)} of the time",
        cause=(
            f"Between two averages of the parameters {who} {verb} {duration(late.own)}, the others "
            f"{duration(late.others)}; then they wait in the averaging, for "
            f"{percent(late.lost)} of the time."
        ),
        remedy=_WHY_LATE.format(who=who),
    )


def _late_to_some(late: Jittering, policy: StragglerPolicy) -> Finding:
    """Of one that is late to an average now and then."""
    who, of = f"rank {late.rank}", f"{late.times} of {count(late.samples, 'round')}"
    return finding_of_jitter(
        late,
        policy,
        kind="rank.straggler",
        title=f"Rank {late.rank} comes {duration(late.late_seconds)} late to averages now and then "
        f"since step {late.first_step}: to {of}",
        cause=(
            f"To {of} {who} came {duration(late.late_seconds)} after the others, and with them in "
            f"between, where it is {duration(late.usual_seconds)} from one average of the "
            "parameters to the next. The others wait for it in the averaging: "
            f"{percent(late.lost)} of the last rounds' time. No other rank is late so often."
        ),
        remedy=_WHY_LATE.format(who=who),
    )


def _check(
    state: StragglerState,
) -> Check:
    judged, rounds = state.lateness.judged, state.by_round.judged
    if rounds >= 8 and not judged:
        return Check.ok(
            f"How late each rank came to an average was compared at {count(rounds, 'round')}."
        )
    if judged >= 8:
        return Check.ok(
            f"How long each rank takes for itself was compared at {count(judged, 'step')}."
        )
    so_far = f"{count(judged, 'step')} of 8 with the times of all ranks."
    if judged:
        return Check.insufficient(so_far)
    why = (
        "No two replicas report how long they wait for the others (`wait_seconds`): it is known on "
        "CPUs and CUDA, between the last gradient and the optimizer's step."
    )
    return Check.missing(why, early=so_far)
