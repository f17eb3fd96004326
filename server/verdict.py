"""Pass, fail or pending: what a run's alerts and checks come to. Pure.

What was not checked never reads as passed: a run passes when nothing was found *and* what has to be
judged could be judged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rankscope.agent import wire
from rankscope.server.alerts.model import Alert
from rankscope.server.detectors.base import Check, Status

_JUDGED = (Status.OK, Status.OPEN)
_STATES_THAT_FAIL = {
    "failed": "the run failed: at least one rank ended with an error or was lost",
    "lost": "the run was lost: no rank was heard of any more, and none had said that it was done",
}
_NOT_JUDGED = {
    Status.INSUFFICIENT_DATA: "too short to judge",
    Status.MISSING_INPUT: "cannot be judged without its input",
    Status.NOT_APPLICABLE: "does not apply",
    Status.SUSPENDED: "suspended",
    Status.OFF: "switched off",
    Status.ERROR: "the detector failed",
}


@dataclass(frozen=True, slots=True)
class CheckLine:
    """What one kind of alert comes to.

    Attributes:
        name: the kind.
        state: `passed`, `failed` or `not_run`.
        why: one sentence.
    """

    name: str
    state: str
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to whether a run is healthy.

    Attributes:
        verdict: `pass`, `fail` or `pending`.
        reasons: of a fail or of a pending; empty for a pass.
        checks: one for each kind that was or should have been judged, in the order of `wire.KINDS`,
            then those of other packages.
    """

    verdict: str
    reasons: tuple[str, ...]
    checks: tuple[CheckLine, ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    alert: Alert
    severity: str


def required(world_size: int) -> tuple[str, ...]:
    """Kinds without which a run of that size cannot pass."""
    always = ("loss.nonfinite", "loss.spike")
    return ("desync.parameters", *always) if world_size > 1 else always


def judge(
    run_state: str,
    world_size: int,
    alerts: Sequence[Alert],
    checks: Mapping[str, Check],
    *,
    silenced: Collection[str] = frozenset(),
    fail_on: str = "warning",
    kinds: Collection[str] = frozenset(),
    ignored: Collection[str] = frozenset(),
) -> Verdict:
    """Judges a run as it stands.

    An alert counts whether it is still open or not: what went wrong in a run has gone wrong. A root
    counts with the highest severity among itself and what follows from it, and where its kind is
    silenced or ignored, so is what follows from it.

    Args:
        run_state: `running`, `finished`, `failed` or `lost`.
        alerts: of the run, consequences too.
        checks: each detector's answer, by kind.
        silenced: kinds that somebody silenced in this run.
        fail_on: lowest severity that fails.
        kinds: if any, these alone are looked at, and each of them has to be judged.
        ignored: kinds not to look at.

    Raises:
        ValueError: `fail_on` is no severity.
    """
    if fail_on not in wire.SEVERITIES:
        raise ValueError(f"fail_on is {fail_on!r}, and none of {', '.join(wire.SEVERITIES)}")
    set_aside = {k: _not_judged(c) for k, c in checks.items() if c.status is Status.OFF}
    set_aside |= dict.fromkeys(silenced, "silenced in this run")
    set_aside |= dict.fromkeys(ignored, "ignored, as was asked for")
    failures = list(_failures(alerts, set_aside, kinds, fail_on))
    reasons = [_describe(failure) for failure in failures]
    if run_state in _STATES_THAT_FAIL:
        reasons.insert(0, _STATES_THAT_FAIL[run_state])
    lines = tuple(_lines(alerts, failures, checks, set_aside, kinds, fail_on))
    if reasons:
        return Verdict("fail", tuple(reasons), lines)
    waiting = [] if run_state == "finished" else ["the run is still running"]
    needed = [k for k in (kinds or required(world_size)) if k not in set_aside]
    waiting += _unjudged(needed, checks, asked_for=bool(kinds))
    return Verdict("pending" if waiting else "pass", tuple(waiting), lines)


def _failures(
    alerts: Sequence[Alert], set_aside: Collection[str], kinds: Collection[str], fail_on: str
) -> Iterator[_Failure]:
    """Roots that fail the run; of `kinds`, also what follows from a root of another kind."""
    by_id = {alert.id: alert for alert in alerts}
    lowest = wire.SEVERITIES.index(fail_on)
    for alert in sorted(alerts, key=lambda a: (a.first_step, a.id)):
        root = by_id.get(alert.parent or "", alert)
        if {alert.kind, root.kind} & set(set_aside):
            continue
        if kinds and alert.kind not in kinds:
            continue
        if alert.parent is not None and (not kinds or root.kind in kinds):
            continue
        below = [by_id[one] for one in alert.consequences if one in by_id]
        severities = [alert.severity, *(a.severity for a in below if a.kind not in set_aside)]
        severity = max(severities, key=wire.SEVERITIES.index)
        if wire.SEVERITIES.index(severity) >= lowest:
            yield _Failure(alert, severity)


def _describe(failure: _Failure) -> str:
    alert = failure.alert
    over = ", resolved" if alert.state == "resolved" else ""
    return f"{alert.kind} ({failure.severity}{over}): {alert.title}"


def _lines(
    alerts: Sequence[Alert],
    failures: Sequence[_Failure],
    checks: Mapping[str, Check],
    set_aside: Mapping[str, str],
    kinds: Collection[str],
    fail_on: str,
) -> Iterator[CheckLine]:
    failed = {failure.alert.id: failure.alert for failure in failures}
    others = {*checks, *kinds, *(a.kind for a in alerts)}.difference(wire.KINDS)
    for kind in (*wire.KINDS, *sorted(others)):
        if kinds and kind not in kinds:
            continue
        mine = [a for a in alerts if a.kind == kind]
        if not (kind in checks or kind in kinds or mine):
            continue
        check = checks.get(kind)
        first = next((a for a in mine if a.id in failed), None)
        follows = next((a for a in mine if a.parent in failed), None)
        if kind in set_aside:
            yield CheckLine(kind, "not_run", set_aside[kind])
        elif first is not None:
            yield CheckLine(kind, "failed", first.title)
        elif follows is not None and follows.parent is not None:
            root = failed[follows.parent]
            why = f"since step {follows.first_step}, as a consequence of {root.kind}"
            yield CheckLine(kind, "failed", why)
        elif check is None:
            yield CheckLine(kind, "not_run", "no detector has answered for it")
        elif check.status not in _JUDGED:
            yield CheckLine(kind, "not_run", _not_judged(check))
        elif mine:
            why = f"found below severity {fail_on}, or as a consequence of what is set aside"
            yield CheckLine(kind, "passed", why)
        else:
            yield CheckLine(kind, "passed", check.why)


def _unjudged(
    needed: Sequence[str], checks: Mapping[str, Check], *, asked_for: bool
) -> Iterator[str]:
    """What stands against a pass: all that was needed has to have been judged, and something."""
    judged = 0
    for kind in needed:
        check = checks.get(kind)
        if check is None:
            yield f"{kind}: no detector has answered for it"
        elif check.status in _JUDGED:
            judged += 1
        elif not (asked_for and check.status is Status.NOT_APPLICABLE):
            yield f"{kind}: {_not_judged(check)}"
    if not judged and all(kind in checks for kind in needed):
        applicable = [k for k in needed if checks[k].status is not Status.NOT_APPLICABLE]
        if not applicable:
            yield "nothing is left that could be judged"


def _not_judged(check: Check) -> str:
    return f"{_NOT_JUDGED[check.status]}: {check.why}"
