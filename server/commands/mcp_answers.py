"""What the tools for coding agents answer: the REST interface's JSON, made short.

A model that reads an answer pays for each word. So lists have an end, what was left out is counted,
and `shortened` says where more is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

from rankscope.server.commands.run_facts import RunFacts, headline

# A float, or "NaN", "Infinity", "-Infinity".
Number = float | str

MOST_ALERTS = 20
MOST_RANKS = 32
MOST_TENSORS = 20
MOST_CHECKS = 40
# Of JSON, about 6,000 words of a model.
MOST_BYTES = 24_000
# Items of a list and members of a dict that are kept, the first that makes an answer fit.
_LENGTHS = (64, 32, 16, 8, 4, 2, 1)
_LONGEST_TEXT = 2000
_MOST_SHORTENED = 20


class RunLine(BaseModel):
    """A run in a list of runs."""

    id: str
    project: str
    state: str
    world_size: int
    last_step: int
    verdict: str
    open_alerts: int
    worst_alert: str | None = Field(description="title of the gravest open alert")
    started_at: str
    last_seen_at: str


class RunList(BaseModel):
    """Runs, the latest first."""

    runs: list[RunLine]
    next_cursor: str | None = Field(description="hand it in as `cursor` for the next runs")


class AlertLine(BaseModel):
    """An alert without its evidence: the tool `evidence` gives that.

    It began after step `after` (null: no step before is known to be right) and by step `by`.
    """

    id: str
    kind: str
    severity: str
    state: str
    title: str
    ranks: list[int] = Field(description="suspect ranks")
    ranks_in_all: int
    tensors: list[str]
    tensors_in_all: int
    after: int | None
    by: int
    last_step: int
    stage: str | None
    cause: str
    remedy: str
    acknowledged: bool
    silenced: bool
    consequences: list[str] = Field(description="alerts that follow from this one")
    consequences_in_all: int


class Check(BaseModel):
    """Something that was not checked, or failed, and why."""

    name: str
    why: str


class Why(BaseModel):
    """How a run stands, and why."""

    run: str
    project: str
    state: str
    headline: str
    details: list[str]
    verdict: str
    so_far: str = Field(description="what the verdict would be if the run ended now")
    reasons: list[str]
    last_step: int
    alerts: list[AlertLine] = Field(description="roots alone, open and grave ones first")
    alerts_in_all: int
    failed: list[Check]
    not_checked: list[Check] = Field(description="not judged: that is not passed")
    not_checked_in_all: int
    sampled: Number | None = Field(description="share of the steps that were sampled in full")


class Evidence(AlertLine):
    """One alert with all its evidence, as far as it fits."""

    run: str
    parent: str | None
    opened_at: str
    resolved_at: str | None
    evidence: dict[str, Any]
    history: list[dict[str, Any]]
    shortened: list[str] = Field(description="where something was left out")


class RankPoints(BaseModel):
    """Points of one rank; where `width` is above 1 they are means of so many steps."""

    rank: int
    width: int
    steps: list[int]
    values: list[Number]
    min: list[Number]
    max: list[Number]


class Points(BaseModel):
    """One series of some ranks."""

    run: str
    metric: str
    ranks: list[RankPoints]
    ranks_left_out: list[int] = Field(description="ask for them by `ranks`")
    ranks_left_out_in_all: int


class Comparison(BaseModel):
    """Two runs side by side; pairs stand in the order that was asked for."""

    runs: list[RunLine]
    bits: dict[str, Any] = Field(description="first step, link of the chain and tensor that differ")
    configuration: dict[str, Any]
    verdicts: list[dict[str, Any]]
    checks: list[dict[str, Any]]
    alerts: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    shortened: list[str] = Field(description="where something was left out")


def run_line(run: Mapping[str, Any]) -> RunLine:
    """A run of `GET /runs`."""
    worst = run["worst_alert"]
    same = ("id", "project", "state", "world_size", "last_step", "verdict", "open_alerts")
    return RunLine(
        **{name: run[name] for name in (*same, "started_at", "last_seen_at")},
        worst_alert=None if worst is None else worst["title"],
    )


def why(facts: RunFacts) -> Why:
    """A run's verdict and alerts."""
    said = headline(facts)
    verdict, checks, roots = facts.verdict, facts.verdict["checks"], facts.roots
    failed, left = (
        [Check(name=c["name"], why=c["why"]) for c in checks if c["state"] == state]
        for state in ("failed", "not_run")
    )
    return Why(
        run=facts.run["id"],
        project=facts.run["project"],
        state=facts.run["state"],
        headline=f"{said.word}: {said.title}",
        details=list(said.details)[:MOST_CHECKS],
        verdict=verdict["verdict"],
        so_far=verdict["so_far"],
        reasons=verdict["reasons"][:MOST_CHECKS],
        last_step=facts.run["last_step"],
        alerts=[AlertLine(**_line(alert)) for alert in roots[:MOST_ALERTS]],
        alerts_in_all=len(roots),
        failed=failed[:MOST_CHECKS],
        not_checked=left[:MOST_CHECKS],
        not_checked_in_all=len(left),
        sampled=verdict["sampled"],
    )


