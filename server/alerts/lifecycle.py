"""The life of an alert: findings in, alerts and what happened to them out. Pure.

A finding says that something is wrong from one step to another. The first one of its `(kind, key)`
opens an alert, those that follow closely extend it, and steps without one resolve it. Step numbers
alone decide (not how the steps came), so a run that is evaluated again gets the same alerts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rankscope.agent import wire
from rankscope.server.detectors.base import Finding
from rankscope.server.window import Alert

# What they see is the clock and not a step: they are over as soon as they are no longer found.
TIME_BASED = frozenset({"rank.failed", "rank.silent", "rank.stalled"})


class Transition(NamedTuple):
    """Something that happened to an alert.

    Attributes:
        step: step at which it became known.
        at: seconds since 1970.
        what: `opened`, `updated severity`, `resolved` or `linked`.
        reason: one sentence for a person.
    """

    alert_id: str
    step: int
    at: float
    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Folded:
    """What an evaluation changed.

    Attributes:
        alerts: those that are new or no longer what they were, in the order of their opening.
        transitions: in the order in which they happened.
    """

    alerts: tuple[Alert, ...]
    transitions: tuple[Transition, ...]


def fold(
    alerts: Sequence[Alert],
    findings: Sequence[Finding],
    *,
    run: str,
    through_step: int,
    now: float,
    heard_at: Mapping[int, float] | None = None,
    reported: Mapping[int, int] | None = None,
    world_size: int | None = None,
    start: int = 0,
) -> Folded:
    """Takes one evaluation's findings into the alerts of a run.

    How the steps are cut into evaluations does not matter, but for the times.

    Args:
        alerts: of the run; those that are resolved are left alone.
        findings: of the steps after the last call's `through_step`, in any order.
        through_step: last step that has been evaluated.
        now: seconds since 1970.
        heard_at: when each rank was last heard of, seconds since 1970, as far as is known for
            certain. An alert of `TIME_BASED` then resolves only after one of its ranks was heard of
            since: a server that has just started, and finds nothing yet, proves nothing.
        world_size: ranks of the job as it is now; None for as many as ever. Of those that it went
            on without, nothing more is heard: the others show that it did.
        reported: last step that each rank has reported. Steps of which an alert's ranks say nothing
            are no clean ones: a rank that is missing resolves nothing.
        start: number of the start of the job that the findings and the alerts are of.
    """
    before = {alert.id: alert for alert in alerts}
    after = dict(before)
    latest: dict[tuple[str, str], Alert] = {}
    for alert in sorted(alerts, key=lambda a: a.last_step):
        latest[alert.kind, alert.key] = alert
    found = set()
    transitions: list[Transition] = []
    # Sorted by steps, since a block of many steps brings them by detector.
    for finding in sorted(findings, key=lambda f: (f.seen_step, f.last_step)):
        identity = (finding.kind, finding.key)
        found.add(identity)
        standing = latest.get(identity)
        if standing is not None and standing.state == "resolved":
            if _repeats(standing, finding):
                continue
            standing = None
        if standing is not None and not _continues(standing, finding):
            after[standing.id], transition = _resolve(standing, now)
            transitions.append(transition)
            standing = None
        if standing is None:
            alert = _open(finding, run, now, start)
            known = after.get(alert.id)
            if known is not None:  # the same incident goes on after all
                alert = replace(alert, opened_at=known.opened_at)
            transitions.append(Transition(alert.id, finding.seen_step, now, "opened", alert.title))
        else:
            alert = _extend(standing, finding)
            if alert.severity != standing.severity:
                transitions.append(
                    Transition(alert.id, finding.last_step, now, "updated severity", alert.title)
                )
        after[alert.id] = latest[identity] = alert
    for identity, alert in latest.items():
        if alert.state == "resolved":
            continue
        if alert.kind in TIME_BASED:
            over = identity not in found and _heard(alert, heard_at, world_size)
        else:
            over = alert.clear_after is not None and (
                _judged_through(alert, through_step, reported) - alert.last_step > alert.clear_after
            )
        if over:
            after[alert.id], transition = _resolve(alert, now, through_step)
            transitions.append(transition)
    changed = [alert for alert in after.values() if before.get(alert.id) != alert]
    return Folded(tuple(changed), tuple(transitions))


def carried(stored: Sequence[Alert]) -> tuple[Alert, ...]:
    """Of the alerts of a run that is evaluated again from its start, those to begin with.

    All others come of the data again.
    """
    return tuple(a for a in stored if a.kind in TIME_BASED and a.state == "open")


def unconfirmed(
    stored: Sequence[Alert], alerts: Sequence[Alert], *, through_step: int, now: float
) -> Folded:
    """What is stored as open although a run, evaluated again from its start, does not show it.

    A newer version may judge differently.

    Args:
        stored: the run's alerts before it was evaluated again.
        alerts: what came of that.
    """
    confirmed = {alert.id for alert in alerts}
    over = [a for a in stored if a.state == "open" and a.id not in confirmed]
    reason = "It was no longer found when the run was evaluated again."
    return Folded(
        tuple(replace(alert, state="resolved", resolved_at=now) for alert in over),
        tuple(
            Transition(a.id, max(through_step, a.last_step), now, "resolved", reason) for a in over
        ),
    )


def ended_by_start(stored: Sequence[Alert], *, start: int, now: float) -> Folded:
    """What is stored as open of other starts of the job than the one that is evaluated.

    Args:
        stored: all alerts of the run.
        start: number of the start that is evaluated.
    """
    over = [a for a in stored if a.state == "open" and a.start != start]
    reason = "The job was started again and began anew: this is of the start before."
    return Folded(
        tuple(replace(alert, state="resolved", resolved_at=now) for alert in over),
        tuple(Transition(a.id, a.last_step, now, "resolved", reason) for a in over),
    )


def alert_id(run: str, kind: str, key: str, seen_step: int, start: int = 0) -> str:
    """16 hexadecimal digits; the same whenever the same data are evaluated again."""
    # The same fault in a job that was launched again is another incident.
    again = (f"start {start}",) if start else ()
    # Unit separators, since a run's id may hold anything that is printable.
    text = "\x1f".join((run, kind, key, str(seen_step), *again))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def severest(*severities: str) -> str:
    """The highest of some severities."""
    return max(severities, key=wire.SEVERITIES.index)


def _judged_through(alert: Alert, through_step: int, reported: Mapping[int, int] | None) -> int:
    """Last step at which an alert's ranks could be examined."""
    return min([through_step, *((reported or {}).get(rank, through_step) for rank in alert.ranks)])


