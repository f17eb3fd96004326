"""`rankscope gate RUN --against BASELINE`: the run beside earlier runs, as the server has them.

Imported where it is asked for alone: a gate without a baseline starts without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from rankscope.server.comparison.courses import Course, in_buckets, mean_over_ranks
from rankscope.server.comparison.measures import Measured, Recorded
from rankscope.server.comparison.regression import ACCURACY, EVALUATED, LOSS, Compared, compared
from rankscope.server.comparison.resources import MEMORY, STEP_SECONDS
from rankscope.server.detectors import profiles
from rankscope.server.detectors.mechanisms.wording import count, listing
from rankscope.server.gate import measured
from rankscope.server.gate.formats import REGRESSION, Report

if TYPE_CHECKING:
    from rankscope.server.gate.gate import Answers

Json = dict[str, Any]

PROJECT = "project:"
_NEWEST = 20
# Of a project's runs so many are looked through for those that passed.
_LOOKED_THROUGH = 1000
_PAGE = 100
# Ranks that are read of a run, evenly spaced, and points of all of them together.
_RANKS, _POINTS = 64, 16_000
_EVALUATIONS = 12
# A loss that does not have to fall is no measure; one among the samples of a batch is, where
# batches are as large.
_NO_MEASURE = ("adversarial", "reinforcement", "surrogate")


def with_baseline(server: Answers, report: Report, options: argparse.Namespace) -> Report:
    """The verdict with what the comparison adds: checks, reasons, and a regression fails.

    Args:
        options: with `run`, `against`, `tolerance`, `measures` and `ignored_measures`.
    """
    if report.state == "running":
        return not_compared(report, "the run is still running")
    run = _Run.of(server, options.run)
    names = list(options.against)
    if names[0].startswith(PROJECT):
        project = names[0].removeprefix(PROJECT)
        names = _of_project(server, project, run)
        if not names:
            return not_compared(
                report,
                f"project {project!r} has no baseline but for this run",
            )
    others = [_Run.of(server, name) for name in names]
    machine, alike = _machine(run, others)
    # Beyond the end of the other side nothing is compared, and with it points would be coarser.
    baseline = [one.recorded(server, to=run.last, machine=one in alike) for one in others]
    found = compared(
        run.recorded(server, to=max(one.last for one in others), machine=True),
        baseline,
        tolerance=options.tolerance,
        no_measure=_no_measure(server, run),
        other_machine=machine,
    )
    return _joined(report, found, names, options)


def not_compared(report: Report, why: str) -> Report:
    """The verdict where there is nothing to compare: no pass."""
    why = f"not compared with the baseline: {why}"
    return replace(
        report,
        verdict="pending" if report.verdict == "pass" else report.verdict,
        reasons=(*report.reasons, *((why,) if report.verdict != "fail" else ())),
        checks=(*report.checks, {"name": REGRESSION, "state": "not_run", "why": why}),
    )


def _joined(
    report: Report, found: Compared, names: list[str], options: argparse.Namespace
) -> Report:
    measures = [_asked_for(m, options) for m in found.measures]
    measures += [
        Measured(name, "not_run", "there is no such measure of these runs")
        for name in options.measures
        if name not in {m.name for m in measures}
    ]
    found = replace(found, measures=tuple(measures))
    failed = [m for m in measures if m.state == "failed"]
    reasons = [f"{REGRESSION}.{m.name}: {measured.sentence(m)}" for m in failed]
    verdict = "fail" if failed else report.verdict
    if not failed and verdict != "fail" and (missing := _missing(found, options)):
        verdict = "pending"
        reasons.append(missing)
    return replace(
        report,
        verdict=verdict,
        reasons=(*report.reasons, *reasons),
        checks=(
            *report.checks,
            *(
                {
                    "name": f"{REGRESSION}.{m.name}",
                    "state": m.state,
                    "why": measured.sentence(m),
                }
                for m in measures
            ),
        ),
        against=measured.as_json(found, names, tolerance=options.tolerance),
        beside=tuple(measured.of_the_comparison(found, names)),
    )


def _asked_for(measure: Measured, options: argparse.Namespace) -> Measured:
    """The measure, unless it is to be ignored."""
    why = ""
    if options.measures and measure.name not in options.measures:
        why = "others were asked for"
    if measure.name in options.ignored_measures:
        why = "ignored, as was asked for"
    return Measured(measure.name, "not_run", why) if why else measure


def _missing(found: Compared, options: argparse.Namespace) -> str:
    """What has to be measured for a pass, and was not; empty: nothing."""
    open_ones = [m for m in found.measures if m.state == "not_run"]
    if options.measures:
        open_ones = [m for m in open_ones if m.name in options.measures]
        what = "not compared with the baseline, as was asked for"
    elif found.convergence:
        return ""
    else:
        what = "nothing that shows how well the run learns was compared with the baseline"
    whys = [f"{m.name}: {m.why}" for m in open_ones]
    return (
        f"{what} ({'; '.join(whys) or 'nothing is recorded'})"
        if whys or not options.measures
        else ""
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A run as the server has it: itself, and the metrics that it has recorded."""

    path: str
    about: Json
    metrics: frozenset[str]

    @classmethod
    def of(cls, server: Answers, name: str) -> _Run:
        path = f"/runs/{quote(name, safe='')}"
        listed = server.get(f"{path}/metrics", [("tensors", "false")])["items"]
        return cls(path, server.get(path), frozenset(metric["name"] for metric in listed))

    @property
    def last(self) -> int:
        return max(0, int(self.about["last_step"]))

    def recorded(self, server: Answers, *, to: int, machine: bool) -> Recorded:
        """Its courses up to a step; those of times and memory where the machine compares."""
        courses = {}
        for metric in _wanted(self.metrics):
            # Without a loss the steps are known from the times alone.
            if not machine and metric in (STEP_SECONDS, *MEMORY) and LOSS in self.metrics:
                continue
            course = _course(server, self.path, metric, _some(self.about["ranks"]), to)
            if len(course.steps):
                courses[metric] = course
        return Recorded(str(self.about["id"]), courses, elsewhere=not machine)


