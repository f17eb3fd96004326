"""`GET /compare`: two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query
from sqlalchemy import Connection

from rankscope.server.alerts.lifecycle import severest
from rankscope.server.api import comparison_models as shapes
from rankscope.server.api import verdict
from rankscope.server.api.bits_text import bit_comparison
from rankscope.server.api.deps import Database, known_run
from rankscope.server.api.problems import Problem
from rankscope.server.api.runs import summaries
from rankscope.server.comparison import configurations, courses
from rankscope.server.evaluation.two_runs import compare_bits
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.judgement import alerts
from rankscope.server.storage.reading import series
from rankscope.server.window import Alert

router = APIRouter(tags=["compare"])

_MAX_POINTS = 2000
_MAX_METRICS = 60
# What is compared of each run, in this order; then evaluations, by name.
_METRICS = ("loss", "accuracy", "samples_per_second", "step_seconds", "lr", "grad_norm")

Runs = Annotated[list[str], Query(description="two ids of runs: `runs=a&runs=b`")]


@router.get("/compare")
def compare(engine: Database, runs: Runs) -> shapes.Compared:
    """Configuration, verdicts, alerts, metrics, and the first step and tensor that differ.

    Pairs stand in the order of `runs`. Ranks are compared with the ranks of the same number, by the
    digests of what they held; where the configurations name different seeds they are not.
    """
    if len(runs) != 2:
        raise Problem(422, f"runs: {len(runs)} given; name two, as in ?runs=a&runs=b")
    # Before a connection is held: who waits for a second one may wait for all others that do.
    verdicts = [verdict.get_verdict(engine, run) for run in runs]
    with reading(engine) as connection:
        rows = [known_run(connection, run) for run in runs]
        about = summaries(connection, rows)
        configs = [configurations.of_run(row.world_size, row.config) for row in rows]
        differing, equal = configurations.differences(configs)
        seeds = [configurations.seeds(config) for config in configs]
        same_seed = _same_seed(seeds)
        end = min(row.last_step for row in rows)
        found = None
        if same_seed is not False:
            found = compare_bits(connection, runs=(rows[0].key, rows[1].key), end=end)
        return shapes.Compared(
            runs=about,
            configuration=shapes.ConfigurationDifference(
                differing=[
                    shapes.SettingDifference(key=s.key, values=list(s.values)) for s in differing
                ],
                equal=equal,
            ),
            alerts=_alerts(connection, rows),
            metrics=_metrics(connection, rows),
            bits=bit_comparison(about, found, same_seed=same_seed, seeds=seeds),
            **_verdicts(verdicts, runs),
        )


def _same_seed(seeds: Sequence[dict[str, Any]]) -> bool | None:
    common = seeds[0].keys() & seeds[1].keys()
    if not common:
        return None
    return all(seeds[0][key] == seeds[1][key] for key in common)


def _verdicts(found: Sequence[Any], runs: Sequence[str]) -> dict[str, Any]:
    of_each = [{check.name: check for check in one.checks} for one in found]
    names = list(dict.fromkeys(name for one in of_each for name in one))
    differing = []
    for name in names:
        both = [one.get(name) for one in of_each]
        states = [None if check is None else check.state for check in both]
        if states[0] != states[1]:
            why = [None if check is None else check.why for check in both]
            differing.append(shapes.CheckDifference(name=name, states=states, why=why))
    return {
        "verdicts": [
            shapes.RunVerdict(run=run, verdict=v.verdict, so_far=v.so_far, reasons=v.reasons)
            for run, v in zip(runs, found, strict=True)
        ],
        "checks": differing,
    }


def _alerts(connection: Connection, rows: Sequence[Any]) -> list[shapes.AlertDifference]:
    found = [
        [a for a in alerts.roots(connection, run=row.key, run_id=row.id) if a.severity != "info"]
        for row in rows
    ]
    kinds = sorted({alert.kind for one in found for alert in one})
    return [
        shapes.AlertDifference(
            kind=kind, runs=[_of_kind([a for a in one if a.kind == kind]) for one in found]
        )
        for kind in kinds
    ]


def _of_kind(found: Sequence[Alert]) -> shapes.KindAlerts | None:
    if not found:
        return None
    return shapes.KindAlerts.model_validate(
        {
            "count": len(found),
            "open": sum(a.state == "open" for a in found),
            "severity": severest(*(a.severity for a in found)),
            "first_step": min(a.first_step for a in found),
            "ranks": sorted({rank for a in found for rank in a.ranks}),
        }
    )


def _metrics(connection: Connection, rows: Sequence[Any]) -> list[shapes.MetricDifference]:
    there = [{m.name: m for m in series.list_metrics(connection, run=row.key)} for row in rows]
    common = there[0].keys() & there[1].keys()
    wanted = [name for name in _METRICS if name in common]
    wanted += sorted(name for name in common if name.startswith("eval/"))
    wanted = wanted[:_MAX_METRICS]
    latest = [
        series.latest_values(connection, run=row.key, metrics=wanted) if wanted else {}
        for row in rows
    ]
    return [
        _metric(connection, rows, name, [one[name].last_step for one in there], latest)
        for name in wanted
    ]


def _metric(
    connection: Connection,
    rows: Sequence[Any],
    name: str,
    ends: list[int],
    latest: Sequence[dict[tuple[int, str], float]],
) -> shapes.MetricDifference:
    read = [
        series.read_series(
            connection,
            run=row.key,
            metric=name,
            from_step=0,
            to_step=min(ends),
            max_points=_MAX_POINTS,
        )
        for row in rows
    ]
    width = max((one.width for of_run in read for one in of_run), default=1)
    means = [
        courses.in_buckets(courses.mean_over_ranks([(s.steps, s.values) for s in of_run]), width)
        for of_run in read
    ]
    apart = courses.compared(*means)
    last = [[v for (_, metric), v in of_run.items() if metric == name] for of_run in latest]
    return shapes.MetricDifference(
        metric=name,
        final=[float(np.mean(values)) if values else None for values in last],
        final_steps=ends,
        steps=apart.steps,
        width=width,
        first_step=apart.first,
        last_step=apart.last,
        at_last=None if apart.at_last is None else list(apart.at_last),
        first_differing=apart.first_differing,
        mean_difference=apart.mean_difference,
        largest_step=apart.largest,
        at_largest=None if apart.at_largest is None else list(apart.at_largest),
    )
