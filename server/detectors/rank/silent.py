"""A rank of which nothing is heard any more."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.mechanisms.incident import AGREED_UNTIL, Incident
from rankscope.server.detectors.mechanisms.wording import agree, count, listing, ranks
from rankscope.server.detectors.policy import Policy, Seconds, Times
from rankscope.server.window import Check, RankLiveness, Window

# Of the ranks that never came, this many are named.
_MOST_NAMED = 1024


@dataclass(frozen=True, slots=True)
class SilentPolicy(Policy):
    """Thresholds of `rank.silent`, in seconds.

    Attributes:
        min_silence: shortest silence that counts.
        typical_gaps: silence that counts, as a multiple of the rank's usual time between two posts.
        longest_gaps: silence that counts, as a multiple of its longest time between two posts.
        heartbeats: number of missed heartbeats below which no silence counts.
        failed_min: shortest silence that counts after another rank has failed.
        failed_longest_gaps: as `longest_gaps`, after another rank has failed, up to `min_silence`.
        unseen: time in which every rank has to report for the first time.
        critical_after: silence that is critical, as a multiple of that which counts.
        listening: longest time between two evaluations in which the server counts as listening.
    """

    min_silence: Seconds = 30.0
    typical_gaps: Times = 10.0
    longest_gaps: Times = 3.0
    heartbeats: Times = 3.0
    failed_min: Seconds = 5.0
    failed_longest_gaps: Times = 1.5
    unseen: Seconds = 120.0
    critical_after: Times = 10.0
    listening: Seconds = 10.0

    def patience(self, life: RankLiveness) -> float:
        """Seconds without a word from a rank from which on it is silent."""
        return max(
            self.min_silence,
            self.heartbeats * life.heartbeat_seconds,
            self.typical_gaps * life.typical_gap,
            self.longest_gaps * life.longest_gap,
        )


@dataclass(slots=True)
class SilentState:
    """What `rank.silent` remembers.

    Attributes:
        now: time of the last evaluation.
        waited: rank -> its last post, and for how long it has been listened to since.
        waited_for_all: for how long ranks never seen have been waited for.
    """

    now: float | None = None
    waited: dict[int, tuple[float, float]] = field(default_factory=dict)
    waited_for_all: float = 0.0


class RankSilent(Detector[SilentState]):
    """A rank has gone silent while the others go on, wait, or report that they failed.

    The agent's own thread sends heartbeats, so a rank that waits in a collective, evaluates or
    saves a checkpoint is not silent. One that is killed, or whose machine is gone, is. A rank that
    said itself that it finished or failed is never silent, nor is one that was heard of for longer
    than another that failed (its launcher ended it). Ranks that a job was started again without are
    not waited for. Where all ranks fall silent together the job was killed, or the network is gone,
    and all are named, but for one that clearly went before the others: that one is.

    Statistic:
        Silence is counted by the server's clock, only while the server was listening. It counts
        from 30 s, 3 heartbeats, 10 times the rank's usual time between two posts, or 3 times its
        longest, on, whichever is longest. Where another rank reports that it failed (its collective
        broke), 3 missed heartbeats are enough (at least 5 s, and 1.5 times its longest gap up to
        30 s). A rank of the declared world size that was never seen counts after 120 s. It is over
        as soon as the rank is heard of again.

    Severity:
        Warning; critical where another rank's failure confirms it, or after 10 times as long.

    Evidence:
        For each rank `silent_seconds`, `allowed_seconds`, `last_reported_step`, `phase`, `host`;
        `failed_ranks` with their `errors`, `ranks_heard`; `agreed_until`, the last step that all of
        them have reported. What a killed process had not sent is lost: `first_step` follows the
        steps that its peers completed with it, where they reduce gradients at every step.

    Source:
        Heartbeat monitoring as in horovod#370's stall warning; time-outs from the rank's own gaps,
        since 30 minutes (SageMaker `StalledTraining`) is too slow and any fixed figure wrong.
    """

    kinds = ("rank.silent",)
    lasting = "it is judged by when a rank was last heard of, not by what is recorded"

    policy: SilentPolicy

    def advance(self, window: Window, state: SilentState) -> Outcome:
        """Looks at when each rank was last heard of."""
        # Started again with fewer ranks, a job goes on without those that it had before.
        there = tuple(life for life in window.liveness if life.rank < window.world_size)
        window = replace(window, liveness=there)
        self._listen(window, state)
        silent = self._silent(window.liveness, state)
        findings = []
        by_host: dict[str, list[RankLiveness]] = defaultdict(list)
        for life in silent:
            by_host[life.host].append(life)
        for host, liveness in by_host.items():
            findings.append(self._finding(host, liveness, window, state))
        job = () if silent else self._job(window.liveness, state)
        if job:
            findings.append(_job_finding(job, window, state))
        unseen = self._unseen(window, state)
        if unseen:
            findings.append(self._never_seen(unseen, window, state))
        findings.sort(key=lambda f: (f.seen_step, f.ranks))
        gone = (*(life.rank for life in (*silent, *job)), *unseen)
        return Outcome({"rank.silent": self._check(window, gone)}, tuple(findings))

    def _listen(self, window: Window, state: SilentState) -> None:
        # A server that was stopped or busy has heard nobody: only time between evaluations that
        # follow each other closely was spent listening.
        elapsed = 0.0 if state.now is None else window.now - state.now
        elapsed = min(max(elapsed, 0.0), self.policy.listening)
        state.now = window.now
        state.waited_for_all += elapsed
        for life in window.liveness:
            last_seen, waited = state.waited.get(life.rank, (life.last_seen, 0.0))
            if life.last_seen > last_seen:
                waited = min(max(window.now - life.last_seen, 0.0), elapsed)
            else:
                waited += elapsed
            state.waited[life.rank] = life.last_seen, waited

    def _allowed(self, life: RankLiveness, *, failed: bool) -> float:
        policy = self.policy
        if failed:
            return max(
                policy.failed_min,
                policy.heartbeats * life.heartbeat_seconds,
                min(policy.failed_longest_gaps * life.longest_gap, policy.min_silence),
            )
        return policy.patience(life)

    def _silent(self, liveness: Sequence[RankLiveness], state: SilentState) -> list[RankLiveness]:
        failures = [life.last_seen for life in liveness if life.state == "failed"]
        failed, first_failure = bool(failures), min(failures, default=math.inf)
        running = [life for life in liveness if life.state == "running"]
        silent = [
            life
            for life in running
            if state.waited[life.rank][1] > self._allowed(life, failed=failed)
            # What outlived another's failure was not its cause: a launcher ends what is left of a
            # failed job, and a rank that is stuck in a collective cannot say so.
            and life.last_seen <= first_failure + life.heartbeat_seconds
        ]
        if not silent or failed or any(self._heard(life, state) for life in running):
            return silent
        # All of them are: only one that clearly went before the others is to blame.
        newest = max(life.last_seen for life in running)
        return [
            life for life in silent if newest - life.last_seen > self._allowed(life, failed=True)
        ]

    def _job(
        self, liveness: Sequence[RankLiveness], state: SilentState
    ) -> tuple[RankLiveness, ...]:
        """All ranks that have not ended, where they have fallen silent together."""
        if any(life.state == "failed" for life in liveness):
            return ()  # the failure is what there is to show
        running = tuple(life for life in liveness if life.state == "running")
        gone = (state.waited[r.rank][1] > self._allowed(r, failed=False) for r in running)
        return running if all(gone) else ()

    def _heard(self, life: RankLiveness, state: SilentState) -> bool:
        """Whether a rank is heard of as regularly as it should be."""
        allowed = self._allowed(life, failed=True)
        return life.state == "running" and state.waited[life.rank][1] <= allowed

    def _unseen(self, window: Window, state: SilentState) -> tuple[int, ...]:
        if state.waited_for_all <= self.policy.unseen:
            return ()
        if not any(self._heard(life, state) for life in window.liveness):
            return ()
        seen = {life.rank for life in window.liveness}
        # A number of ranks is quickly said: not all that never came are made up to be named.
        numbers = range(min(window.world_size, _MOST_NAMED + len(seen)))
        return tuple(rank for rank in numbers if rank not in seen)[:_MOST_NAMED]

    def _check(self, window: Window, gone: Sequence[int]) -> Check:
        if gone:
            return Check.open(f"Nothing is heard of {ranks(gone)}.")
        if not window.liveness:
            return Check.insufficient("No rank has been heard of yet.")
        missing = window.world_size - len(window.liveness)
        if missing > 0:
            return Check.insufficient(
                f"{count(len(window.liveness), 'rank')} of {window.world_size} have been heard of."
            )
        quiet = [
            life.rank
            for life in window.liveness
            if life.state == "running"
            and window.now - life.last_seen > self._allowed(life, failed=True)
        ]
        if quiet:
            after = " after another rank failed" * any(c.state == "failed" for c in window.liveness)
            return Check.insufficient(
                f"Nothing is heard of {ranks(quiet)}{after} at the moment, and "
                f"{'it has' if len(quiet) == 1 else 'they have'} not reported an end."
            )
        who = "The only rank" if window.world_size == 1 else "Every rank"
        return Check.ok(f"{who} is heard of, or has said itself that it ended.")

    def _finding(
        self, host: str, liveness: Sequence[RankLiveness], window: Window, state: SilentState
    ) -> Finding:
        who = tuple(life.rank for life in liveness)
        failed = [life for life in window.liveness if life.state == "failed"]
        heard = [life.rank for life in window.liveness if self._heard(life, state)]
        allowed = {life.rank: self._allowed(life, failed=bool(failed)) for life in liveness}
        silence = {life.rank: state.waited[life.rank][1] for life in liveness}
        longest = max(silence[rank] / allowed[rank] for rank in who)
        # Its peers cannot have completed a step without it: where one broke, the silent rank had
        # done every step that the broken one had, even if its last report did not get through.
        broke_at = min((life.last_step for life in failed), default=-1)
        reported = min(life.last_step for life in liveness)
        first = max(reported, broke_at) + 1
        named = ranks(who)
        has, it = ("has", "it") if len(who) == 1 else ("have", "they")
        on = f" (host {host})" if host else ""
        phases = sorted({life.phase for life in liveness if life.phase})
        last_seen_in = f" Last seen in phase {listing(phases)}." if phases else ""
        seconds = f"{max(silence.values()):.0f} s"
        if failed:
            errors = sorted({life.error for life in failed if life.error})
            said = f": {errors[0][:200]}" if errors else ""
            cause = (
                f"{ranks([life.rank for life in failed]).capitalize()} failed{said}. "
                f"{named.capitalize()}{on} {has} said nothing for {seconds}, not even that {it} "
                f"failed: killed (out of memory, by the scheduler), or the machine is "
                f"gone.{last_seen_in}"
            )
        elif not heard:
            newest = max(life.last_seen for life in window.liveness if life.state == "running")
            ahead = newest - max(life.last_seen for life in liveness)
            cause = (
                f"{named.capitalize()}{on} fell silent {ahead:.0f} s before the last of the "
                "others did, and no running rank is heard of now: killed first, and the job was "
                f"stopped or hung after it.{last_seen_in}"
            )
        else:
            cause = (
                f"{named.capitalize()}{on} {has} said nothing for {seconds}, while "
                f"{ranks(heard)} {agree(len(heard), 'is')} still heard of. The process "
                "was killed or stopped, or its machine or network is gone; in synchronous training "
                f"the others wait for it in their next collective.{last_seen_in}"
            )
        remedy = (
            f"Look at the exit code and the kernel log of {named}{on} (out of memory, device "
            f"errors), then restart from the last checkpoint before step {first}."
        )
        return Incident.since(first, window.last_step).finding(
            kind="rank.silent",
            key=f"host:{host}",
            severity="critical" if failed or longest >= self.policy.critical_after else "warning",
            title=f"{named.capitalize()} {has} gone silent, last complete step {first - 1}",
            ranks=who,
            cause=cause,
            remedy=remedy,
            evidence={
                "silent_seconds": {str(rank): round(silence[rank], 1) for rank in who},
                "allowed_seconds": {str(rank): round(allowed[rank], 1) for rank in who},
                "last_reported_step": {str(life.rank): life.last_step for life in liveness},
                "phase": {str(life.rank): life.phase for life in liveness},
                "host": host,
                "failed_ranks": [life.rank for life in failed],
                "errors": sorted({life.error for life in failed if life.error})[:3],
                "ranks_heard": heard,
                AGREED_UNTIL: reported,
            },
        )

    def _never_seen(self, unseen: tuple[int, ...], window: Window, state: SilentState) -> Finding:
        missing = window.world_size - len(window.liveness)
        named = ranks(unseen) if missing <= len(unseen) else f"{missing:,} ranks"
        seen = [life.rank for life in window.liveness]
        return Incident.since(0, window.last_step).finding(
            kind="rank.silent",
            key="unseen",
            severity="warning",
            title=f"{named.capitalize()} of {window.world_size} never reported",
            ranks=unseen,
            cause=(
                f"The job declares {window.world_size} ranks; {ranks(seen)} reported, and "
                f"{state.waited_for_all:.0f} s later {named} did not. Either the process did not "
                "start, or it does not call `attach`, or it cannot reach the server, or it is "
                "part of another run id."
            ),
            remedy=(
                "Call `agent.attach` on every rank, not on rank 0 only. If it is, look at the "
                f"output of {named} for a warning of the agent, and check that RANKSCOPE_SERVER "
                "can be reached from there and that RANKSCOPE_RUN is the same."
            ),
            evidence={
                "waited_seconds": round(state.waited_for_all, 1),
                "ranks_heard": seen,
                "world_size": window.world_size,
            },
        )


def _job_finding(liveness: Sequence[RankLiveness], window: Window, state: SilentState) -> Finding:
    """All ranks that had not ended are gone together."""
    who = tuple(life.rank for life in liveness)
    reported = min(life.last_step for life in liveness)
    # What a killed process had not sent is lost. Where gradients are reduced at every step, its
    # peers complete none without it: it had done what all of them had.
    ended = [life.last_step for life in window.liveness if life.state == "finished"]
    together = min(ended, default=-1) if window.config.get("data_parallel") else -1
    first = max(reported, together) + 1
    silence = {life.rank: state.waited[life.rank][1] for life in liveness}
    seen = [life.last_seen for life in liveness]
    phases = sorted({life.phase for life in liveness if life.phase})
    last_phase = f" Last seen in phase {listing(phases)}." if phases else ""
    done = [life.rank for life in window.liveness if life.state == "finished"]
    one, named = len(who) == 1, ranks(who)
    furthest = max(
        (life.last_step for life in window.liveness if life.state == "finished"), default=0
    )
    unsent = ""
    if done and min(life.last_step for life in liveness) >= furthest:
        unsent = (
            f" {'It has' if one else 'They have'} taken every step that these took: the training "
            "may be whole, and what is missing be the last batches alone, which then wait on the "
            "machine (`rankscope sync`)."
        )
    if done:
        whole = (
            f"{ranks(done).capitalize()} had ended as {'it' if len(done) == 1 else 'they'} should"
        )
    elif one:
        whole = "It is the only rank of this job"
    else:
        whole = (
            f"All ranks fell silent within {max(seen) - min(seen):.0f} s, so that nothing shows "
            "which one was first"
        )
    return Incident.since(first, window.last_step).finding(
        kind="rank.silent",
        key="job",
        severity="warning",
        title=(
            f"{named.capitalize()} {'has' if one else 'have all'} gone silent, last complete step "
            f"{first - 1}"
        ),
        ranks=who,
        cause=(
            f"{named.capitalize()} {'has' if one else 'have'} said nothing for "
            f"{max(silence.values()):.0f} s, not even that {'it' if one else 'they'} failed: the "
            "job was killed (out of memory, by the scheduler, by `kill -9` or `os._exit`), or the "
            f"machine or its network is gone. {whole}.{unsent}{last_phase}"
        ),
        remedy=(
            "Look at the job's exit code and at the kernel log (out of memory, device errors) and "
            f"restart from the last checkpoint before step {first}. Where the job still runs, its "
            "server cannot be reached."
        ),
        evidence={
            "silent_seconds": {str(rank): round(s, 1) for rank, s in silence.items()},
            "last_reported_step": {str(life.rank): life.last_step for life in liveness},
            "phase": {str(life.rank): life.phase for life in liveness},
            "finished_ranks": done,
            AGREED_UNTIL: reported,
        },
    )
