"""What the detectors say of the whole corpus: `make corpus`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from support.judging import Judgement, judge
from support.traces import Trace

from benchmarks.corpus.families import HEALTHY, record
from rankscope.server.detectors import build

# The kind that has to be found where a family does not name it itself, and the latest step.
_EXPECTED: dict[str, tuple[str, int]] = {
    "F01": ("loss.nonfinite", 500),
    "F02": ("loss.diverging", 60),
    "F07": ("loss.spike", 301),
    "F08": ("rank.loss_outlier", 200),
    "F14": ("lr.too_high", 470),
    "F15": ("loss.spike", 351),
    "F20": ("loss.oscillating", 200),
    "F22": ("data.unshuffled", 600),
    "F40": ("rank.loss_outlier", 500),
    "F41": ("loss.nonfinite", 251),
    "F42": ("rank.loss_outlier", 400),
    "F43-demo-lr-x10": ("lr.too_high", 300),
    "F43-demo-lr-x30": ("lr.too_high", 300),
    "F43-demo-lr-x100": ("lr.too_high", 300),
}


def report(folder: Path, names: Sequence[str], seeds: Sequence[int]) -> int:
    """Judges every run, records it first where it is not there, and prints what was said.

    Returns:
        1 if a healthy run has a warning or a broken one lacks what it should have, else 0.
    """
    judged: dict[tuple[str, int], Judgement] = {}
    facts: dict[str, dict[int, dict[str, object]]] = {}
    for seed in seeds:
        for name in names:
            path = folder / f"{name}.{seed}.npz"
            if not path.exists():
                record(name, seed).save(path)
            trace = Trace.load(path)
            judged[name, seed] = judge(trace, build(), range(0, len(trace.steps), 50))
            facts.setdefault(name, {})[seed] = dict(trace.facts)
    missed = 0
    print("| broken | expected | by step | found | seen at | rank | other warnings |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        if name not in HEALTHY:
            missed += _broken(name, seeds, judged, facts[name])
    print()
    alarmed = _healthy([n for n in names if n in HEALTHY], seeds, judged)
    print()
    _coverage(judged)
    return int(bool(missed or alarmed))


def _broken(
    name: str,
    seeds: Sequence[int],
    judged: dict[tuple[str, int], Judgement],
    facts: dict[int, dict[str, object]],
) -> int:
    found, steps, right, others = 0, [], [], Counter[str]()
    kind, by = _EXPECTED.get(name) or _EXPECTED.get(name[:3]) or ("", 0)
    for seed in seeds:
        known = facts[seed]
        kind, by = str(known.get("expected", kind)), int(str(known.get("by", by)))
        alerts = judged[name, seed].of(kind)
        steps += [alert.seen_step for alert in alerts[:1]]
        found += any(alert.seen_step <= by for alert in alerts)
        if "rank" in known and alerts:
            right.append(any(known["rank"] in alert.ranks for alert in alerts))
        others.update({a.kind for a in judged[name, seed].alerts if a.severity != "info"} - {kind})
    seen = f"{min(steps)}-{max(steps)}" if steps else "-"
    ranks = f"{sum(right)} of {len(right)}" if right else "-"
    rest = ", ".join(f"{other} {times}" for other, times in sorted(others.items()))
    print(f"| {name} | {kind} | {by} | {found} of {len(seeds)} | {seen} | {ranks} | {rest} |")
    return len(seeds) - found


def _healthy(
    names: Sequence[str], seeds: Sequence[int], judged: dict[tuple[str, int], Judgement]
) -> int:
    runs = [(name, seed) for name in names for seed in seeds]
    alarmed = 0
    for run in runs:
        serious = [a for a in judged[run].alerts if a.severity != "info"]
        alarmed += bool(serious)
        for alert in serious:
            print(f"{run[0]} seed {run[1]}: {alert.severity} {alert.kind}: {alert.title}")
    print(f"{len(runs)} healthy runs of {len(names)} families: {alarmed} with a warning or more.")
    return alarmed


def _coverage(judged: dict[tuple[str, int], Judgement]) -> None:
    """How many healthy runs each kind could judge, and in how many broken ones it spoke."""
    checked, spoke, kinds = Counter[str](), Counter[str](), set[str]()
    for (name, _), judgement in judged.items():
        for kind, check in judgement.checks.items():
            kinds.add(kind)
            if name in HEALTHY:
                checked[kind] += check.status in ("ok", "open")
            else:
                spoke[kind] += bool(judgement.of(kind))
    print("| kind | healthy runs it judged | broken runs in which it spoke |")
    print("|---|---|---|")
    for kind in sorted(kinds):
        print(f"| {kind} | {checked[kind]} | {spoke[kind]} |")