def _wanted(metrics: frozenset[str]) -> list[str]:
    plain = [m for m in (LOSS, ACCURACY, STEP_SECONDS, *MEMORY) if m in metrics]
    return plain + sorted(m for m in metrics if EVALUATED.fullmatch(m))[:_EVALUATIONS]


def _some(ranks: Sequence[int]) -> list[int]:
    """At most so many ranks, evenly spaced: the same ones of runs of one size."""
    if len(ranks) <= _RANKS:
        return list(ranks)
    return [ranks[i] for i in np.linspace(0, len(ranks) - 1, _RANKS).round().astype(int)]


def _course(server: Answers, path: str, metric: str, ranks: Sequence[int], to: int) -> Course:
    points = max(200, min(2000, _POINTS // max(1, len(ranks))))
    query = [("metric", metric), ("max_points", str(points)), ("to_step", str(to))]
    read = server.get(f"{path}/series", [*query, *(("rank", str(rank)) for rank in ranks)])
    what = "max" if metric in MEMORY else "values"
    series = [
        (np.array(one["steps"], np.int64), np.array([float(v) for v in one[what]]))
        for one in read["series"]
    ]
    if metric in MEMORY:
        return _largest(series)
    width = max((one["width"] for one in read["series"]), default=1)
    return in_buckets(mean_over_ranks(series), width)


def _largest(series: Sequence[tuple[Any, Any]]) -> Course:
    """The largest value of any rank at each step."""
    if not series:
        return Course(np.empty(0, np.int64), np.empty(0))
    steps, where = np.unique(np.concatenate([s for s, _ in series]), return_inverse=True)
    largest = np.full(len(steps), -np.inf)
    np.maximum.at(largest, where, np.concatenate([v for _, v in series]))
    return Course(steps, largest)


def _of_project(server: Answers, project: str, run: _Run) -> list[str]:
    """The baselines of a project, without this one: those marked by hand, then the newest passed.

    Of jobs that train further models, each in a run of its own (`RUN.2`), those of the same one.
    """
    found: dict[str, list[str]] = {"marked": [], "passed": []}
    number = _model(run.about)
    for about in _baselines(server, project):
        is_other = about["id"] != run.about["id"] and about["state"] != "running"
        if is_other and _model(about) == number:
            found[about["baseline"]].append(str(about["id"]))
    return [*found["marked"], *found["passed"]][:_NEWEST]


def _model(about: Mapping[str, Any]) -> str:
    """Which of a job's models a run is of: empty for the first one."""
    first = about["config"].get("first_run")
    return "" if first is None else str(about["id"]).removeprefix(str(first))


def _baselines(server: Answers, project: str) -> Iterator[Json]:
    query = [("project", project), ("baseline", "true"), ("limit", str(_PAGE))]
    cursor: str | None = None
    for _ in range(_LOOKED_THROUGH // _PAGE):
        page = server.get("/runs", [*query, *([("cursor", cursor)] if cursor else [])])
        yield from page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return


def _machine(run: _Run, others: Sequence[_Run]) -> tuple[str, list[_Run]]:
    """Runs whose times and memory compare; where there are none, why."""
    own = _kind_of_machine(run.about)
    alike = [one for one in others if _kind_of_machine(one.about) == own]
    if alike:
        return "", alike
    theirs = sorted({_machine_text(_kind_of_machine(one.about)) for one in others})
    return f"the run has {_machine_text(own)}, the baseline {listing(theirs, most=3)}", []


def _kind_of_machine(about: Json) -> tuple[int, str, str]:
    config = about["config"]
    device = str(config.get("device", "")).partition(":")[0]
    return int(about["world_size"]), device, str(config.get("device_name") or "")


def _machine_text(machine: tuple[int, str, str]) -> str:
    size, device, name = machine
    on = name or device
    return count(size, "rank") + (f" on {on}" if on else "")


def _no_measure(server: Answers, run: _Run) -> str:
    """Why the loss does not say how well a run learns; empty: it does."""
    settings = server.get(f"{run.path}/verdict").get("settings") or {}
    profile = settings.get("profile") or profiles.recognised(run.metrics)
    if profile in _NO_MEASURE:
        return f"the loss is {profiles.PROFILES[profile].what} (profile {profile})"
    return ""
