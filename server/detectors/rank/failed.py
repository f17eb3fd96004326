"""Ranks that said that they failed: which one was first, of what, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.effects import EPISODE, Rule
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    if_several,
    listing,
    ranks,
    sentences,
)
from rankscope.server.detectors.policy import Policy, Seconds, Times
from rankscope.server.detectors.rank.endings import Ending, ending_of, first_line
from rankscope.server.window import Check, RankLiveness, Window

# Letters of an error in a title and in a sentence.
_TITLE, _SENTENCE = 80, 240


@dataclass(frozen=True, slots=True)
class FailedPolicy(Policy):
    """Thresholds of `rank.failed`.

    Attributes:
        settled: time that the other ranks have to report their own end, where an error says that
            another rank is gone.
        heartbeats: missed heartbeats of a running rank, after which it is left to `rank.silent`.
    """

    settled: Seconds = 20.0
    heartbeats: Times = 3.0


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed.

    Attributes:
        step: the one in progress.
        place: in the user's code; empty where that is not known.
        at: when the server heard of it, seconds since 1970.
    """

    rank: int
    step: int
    error: str
    place: str
    at: float
    ending: Ending


@dataclass(slots=True)
class FailedState:
    """Where ranks failed: rank -> number of its process, step and place."""

    places: dict[int, tuple[int, int, str]] = field(default_factory=dict)


class RankFailed(Detector[FailedState]):
    """A rank ended with an error: an exception, or an exit with another code than 0.

    One rank fails first; the others then fail in their next collective, or are ended by their
    launcher. These are consequences and named as such.

    Statistic:
        What ranks say of themselves when they end, by the server's clock. An error that is not one
        of a collective counts at once, and the first of them is the cause. Where there are errors
        of collectives only, a rank that ended before the others, or that was asked to end, is;
        where a rank has said nothing at all, `rank.silent` names it. The others are given 20 s to
        show how they ended. Over when the rank's next process is heard of, or the job goes on
        without it.

    Severity:
        Critical; warning for a `sys.exit` with another code than 0. Where a rank was asked to end
        (SIGTERM, Ctrl-C) and the others failed without it, warning; info where all were, or where
        the launcher has restarts left: a stop or a pre-emption is no fault.

    Evidence:
        `errors` (rank to its error), `failed_ranks` in the order in which they failed, `places`,
        `steps`, `seconds_after` (the first), `finished_ranks`.

    Source:
        torch.distributed.elastic's error propagation: the first failure is the root cause.
    """

    kinds = ("rank.failed",)
    lasting = "each rank says for itself how it ended"
    effects = (
        Rule(
            root=("rank.silent", "rank.stalled"),
            consequence=("rank.failed",),
            earliest=-EPISODE,
            latest=EPISODE,
            same_ranks=False,
            key="collective",
            why="a collective to which a rank does not come ends in an error on the others",
        ),
        Rule(
            root=("rank.failed",),
            consequence=("rank.silent", "rank.stalled"),
            earliest=-EPISODE,
            latest=EPISODE,
            same_ranks=False,
            why="the other ranks wait for a rank that has failed, or are ended by their launcher",
        ),
    )

    policy: FailedPolicy

    def advance(self, window: Window, state: FailedState) -> Outcome:
        """Looks at how the ranks ended."""
        # Started again with fewer ranks, a job goes on without those that it had before.
        liveness = {life.rank: life for life in window.liveness if life.rank < window.world_size}
        for event in window.events:
            life = liveness.get(event.rank)
            if event.kind == "failed" and life is not None and not event.at < life.first_seen:
                state.places[event.rank] = (life.attempt, event.step, event.text)
        finding, check = self._judge(window, tuple(liveness.values()), state)
        findings = () if finding is None else (finding,)
        return Outcome({"rank.failed": check}, findings)

    def _judge(
        self, window: Window, liveness: Sequence[RankLiveness], state: FailedState
    ) -> tuple[Finding | None, Check]:
        if not liveness:
            why = "No rank has been heard of yet."
            return None, Check.insufficient(why)
        failures = sorted(
            (_failure(life, state) for life in liveness if life.state == "failed"),
            key=lambda failure: (failure.at, failure.rank),
        )
        if not failures:
            return None, Check.ok("No rank has said that it failed.")
        own = [failure for failure in failures if failure.ending is Ending.OWN]
        running = [life for life in liveness if life.state == "running"]
        if not own and running:
            quiet = [life for life in running if self._quiet(life, window.now)]
            if quiet or window.now - failures[0].at < self.policy.settled:
                why = (
                    f"{_who(failures[:1])} ended ({first_line(failures[0].error)[:_SENTENCE]}); "
                    "what ended it is not known before the others are heard of."
                )
                return None, Check.insufficient(why)
        finding = _finding(window, liveness, failures, own)
        return finding, Check.open(f"{finding.title}.")

    def _quiet(self, life: RankLiveness, now: float) -> bool:
        return now - life.last_seen > self.policy.heartbeats * life.heartbeat_seconds


