"""Pass, fail or pending: what a run's alerts and checks come to. Pure.

What was not checked never reads as passed: a run passes when nothing was found *and* what has to be
judged could be judged. What has to be is part of the answer, and so is what was not checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope.agent import wire
from rankscope.server.detectors.registry import KINDS
from rankscope.server.window import Alert, Check, Status

_JUDGED = (Status.OK, Status.OPEN)
_STATES_THAT_FAIL = {
    "failed": "the run failed: at least one rank ended with an error or was lost",
    "lost": "the run was lost: no rank was heard of any more, and none had said that it was done",
}
_NOT_JUDGED = {
    Status.INSUFFICIENT_DATA: "too little data to judge",
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
class Requirement:
    """A kind without which the run cannot pass, and what stands for it.

    Attributes:
        name: the kind.
        state: `judged`; `not_judged`, which stands against a pass; or `not_applicable`, where
            there is nothing that it could be about, which does not.
        by: the kind that was judged: itself, or the one that takes its place; empty for none.
        why: one sentence.
    """

    name: str
    state: str
    by: str
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to whether a run is healthy.

    Attributes:
        verdict: `pass`, `fail` or `pending`.
        reasons: of a fail or of a pending; empty for a pass.
        checks: one for each kind that was or should have been judged, in the order of `KINDS`,
            then those of other packages.
        required: what has to be judged for a pass, without what was set aside.
    """

    verdict: str
    reasons: tuple[str, ...]
    checks: tuple[CheckLine, ...]
    required: tuple[Requirement, ...] = ()


@dataclass(frozen=True, slots=True)
class _Failure:
    alert: Alert
    severity: str


def required(world_size: int) -> tuple[str, ...]:
    """Kinds without which a run of that size cannot pass."""
    always = ("loss.nonfinite", "loss.spike")
    return ("desync.parameters", *always) if world_size > 1 else always


# Of a long run of short steps a share of the losses is recorded, as the overhead allows: a jump
# between two of them is not seen, and `loss.spike` says so. Which runs these are is a matter of the
# machine, and whether the course of the loss is sound must not be: there, what stays is looked for.
_IN_PLACE_OF = {"loss.spike": "loss.diverging"}


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

    An alert counts whether it is still open or not: what went wrong in a run has gone wrong. Of a
    job that was started again, `counted` says which alerts are those of its last start. A root
    counts with the highest severity among itself and what follows from it, and where its kind is
    silenced or ignored, so is what follows from it.

    Args:
        run_state: `running`, `finished`, `failed` or `lost`.
        alerts: of the run, consequences too.
        checks: each detector's answer, by kind.
        silenced: kinds that somebody silenced in this run.
        fail_on: lowest severity that fails.
        kinds: if any, these alone are examined, and each of them has to be judged.
        ignored: kinds that do not count.

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
    needed = [k for k in (sorted(kinds) or required(world_size)) if k not in set_aside]
    # What was asked for by name is judged itself, or the answer is none.
    in_place_of = {} if kinds else {k: v for k, v in _IN_PLACE_OF.items() if v not in set_aside}
    wanted = tuple(_requirement(kind, checks, in_place_of.get(kind)) for kind in needed)
    if reasons:
        return Verdict("fail", tuple(reasons), lines, wanted)
    waiting = [] if run_state == "finished" else ["the run is still running"]
    waiting += [f"{one.name}: {one.why}" for one in wanted if one.state == "not_judged"]
    if all(one.state == "not_applicable" for one in wanted):
        waiting.append("nothing is left that could be judged")
    return Verdict("pending" if waiting else "pass", tuple(waiting), lines, wanted)


def counts(
    state: str, start: int, last_step: int, *, first: int, last: int, resumed_step: int | None
) -> bool:
    """Whether an alert is of the last launch of a job, or of what that went on from.

    Args:
        state, start, last_step: the alert's.
        first, last: numbers of the first and the last start of the job's last launch: of several,
            its processes trained one after the other.
        resumed_step: step at which the job went on from a checkpoint after all of its processes had
            ended; what was over before that step is not part of what it trained since.
    """
    if start != last:
        return first <= start < last
    return state == "open" or resumed_step is None or last_step >= resumed_step


def counted(
    alerts: Sequence[Alert], *, first: int, last: int, resumed_step: int | None
) -> list[Alert]:
    """The alerts that count for a verdict, in their order; see `counts`.

    A root counts where anything that follows from it does.
    """
    of: dict[str, Any] = {"first": first, "last": last, "resumed_step": resumed_step}
    own = [a for a in alerts if counts(a.state, a.start, a.last_step, **of)]
    ids = {a.id for a in own} | {a.parent for a in own}
    return [a for a in alerts if a.id in ids]


# What is compared or measured at full samples, and what can come and go between two of them.
_AT_SAMPLES = (
    "desync.",
    "reduction.",
    "gradient.",
    "layer.",
    "update.",
    "compression.",
    "rank.gradient",
)


def least_sampled(shares: Sequence[float | None]) -> float | None:
    """Share of the steps that were sampled in full on every rank that says how many, at most."""
    return min((share for share in shares if share is not None), default=None)


def not_seen(checks: Sequence[CheckLine], *, sampled: float | None, interval: int) -> str | None:
    """What checks that passed could not have seen: a sentence; None where each step was sampled.

    Args:
        sampled: share of the steps that were sampled in full; None: no agent has said so.
        interval: steps between two samples at the end, on the rank where they are farthest apart.
    """
    if sampled is None or sampled >= 1:
        return None
    kinds = [c.name for c in checks if c.state == "passed" and c.name.startswith(_AT_SAMPLES)]
    if not kinds:
        return None
    at_the_end = f" (one step in {interval:,} at the end)" if interval > 1 else ""
    # The other way round, 0.4 % would read as none, and 99.6 % as all.
    return (
        f"In the {_percent(1 - sampled)} of the steps that were not sampled in full{at_the_end}, a "
        "fault that came and went between two samples and left no trace in the parameters could "
        f"not have been seen: {', '.join(kinds)}."
    )


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.0f} %" if 1 <= percent <= 99 else f"{percent:.2g} %"


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
    others = {*checks, *kinds, *(a.kind for a in alerts)}.difference(KINDS)
    for kind in (*KINDS, *sorted(others)):
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


def _requirement(kind: str, checks: Mapping[str, Check], other: str | None) -> Requirement:
    """What stands for a kind that has to be judged.

    Args:
        other: the kind that takes its place where the data are too few for it.
    """
    check = checks.get(kind)
    if check is None:
        return Requirement(kind, "not_judged", "", "no detector has answered for it")
    if check.status in _JUDGED:
        return Requirement(kind, "judged", kind, check.why)
    why = _not_judged(check)
    if check.status is Status.NOT_APPLICABLE:
        return Requirement(kind, "not_applicable", "", why)
    instead = checks.get(other or "")
    if check.status is Status.INSUFFICIENT_DATA and other and instead is not None:
        if instead.status in _JUDGED:
            return Requirement(kind, "judged", other, f"{why} In its place, {other}: {instead.why}")
        if instead.status is Status.NOT_APPLICABLE:
            # By the run's profile; there, this kind is information, which fails no run.
            return Requirement(kind, "not_applicable", "", f"{why} {other}: {_not_judged(instead)}")
    return Requirement(kind, "not_judged", "", why)


def _not_judged(check: Check) -> str:
    return f"{_NOT_JUDGED[check.status]}: {check.why}"