def _heard(
    alert: Alert, heard_at: Mapping[int, float] | None, world_size: int | None = None
) -> bool:
    if heard_at is None or not alert.ranks:
        return True
    left = world_size is not None and min(alert.ranks) >= world_size
    shown_by = heard_at if left else alert.ranks
    return any(heard_at.get(rank, 0.0) > alert.opened_at for rank in shown_by)


def _repeats(alert: Alert, finding: Finding) -> bool:
    """Whether a finding adds nothing new about an alert that is over.

    A detector reports an incident until it knows by its own observations that it is over, and there
    may be none: after a NaN, no later loss says that a spike has ended.
    """
    return alert.kind not in TIME_BASED and finding.last_step <= alert.last_step


def _continues(alert: Alert, finding: Finding) -> bool:
    if alert.kind in TIME_BASED or alert.clear_after is None:
        return True
    # At the very next step nothing has been clean in between, even with `clear_after` 0.
    return finding.seen_step - alert.last_step <= max(alert.clear_after, 1)


def _known(evidence: Any) -> Any:
    """Evidence with None for numbers that are not known (NaN), or shares of nothing (infinite).

    What a trainer reported that is no number is a text, as detectors write it.
    """
    if isinstance(evidence, Mapping):
        return {name: _known(one) for name, one in evidence.items()}
    if isinstance(evidence, list | tuple):
        return [_known(one) for one in evidence]
    return None if isinstance(evidence, float) and not math.isfinite(evidence) else evidence


def _open(finding: Finding, run: str, now: float, start: int) -> Alert:
    return Alert(
        id=alert_id(run, finding.kind, finding.key, finding.seen_step, start),
        start=start,
        run=run,
        kind=finding.kind,
        key=finding.key,
        severity=finding.severity,
        state="open",
        title=finding.title,
        first_step=finding.first_step,
        seen_step=finding.seen_step,
        last_step=finding.last_step,
        opened_at=now,
        cause=finding.cause,
        remedy=finding.remedy,
        ranks=finding.ranks,
        tensors=finding.tensors,
        stage=finding.stage,
        clear_after=finding.clear_after,
        evidence=_known(finding.evidence),
    )


def _extend(alert: Alert, finding: Finding) -> Alert:
    severity, first_step, stage = finding.severity, finding.first_step, finding.stage
    if finding.seen_step != alert.seen_step:
        # A further fault takes nothing back. A finding that begins where the alert does is the same
        # incident, reported again: its detector knows better now than before how bad it is.
        severity = severest(alert.severity, severity)
        first_step = min(alert.first_step, first_step)
        stage = alert.stage
    title = finding.title
    if finding.first_step > first_step:
        title = f"{title}; first at step {first_step}"
    return replace(
        alert,
        severity=severity,
        title=title,
        first_step=first_step,
        last_step=max(alert.last_step, finding.last_step),
        cause=finding.cause,
        remedy=finding.remedy,
        ranks=finding.ranks,
        tensors=finding.tensors,
        stage=stage,
        clear_after=finding.clear_after,
        evidence=_known(finding.evidence),
    )


def _resolve(alert: Alert, now: float, through_step: int = -1) -> tuple[Alert, Transition]:
    if alert.kind in TIME_BASED or alert.clear_after is None:
        step, reason = max(through_step, alert.last_step), "It is no longer found."
    else:
        # The first step at which it could have been reported, and not the one that ends this block.
        step = alert.last_step + alert.clear_after + 1
        reason = f"Nothing was found in the {alert.clear_after} steps after {alert.last_step}."
        if alert.clear_after == 0:
            reason = f"Nothing was found after step {alert.last_step}."
    resolved = replace(alert, state="resolved", resolved_at=now)
    return resolved, Transition(alert.id, step, now, "resolved", reason)