def evidence(alert: Mapping[str, Any]) -> Evidence:
    """An alert of `GET /alerts/{id}`."""
    kept, shortened = bounded({"evidence": alert["evidence"], "history": alert["history"]})
    same = ("run", "parent", "opened_at", "resolved_at")
    return Evidence(
        **_line(alert), **{name: alert[name] for name in same}, **kept, shortened=shortened
    )


def comparison(found: Mapping[str, Any]) -> Comparison:
    """Two runs of `GET /compare`."""
    parts = ("bits", "configuration", "verdicts", "checks", "alerts", "metrics")
    kept, shortened = bounded({name: found[name] for name in parts})
    return Comparison(runs=[run_line(run) for run in found["runs"]], **kept, shortened=shortened)


def _line(alert: Mapping[str, Any]) -> dict[str, Any]:
    same = ("id", "kind", "severity", "state", "title", "last_step", "stage", "cause", "remedy")
    limits = {"ranks": MOST_RANKS, "tensors": MOST_TENSORS, "consequences": MOST_TENSORS}
    return {
        **{name: alert[name] for name in (*same, "acknowledged", "silenced")},
        **{name: alert[name][:most] for name, most in limits.items()},
        **{f"{name}_in_all": len(alert[name]) for name in limits},
        "after": alert["since"]["after"],
        "by": alert["since"]["by"],
    }


def bounded(value: Any, most: int = MOST_BYTES) -> tuple[Any, list[str]]:
    """A value of JSON with no more than `most` bytes, and where it was shortened.

    Lists and dicts keep their first items: as many as make it fit.
    """
    shortened: list[str] = []
    for length in _LENGTHS:
        shortened = []
        kept = _cut(value, length, "", shortened)
        if len(json.dumps(kept)) <= most:
            return kept, _few(shortened)
    # Nothing but deep nesting is left: not of any use, and no reason to fail.
    return {name: type(one)() for name, one in value.items()}, ["everything: it is too large"]


def _cut(value: Any, length: int, path: str, shortened: list[str]) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        shortened.append(f"{path}: a text of {len(value)} characters")
        return f"{value[:_LONGEST_TEXT]}..."
    if not isinstance(value, list | dict):
        return value
    # What is on top is named by the answer's own fields.
    if path and len(value) > length:
        shortened.append(f"{path}: {length} of {len(value)}")
    items = list(_items(value))
    kept = [
        (key, _cut(one, length, f"{path}.{key}" if path else str(key), shortened))
        for key, one in (items[:length] if path else items)
    ]
    return dict(kept) if isinstance(value, dict) else [one for _, one in kept]


def _items(value: list[Any] | dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    return iter(value.items() if isinstance(value, dict) else enumerate(value))


def _few(texts: Sequence[str]) -> list[str]:
    more = len(texts) - _MOST_SHORTENED
    return [*texts[:_MOST_SHORTENED], *([f"and {more} more places"] if more > 0 else [])]