def _failure(life: RankLiveness, state: FailedState) -> Failure:
    attempt, step, place = state.places.get(life.rank, (-1, -1, ""))
    if attempt != life.attempt:
        step, place = life.last_step + 1, ""
    return Failure(life.rank, step, life.error, place, life.last_seen, ending_of(life.error))


def _finding(
    window: Window, liveness: Sequence[RankLiveness], failures: list[Failure], own: list[Failure]
) -> Finding:
    done = tuple(life.rank for life in liveness if life.state == "finished")
    first = (own or failures)[0]
    alike = [f for f in failures if first_line(f.error) == first_line(first.error)]
    named = alike if first.ending is not Ending.COLLECTIVE else [first]
    left = done if first.ending is Ending.COLLECTIVE else ()
    rest = [failure for failure in failures if failure not in named]
    stopped = first.ending is Ending.STOPPED
    error = first_line(first.error)
    step = min(failure.step for failure in named)
    if stopped:
        verb = agree(len(named), "was")
        how = "interrupted" if "KeyboardInterrupt" in error else "asked to end"
        title = f"{_who(named)} {verb} {how} in step {step}: {error[:_TITLE]}"
        severity = "warning" if rest and not _restarts_left(window) else "info"
    else:
        title = f"{_who(named)} failed in step {step}: {error[:_TITLE]}".rstrip(".")
        # Whoever calls `sys.exit` ends on purpose.
        severity = "warning" if error.startswith("SystemExit") else "critical"
    return Incident.since(step, window.last_step).finding(
        kind="rank.failed",
        key="collective" if first.ending is Ending.COLLECTIVE else "",
        severity=severity,
        title=title,
        ranks=left or tuple(sorted(failure.rank for failure in named)),
        cause=_cause(first, named, rest, left, _restarts_left(window)),
        remedy=_remedy(first, step, left, window.world_size),
        evidence={
            "errors": {str(f.rank): first_line(f.error) for f in failures[:16]},
            "failed_ranks": [failure.rank for failure in (*named, *rest)],
            "places": {str(f.rank): f.place for f in failures[:16] if f.place},
            "steps": {str(failure.rank): failure.step for failure in failures[:16]},
            "seconds_after": {str(f.rank): round(f.at - first.at, 1) for f in rest[:16]},
            "finished_ranks": list(done),
        },
    )


def _cause(
    first: Failure,
    named: Sequence[Failure],
    rest: Sequence[Failure],
    left: Sequence[int],
    restarts: int,
) -> str:
    at = f" at {first.place}" if first.place else ""
    error = first_line(first.error)[:_SENTENCE].rstrip(".")
    others = listing(
        [f"{ranks([f.rank])} ({first_line(f.error)[:_TITLE].rstrip('.')})" for f in rest], most=4
    )
    if first.ending is Ending.STOPPED:
        what = f"{_who(named)} ended in step {first.step}{at}: {error}. That is a stop from outside"
        what += ": a pre-emption, a time limit, a launcher or a person."
        return sentences(
            what,
            f"Then failed, as a consequence: {others}." if rest else "",
            f"The launcher has {count(restarts, 'restart')} left for the job." if restarts else "",
        )
    what = f"{_who(named)} failed in step {first.step}{at}: {error}."
    if first.ending is Ending.OWN:
        return sentences(
            what,
            "No rank had failed before." if rest else "",
            f"What the others say follows from it: {others}." if rest else "",
        )
    return sentences(
        what,
        f"{ranks(left).capitalize()} had ended before, as {'it' if len(left) == 1 else 'they'} "
        "should; whoever goes on then waits in its next collective for a rank that is gone."
        if left
        else "It is the first that failed, and no rank reports an error of its own: a peer, the "
        "network or a time limit of the collective has ended it.",
        f"Others that failed: {others}." if rest else "",
    )


def _remedy(first: Failure, step: int, left: Sequence[int], world_size: int) -> str:
    again = f"Then restart from the last checkpoint before step {step}."
    if first.ending is Ending.STOPPED:
        return f"Nothing, if this is meant. Else look for who ended it. {again}"
    if left:
        return (
            "Let all ranks take the same number of steps: `drop_last`, padding or "
            f"`torch.distributed.algorithms.join.Join` for data that end unevenly. {again}"
        )
    if first.ending is Ending.COLLECTIVE:
        return (
            f"Look at the output and the exit code{if_several(world_size, 'of each rank')} and at "
            f"the network{if_several(world_size, 'between them')}. {again}"
        )
    return f"Mend the error; the whole traceback is in the output of {ranks([first.rank])}. {again}"


def _restarts_left(window: Window) -> int:
    """How often the launcher starts the job again, as the ranks have said."""
    left = window.config.get("restarts_left")
    return left if isinstance(left, int) else 0


def _who(failures: Sequence[Failure]) -> str:
    return ranks(sorted(failure.rank for failure in failures)).capitalize()
