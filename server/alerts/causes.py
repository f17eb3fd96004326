"""Which alert follows from which: one root cause, one alert. Pure.

The links are a function of the alerts alone, made anew each time. So a root that is found later
than its consequence still takes it, and evaluating a run again gives the same links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from rankscope.agent import wire
from rankscope.server.alerts.lifecycle import TIME_BASED, Transition
from rankscope.server.alerts.onset import since
from rankscope.server.alerts.rules import rules
from rankscope.server.detectors.effects import BLUR, EPISODE, SYMPTOMS, Rule
from rankscope.server.window import Alert


def link(alerts: Sequence[Alert]) -> tuple[Alert, ...]:
    """The alerts whose `parent` or `consequences` have to change, as they have to be.

    A consequence of a consequence hangs under the root itself.

    Args:
        alerts: all of a run, open and resolved.
    """
    by_id = {alert.id: alert for alert in alerts}
    tops = {alert.id: alert.id for alert in alerts}
    onsets = {alert.id: alert.first_step for alert in alerts}
    for number, root, consequence in _candidates(alerts):
        if tops[consequence.id] != consequence.id:
            continue  # it has a root
        top = by_id[tops[root.id]]
        if top.id == consequence.id:
            continue
        # What hangs under it moves along, and must not have begun long before its new root.
        slack = max(BLUR, -rules()[number].earliest)
        if onsets[consequence.id] < since(top)[0] - slack:
            continue
        onsets[top.id] = min(onsets[top.id], onsets[consequence.id])
        for name, its_top in tops.items():
            if its_top == consequence.id:
                tops[name] = top.id
    parents = {name: its_top for name, its_top in tops.items() if its_top != name}
    children: dict[str, list[Alert]] = {}
    for name, parent in parents.items():
        children.setdefault(parent, []).append(by_id[name])
    linked = (
        replace(
            alert,
            parent=parents.get(alert.id),
            consequences=tuple(a.id for a in sorted(children.get(alert.id, []), key=_order)),
        )
        for alert in alerts
    )
    return tuple(new for old, new in zip(alerts, linked, strict=True) if old != new)


def transitions(
    alerts: Sequence[Alert], changed: Sequence[Alert], *, through_step: int, now: float
) -> tuple[Transition, ...]:
    """What `link` changed, as rows of the alerts' history.

    Args:
        alerts: what `link` was given.
        changed: what it returned.
    """
    before = {alert.id: alert for alert in alerts}
    after = before | {alert.id: alert for alert in changed}
    rows = []
    for alert in changed:
        if alert.parent == before[alert.id].parent:
            continue
        if alert.parent is None:
            reason = "It no longer counts as a consequence of another alert."
        else:
            reason = explain(after[alert.parent], alert)
        rows.append(Transition(alert.id, through_step, now, "linked", reason))
    return tuple(rows)


def explain(root: Alert, consequence: Alert) -> str:
    """One sentence on why the one follows from the other."""
    since = f"It follows from {root.kind} since step {root.first_step}"
    fitting = (rule for rule in rules() if _fits(rule, root, consequence))
    rule = next(fitting, None)
    # Under a root two links away no single line fits.
    return f"{since}." if rule is None else f"{since}: {rule.why}."


def _candidates(alerts: Sequence[Alert]) -> Iterator[tuple[int, Alert, Alert]]:
    ordered = sorted(alerts, key=_order)
    for number, rule in enumerate(rules()):
        roots = [a for a in ordered if _is(a.kind, rule.root)]
        consequences = [a for a in ordered if _is(a.kind, rule.consequence)] if roots else []
        for consequence in consequences:
            for root in roots:
                if root.id != consequence.id and _fits(rule, root, consequence):
                    yield number, root, consequence


def _fits(rule: Rule, root: Alert, consequence: Alert) -> bool:
    if not (_is(root.kind, rule.root) and _is(consequence.kind, rule.consequence)):
        return False
    if root.severity == "info" and consequence.severity != "info":
        # Drift, or a synchronisation now and then, explains nothing, and must not hide anything.
        return False
    if not (consequence.key.startswith(rule.key) and root.key.startswith(rule.root_key)):
        return False
    if rule.stages and root.stage not in rule.stages:
        return False
    if rule.same_ranks and root.ranks and consequence.ranks:
        if not set(root.ranks) & set(consequence.ranks):
            return False
    if rule.root_has and not root.evidence.get(rule.root_has):
        return False
    if rule.has and not consequence.evidence.get(rule.has):
        return False
    if root.kind in SYMPTOMS and _outlasts(consequence, root):
        return False
    if rule.same_period and not _same_period(root, consequence):
        return False
    both_ways = _is(root.kind, rule.consequence) and _is(consequence.kind, rule.root)
    if both_ways and root.kind in TIME_BASED:
        # Steps do not say who fell silent first: the first that is gone stops all the others.
        if root.opened_at >= consequence.opened_at:
            return False
    elif both_ways and _order(root) >= _order(consequence):
        return False
    begins = since(root)[0]
    if begins - BLUR > consequence.seen_step:
        return False  # what was seen before is not made by it, whenever that is said to have begun
    return begins + rule.earliest <= consequence.first_step <= _end(rule, root)


def _same_period(root: Alert, consequence: Alert) -> bool:
    """Whether what recurs does so with the root's distance, to within a step or a twentieth."""
    distance, period = root.evidence.get("distance"), consequence.evidence.get("period")
    if not isinstance(distance, int | float) or not isinstance(period, int | float):
        return False
    return abs(period - distance) <= max(1.0, distance / 20)


def _outlasts(consequence: Alert, root: Alert) -> bool:
    """Whether a consequence has gone on without its root for longer than the root itself lasted."""
    length = max(root.last_step - root.first_step, root.clear_after or 0, EPISODE)
    return root.clear_after is not None and consequence.last_step > root.last_step + length


def _end(rule: Rule, root: Alert) -> float:
    if rule.latest is not None:
        return root.first_step + rule.latest
    # Not `state`: whether it is open depends on when it is asked.
    if root.clear_after is None:
        return inf
    return root.last_step + root.clear_after


def _order(alert: Alert) -> tuple[int, int, int, str]:
    stage = wire.STAGES.index(alert.stage) if alert.stage in wire.STAGES else len(wire.STAGES)
    return alert.first_step, stage, alert.seen_step, alert.id


def _is(kind: str, names: tuple[str, ...]) -> bool:
    return any(kind.startswith(name) if name.endswith(".") else kind == name for name in names)
