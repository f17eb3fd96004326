"""The results as a table for a person, and as JSON for a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tests.lab.faults.lab import Result

_HEAD: tuple[str, ...] = (
    "case",
    "ranks",
    "model",
    "expected",
    "found",
    "kind",
    "stage",
    "ranks?",
    "tensors",
)
_HEAD += ("severity", "delay", "extra", "right")


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """The numbers that the lab is about."""
    judged = [r for r in results if not r.score.error]
    faults = [r for r in judged if r.expected["kinds"]]
    benign = [r for r in judged if not r.expected["kinds"]]
    return {
        "faults": len(faults),
        "detected": sum(r.score.detected for r in faults),
        "right": sum(r.score.right for r in faults),
        "right_and_on_time": sum(r.score.right and r.score.onset for r in faults),
        "one_alert_only": sum(r.score.detected and not r.score.extra for r in faults),
        "benign": len(benign),
        "benign_with_alarm": sum(r.score.false_alarms > 0 for r in benign),
        "not_judged": len(results) - len(judged),
        "seconds": round(sum(r.seconds for r in results), 1),
    }


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Everything."""
    return {
        "summary": summary(results),
        "results": [
            {
                **asdict(r.job),
                "run": r.run,
                "what": r.what,
                "family": r.family,
                "expected": r.expected,
                "score": r.score.as_json(),
                "alert": r.alert,
                "others": list(r.others),
                "seconds": round(r.seconds, 2),
            }
            for r in results
        ],
    }


def as_markdown(results: Sequence[Result]) -> str:
    """The table, and below it the numbers."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    lines += ["| " + " | ".join(row(result)) + " |" for result in results]
    numbers = summary(results)
    lines += ["", *(f"- {name.replace('_', ' ')}: {value}" for name, value in numbers.items())]
    return "\n".join(lines) + "\n"


def row(result: Result) -> tuple[str, ...]:
    """One line of the table."""
    job, score, expected = result.job, result.score, result.expected
    wanted = f"{'/'.join(expected['kinds'])} @{expected['step']}" if expected["kinds"] else "-"
    if expected["stages"]:
        wanted += f" [{'/'.join(expected['stages'])}]"
    found = "-" if result.alert is None else _said(result.alert)
    head = (job.case, str(job.world), f"{job.model}/{job.seed}", wanted)
    if score.error:
        return (*head, f"NOT JUDGED: {score.error}"[:120].replace("\n", " "), *[""] * 8)
    if not expected["kinds"]:
        return (*head, found, *[""] * 6, str(score.false_alarms), _mark(not score.false_alarms))
    if not score.detected:
        return (*head, "; ".join(result.others)[:80] or "-", *[""] * 6, str(score.extra), "no")
    marks = (score.kind, score.stage, score.ranks, score.tensors, score.severity)
    return (
        *head,
        found,
        *(_mark(mark) for mark in marks),
        str(score.delay),
        str(score.extra),
        _mark(score.right),
    )


def _said(alert: dict[str, Any]) -> str:
    stage = f" [{alert['stage']}]" if alert["stage"] else ""
    tensors = alert["tensors"]
    named = ",".join(tensors[:2]) + (f"+{len(tensors) - 2}" if len(tensors) > 2 else "")
    ranks = ",".join(map(str, alert["ranks"]))
    return f"{alert['severity']} {alert['kind']} @{alert['first_step']}{stage} r{ranks} {named}"


def _mark(good: bool) -> str:
    return "ok" if good else "no"
