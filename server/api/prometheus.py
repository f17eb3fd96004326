"""What a server says of itself and of its runs, in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from sqlalchemy import Connection

from rankscope.server.api.admission import Admission
from rankscope.server.storage.judgement import alerts
from rankscope.server.storage.reading import statistics

_WORK = ("evaluation", "compaction")

Sample = tuple[Mapping[str, str], float]


class Taken(Protocol):
    """What a process has taken since it started."""

    batches: int
    points: int
    duplicates: int
    refused: int


def process(counters: Taken, admission: Admission, report: Mapping[str, Any]) -> Iterator[str]:
    """Lines about the process that answers, and the one beside it.

    Args:
        report: of `Health`.
    """
    counts, failing = report["counts"], report["failing"]
    yield from _one("batches_total", "Batches taken.", counters.batches)
    yield from _one("points_total", "Points stored.", counters.points)
    yield from _one("duplicates_total", "Batches that were there.", counters.duplicates)
    yield from _one("refused_total", "Batches that were refused.", counters.refused)
    yield from _one("busy_total", "Batches sent away for a while (429).", admission.refused)
    yield from _one("under_way", "Batches that are being stored.", admission.under_way)
    yield from _one("waiting", "Batches that wait for their turn.", admission.waiting)
    yield from _family(
        "failures_total",
        "Work on single runs that failed; the others went on.",
        [({"work": work}, counts.get(f"{work}_failures", 0)) for work in _WORK],
    )
    yield from _family(
        "failing_runs",
        "Runs whose last attempt at this work failed.",
        [({"work": work}, failing.get(work, 0)) for work in _WORK],
    )
    for name, said in (
        (
            "background_restarts",
            "Threads and processes that ended unexpectedly and were started again.",
        ),
        ("pruned_runs", "Runs that were deleted for their age, or their project's size."),
        ("otlp_failures", "Exports of metrics by OTLP that were not taken."),
        ("notifications", "Messages about alerts that their targets took."),
        (
            "notification_failures",
            "Messages about alerts that could not be delivered; they are tried again.",
        ),
    ):
        yield from _one(f"{name}_total", said, counts.get(name, 0))


def stored(connection: Connection, *, now: float) -> Iterator[str]:
    """Lines about the runs of the database, the same from all servers of it.

    Args:
        now: seconds since 1970.
    """
    yield from _one("unevaluated_runs", "Runs with new data.", statistics.unevaluated(connection))
    states = statistics.runs_by_state(connection).items()
    yield from _family("runs", "Runs by state.", [({"state": s}, count) for s, count in states])
    severities = statistics.open_alerts(connection).items()
    yield from _family(
        "alerts_open",
        "Open alerts by severity.",
        [({"severity": severity}, count) for severity, count in severities],
    )
    runs, left_out = statistics.recent_runs(connection, now=now)
    labels = {run.key: {"run": run.id, "project": run.project} for run in runs}
    yield from _family(
        "run_last_step",
        "Last step of a run that is running or has just ended.",
        [(labels[run.key], run.last_step) for run in runs],
    )
    yield from _family(
        "run_last_seen_timestamp_seconds",
        "When a rank of the run was last heard of.",
        [(labels[run.key], run.last_seen_at) for run in runs],
    )
    yield from _family(
        "run_alerts_open",
        "Open alerts of the run that follow from no other.",
        [
            ({**labels[one.run], "kind": one.kind, "severity": one.severity}, one.count)
            for one in alerts.open_counts(connection, runs=list(labels))
        ],
    )
    yield from _one(
        "runs_left_out",
        "Runs that are running or have just ended, and that are not named here.",
        left_out,
    )


def _one(name: str, said: str, value: float) -> Iterator[str]:
    return _family(name, said, [({}, value)])


def _family(name: str, said: str, samples: Iterable[Sample]) -> Iterator[str]:
    """A metric: a counter where its name ends so, else a gauge."""
    full = f"rankscope_{name}"
    yield f"# HELP {full} {said}"
    yield f"# TYPE {full} {'counter' if name.endswith('_total') else 'gauge'}"
    for labels, value in samples:
        given = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{full}{{{given}}} {value}" if given else f"{full} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
