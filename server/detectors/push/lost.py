"""Gradients that a worker pushed and nobody applied, or that were applied more than once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rankscope.server.comparison.steps import PUSHED
from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import agree, count
from rankscope.server.detectors.policy import Observations, Policy, Steps
from rankscope.server.detectors.push.applied import SERIES, pushes
from rankscope.server.window import Check, Window


@dataclass(frozen=True, slots=True)
class LostPolicy(Policy):
    """Thresholds of `push.lost`.

    Attributes:
        reports: consecutive reports of a worker in which more pushes are missing than ever came
            back, before it is reported.
        steady: the same where the number of pushes on the way has never changed before.
        clear_after: versions without a further lost push after which it is over.
    """

    reports: Observations = 8
    steady: Observations = 2
    clear_after: Steps = 16


@dataclass(slots=True)
class Missing:
    """Attributes: the worker; missing pushes (fewer than 0: applied again); of how many."""

    worker: int
    pushes: int
    of: int


@dataclass(slots=True)
class Account:
    """What a worker pushed, against what was applied of it.

    Attributes:
        applied: pushes of it that made a version.
        pushed: as it said last, at version `version`.
        last: number on the way at its last reports, and the version of the report before each.
        usual: the least number that was ever on the way; None before the first reports are in.
        steady: whether no other number was ever seen.
    """

    watch: Watch[Missing]
    last: deque[tuple[int, int]]
    applied: int = 0
    pushed: int = 0
    version: int = 0
    usual: int | None = None
    steady: bool = True


@dataclass(slots=True)
class LostState:
    """Attributes: reports that were judged; what is remembered of each worker."""

    judged: int = 0
    accounts: dict[int, Account] = field(default_factory=dict)


class PushLost(Detector[LostState]):
    """A worker's gradients never arrive at the parameter server, or are applied more than once.

    A push that fails in silence, or is retried although it had arrived, leaves no other trace: the
    model still trains, on other data than it was given.

    Statistic:
        Each worker says at every version it pulls how many gradients it has pushed; the server
        reports whose push made each version. The difference is what is on the way. What is on the
        way at the least in any 8 consecutive reports is always so (a worker that pushes in the
        background); more than that in 8 consecutive reports (in 2, where it was always the same
        before) is lost. Fewer than none were applied twice. Dated to the version of the last report
        before. Over after 16 versions in which no further one is lost, times the number of workers.

    Severity:
        Warning.

    Evidence:
        `pushes` (that are missing; below 0: that were applied again), `pushed` (this many in all).

    Source:
        Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014),
        section 4.2: vector clocks against lost and repeated messages.
    """

    kinds = ("push.lost",)
    lasting = "pushes are counted on both sides, whatever is recorded"
    wants = (*SERIES, PUSHED)
    min_ranks = 2
    policy: LostPolicy

    def advance(self, window: Window, state: LostState) -> Outcome:
        """Goes through pushes and reports, version by version."""
        made = iter(pushes(window))
        push = next(made, None)
        steps, rows = rank_rows(window, PUSHED)
        for step, row in zip(steps.tolist(), rows, strict=True):
            # A worker that pulled a version had seen all pushes that made it.
            while push is not None and push.version <= step:
                self._account(state, push.worker).applied += 1
                push = next(made, None)
            for rank, value in zip(window.ranks.tolist(), row.tolist(), strict=True):
                if value == value:
                    self._report(state, int(rank), int(value), int(step))
        while push is not None:
            self._account(state, push.worker).applied += 1
            push = next(made, None)
        findings = [
            _finding(episode)
            for _, account in sorted(state.accounts.items())
            for episode in account.watch.take(window.last_step)
        ]
        return Outcome({"push.lost": _check(state)}, tuple(findings))

    def _account(self, state: LostState, worker: int) -> Account:
        known = state.accounts.get(worker)
        if known is None:
            known = state.accounts[worker] = Account(Watch(), deque(maxlen=self.policy.reports))
        return known

    def _report(self, state: LostState, worker: int, pushed: int, step: int) -> None:
        account, policy = self._account(state, worker), self.policy
        state.judged += 1
        if pushed < account.pushed:
            # It began anew, and so does this.
            account.applied, account.usual, account.steady = 0, None, True
            account.last.clear()
        if not pushed:
            account.pushed, account.version = pushed, step
            return  # nothing can be on the way yet
        missing = pushed - account.applied
        account.last.append((missing, account.version))
        account.pushed, account.version = pushed, step
        account.watch.clear_after = policy.clear_after * max(len(state.accounts), 1)
        if account.usual is None:
            if missing >= 0 and len(account.last) < policy.reports:
                return
            account.usual = max(min(m for m, _ in account.last), 0)
            account.steady = len({m for m, _ in account.last}) == 1
        needed = policy.steady if account.steady else policy.reports
        recent = list(account.last)[-needed:]
        least = min(m for m, _ in recent)
        if missing < 0 or (len(recent) == needed and least > account.usual):
            gone = missing if missing < 0 else least - account.usual
            found = Missing(worker, 0, pushed)
            first = account.last[-1][1] if missing < 0 else recent[0][1]
            facts = account.watch.bad(step, found, first_step=first).facts
            facts.pushes, facts.of = facts.pushes + gone, pushed
            # What is lost stays lost: from here on it counts as applied.
            account.applied += gone
            account.last.clear()
            account.last.append((missing - gone, step))
            return
        if recent[0][0] != account.usual or missing < account.usual:
            # What differed came back, or there is less on the way than was thought to be always.
            account.steady = False
        account.usual = min(account.usual, missing)
        account.watch.good(step)


def _finding(episode: Episode[Missing]) -> Finding:
    missing, step = episode.facts, episode.first_step
    lost = missing.pushes > 0
    amount = abs(missing.pushes)
    what = f"{count(amount, 'push')} of rank {missing.worker}"
    title = (
        f"{what} {agree(amount, 'was')} "
        f"{'never applied' if lost else 'applied again'}, since version {step:,}"
    )
    return episode.finding(
        kind="push.lost",
        key=f"rank:{missing.worker}",
        severity="warning",
        title=title,
        ranks=(missing.worker,),
        stage="reduced_gradient",
        cause=(
            f"Of {missing.of:,} gradients that rank {missing.worker} reported as pushed, "
            f"{amount:,} "
            + (
                f"{agree(amount, 'was')} never applied: the message was lost, refused, or failed "
                "where nobody looked, or waits in a growing queue."
                if lost
                else f"{agree(amount, 'was')} applied twice: a push was sent again although it had "
                "arrived."
            )
        ),
        remedy=(
            "Let the server confirm every push by its number, send again what was not "
            "confirmed, and apply each number once; look at what the server logs about this "
            "worker."
        ),
        evidence={"pushes": missing.pushes, "pushed": missing.of, "observed": episode.seen},
    )


def _check(state: LostState) -> Check:
    reported = sum(account.applied > 0 for account in state.accounts.values())
    if not reported or not state.judged:
        return Check.not_applicable("No parameter server has reported a push.")
    return Check.ok(f"What {count(reported, 'worker')} pushed was applied, once each.")
