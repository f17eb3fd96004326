"""Ranks that wait for their data."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.wording import agree, count, duration, percent, ranks
from rankscope.server.detectors.rank.findings import finding_of_jitter, finding_of_late
from rankscope.server.detectors.rank.jitter import Jittering
from rankscope.server.detectors.rank.lateness import (
    QUEUEING,
    Late,
    Lateness,
    LatenessPolicy,
    Timed,
    TimingSample,
    rows_of_hosts,
    timed,
    without_queueing,
)
from rankscope.server.detectors.rank.rounds import NAMES, Rounds
from rankscope.server.window import Bool, Check, Window

_RECEIVED = "input_received"
_NAMES = ("step_seconds", "data_seconds", _RECEIVED, *QUEUEING)


@dataclass(slots=True)
class StarvedState:
    """What is remembered.

    Attributes:
        loads: whether a rank was seen whose model is given data, and not what it has received.
    """

    lateness: Lateness
    loads: bool = False
    rounds: Rounds = field(default_factory=Rounds)


class RankStarved(Detector[StarvedState]):
    """A rank waits for its data longer than the others, and they wait for it.

    Statistic:
        `data_seconds`, the time from the end of a step to the next forward pass, at steps at which
        at least two ranks report it. A rank is starved where it comes more than 5 ms and 20 % of
        the step behind the median of the ranks (of two in the middle the faster one) at 90 % of the
        steps of the last 20, or of the last 8 that show it where these are more; what it waited for
        a processor longer than the median of the ranks on its machine (`queued_seconds`) does not
        count, nor do steps at which half of the others were not idle for as long. 8 without, and 20
        steps, and it is over. The onset is where the steps became longer (change point of the
        logarithm, least squares). The same now and then (key `jitter`) as in `rank.straggler`.
        Ranks whose model is given what another rank has computed (`input_received`: later stages of
        a pipeline) wait for that rank and are left out, where others read data.
        Steps before which ranks that train for themselves average their parameters are left out:
        whoever comes first waits there for the others. Where there are such averages
        `rank.straggler` alone has who is late now and then.

    Severity:
        Warning; critical where more than half of the step goes into it. Now and then: info where
        it costs less than 20 % of the time.

    Evidence:
        `data_seconds`, `others_seconds`, `step_seconds`, `step_seconds_before`, `lost_share` (of
        the step, that the others wait), `looks`; now and then: `late_seconds`, `step_seconds`,
        `lost_share`, `times` of `samples`.

    Source:
        Loaders are one of the causes of fail-slow ranks in XPUTimer (arXiv 2502.05413).
    """

    kinds = ("rank.starved",)
    needs = ("data_seconds",)
    wants = (*NAMES, _RECEIVED)
    min_ranks = 2

    policy: LatenessPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """As many times as the median is of."""
        return (Reach(self.needs, 8, TO_THE_END),)

    def start(self) -> StarvedState:
        """Nothing timed yet."""
        return StarvedState(Lateness(self.policy))

    def advance(self, window: Window, state: StarvedState) -> Outcome:
        """Goes through the steps that were timed."""
        lateness = state.lateness
        hosts = rows_of_hosts(window)
        block = timed(window, _NAMES)
        took = without_queueing(hosts, block.series["data_seconds"], block.series["queued_seconds"])
        reported = self._of_data(state, block)
        late = lateness.late(
            window.ranks, np.where(reported, took, np.nan), block.lengths, block.idle
        )
        # Who comes first to an average waits longest there, and not for data.
        averaged = state.rounds.averaged(window, block)
        judged = (reported.sum(axis=1) > 1) & (block.lengths > 0) & ~averaged
        columns = (block.steps, block.lengths, block.lengths_alone, judged)
        for n, (step, length, alone, usable) in enumerate(
            zip(*(c.tolist() for c in columns), strict=True)
        ):
            lateness.times.push(step, alone)
            if usable:
                there = reported[n]
                lateness.observe(
                    TimingSample(step, window.ranks[there], took[n][there], late[n], length)
                )
        findings = [_finding(late) for late in lateness.take()]
        now_and_then = [_jittering(late, self.policy) for late in lateness.now_and_then()]
        if not state.rounds.met:
            # Between averages nobody waits for a rank that is late once: `rank.straggler` has them.
            findings += now_and_then
        return Outcome({"rank.starved": _check(state)}, tuple(findings))

    def _of_data(self, state: StarvedState, block: Timed) -> Bool:
        """Which ranks' times are a wait for data, bool [N, R].

        Where all models are given inputs whose gradients are wanted, these are no stages of a
        pipeline: somebody has to read the data.
        """
        reported: Bool = np.isfinite(block.series["data_seconds"])
        read: Bool = reported & ~(block.series[_RECEIVED] > 0)
        known = state.loads | np.logical_or.accumulate(read.any(axis=1))
        state.loads = bool(known[-1]) if len(known) else state.loads
        return np.where(known[:, None], read, reported)


def _finding(late: Late) -> Finding:
    who, step = ranks(late.ranks), late.first_step
    verb = agree(len(late.ranks), "waits")
    return finding_of_late(
        late,
        own="data_seconds",
        kind="rank.starved",
        title=f"{who.capitalize()} {verb} for data {percent(late.lost)} of every step since "
        f"step {step}",
        cause=(
            f"Between two steps, before the forward pass, {who} {verb} {duration(late.own)}, the "
            f"others {duration(late.others)}: the loader gives the next batch too late, or the "
            f"rank does something else there (saving, logging). The others wait for it in the "
            f"reduction; a step takes {duration(late.step_seconds)}."
        ),
        remedy=(
            f"Look at the loader of {who}: the number of its workers, its disk or mount, the "
            "shard it reads, decoding and augmentation; prefetch more. If its data are as quick "
            "as the others', look at what else its trainer does between two steps."
        ),
    )


def _jittering(late: Jittering, policy: LatenessPolicy) -> Finding:
    who, step = f"rank {late.rank}", late.first_step
    of = f"{late.times} of {count(late.samples, 'step')}"
    return finding_of_jitter(
        late,
        policy,
        kind="rank.starved",
        title=f"Rank {late.rank} begins a step {duration(late.late_seconds)} late now and then "
        f"since step {step}: {of}",
        cause=(
            f"At {of}, {who} came to its forward pass {duration(late.late_seconds)} after the "
            f"others, and with them in between, where a step takes {duration(late.usual_seconds)}. "
            "Its loader gives some batches too late, or it does something else between two steps "
            f"(saving, logging). The others wait for it: {percent(late.lost)} of the last steps' "
            "time. No other rank is late so often."
        ),
        remedy=(
            f"Look at what {who} does between two steps at some steps only: saving, logging, a "
            "loader whose workers begin anew, a file that is far away; save in the background, "
            "prefetch more."
        ),
    )


def _check(state: StarvedState) -> Check:
    lateness = state.lateness
    if lateness.judged < lateness.policy.looks:
        return Check.insufficient(
            f"{count(lateness.judged, 'step')} of {lateness.policy.looks} with two ranks' times."
        )
    return Check.ok(
        f"How long ranks wait for data was compared at {count(lateness.judged, 'step')}."
    )
