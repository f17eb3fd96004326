"""What the detectors say of the whole corpus: `make corpus`."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.lab.corpus import coverage, recorded
from tests.lab.corpus.families import HEALTHY
from tests.lab.corpus.variations import Difference, differences, plainly
from tests.support.judging import Judgement

# What is found, and by which step, where a family's facts do not say it.
_EXPECTED: dict[str, tuple[str, int]] = {
    "F01": ("loss.nonfinite", 500),
    "F02": ("loss.diverging", 60),
    "F07": ("loss.spike", 301),
    "F08": ("rank.loss_outlier", 200),
    "F14": ("lr.too_high", 470),
    "F15": ("loss.spike", 351),
    "F20": ("loss.oscillating", 200),
    "F22": ("data.unshuffled", 60),
    "F40": ("rank.loss_outlier", 500),
    "F41": ("loss.nonfinite", 251),
    "F42": ("rank.loss_outlier", 400),
    "F43": ("lr.too_high", 300),
}
# Ten times the rate: the loss jumps, is back within 50 steps, and falls below what it was before.
# It is one to train with; what is reported is the jump, and that the rate had been raised.
_EXPECTED_OF = {"F43-demo-lr-x10": ("loss.spike", 205)}


@dataclass(frozen=True)
class Run:
    """One run of the corpus with what was said of it, and what else in its variations."""

    name: str
    seed: int
    facts: Mapping[str, object]
    judgement: Judgement
    differences: tuple[Difference, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.name in HEALTHY

    @property
    def expected(self) -> tuple[str, int]:
        """Kind that has to be found, and the latest step."""
        kind, by = _EXPECTED_OF.get(self.name) or _EXPECTED.get(self.name[:3], ("", 0))
        return str(self.facts.get("expected", kind)), int(str(self.facts.get("by", by)))

    @property
    def found(self) -> bool:
        """Whether the right kind was found in time, of the right rank."""
        kind, by = self.expected
        return any(
            alert.seen_step <= by
            and ("rank" not in self.facts or self.facts["rank"] in alert.ranks)
            for alert in self.judgement.of(kind)
        )

    @property
    def serious(self) -> list[str]:
        """Kinds of severity warning and above."""
        return [a.kind for a in self.judgement.alerts if a.severity != "info"]


def report(
    folder: Path,
    runs: Sequence[tuple[str, int]],
    page: Path | None,
    *,
    workers: int = 1,
    vary: bool = False,
) -> int:
    """Judges runs, records those that are not there, prints what was said, and writes the page.

    Args:
        workers: processes that do it side by side.
        vary: judges each run in other units, with other numbers of the ranks, at once, and with
            fewer steps logged, too.

    Returns:
        1 if a healthy run has a warning, a broken one lacks what it should have, or something else
        is said of a variation of a run; else 0.
    """
    names, seeds = zip(*runs, strict=True)
    many = len(runs)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        judged = list(pool.map(_judged, [folder] * many, names, seeds, [vary] * many))
    broken = [run for run in judged if not run.healthy]
    healthy = [run for run in judged if run.healthy]
    for line in [*_broken(broken), "", *_healthy(healthy), *(_varied(judged) if vary else ())]:
        print(line)
    if page is not None:
        page.write_text(coverage.page(judged), encoding="utf-8")
        print(f"\n{page} is written.")
    wrong = any(run.serious for run in healthy) or not all(run.found for run in broken)
    return int(wrong or any(run.differences for run in judged))


def _judged(folder: Path, name: str, seed: int, vary: bool) -> Run:
    torch.set_num_threads(1)
    recorded.record(folder, name, seed)
    run, settings = recorded.load(folder, name, seed), recorded.settings_of(name)
    judgement = plainly(run, settings)
    other = tuple(differences(run, settings, judgement)) if vary else ()
    return Run(name, seed, recorded.facts_of(name, seed), judgement, other)


def _broken(runs: Sequence[Run]) -> Iterator[str]:
    yield "| broken | expected | by step | found | seen at | other warnings |"
    yield "|---|---|---|---|---|---|"
    for name in dict.fromkeys(run.name for run in runs):
        mine = [run for run in runs if run.name == name]
        kind, by = mine[0].expected
        steps = [run.judgement.of(kind)[0].seen_step for run in mine if run.judgement.of(kind)]
        seen = f"{min(steps)}-{max(steps)}" if steps else "-"
        found = f"{sum(run.found for run in mine)} of {len(mine)}"
        others = Counter(other for run in mine for other in set(run.serious) - {kind})
        rest = ", ".join(f"{other} {times}" for other, times in sorted(others.items()))
        yield f"| {name} | {kind} | {by} | {found} | {seen} | {rest} |"


def _healthy(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        for alert in run.judgement.alerts:
            if alert.severity != "info":
                yield f"{run.name} seed {run.seed}: {alert.severity} {alert.kind}: {alert.title}"
    alarmed = sum(bool(run.serious) for run in runs)
    families = len({run.name for run in runs})
    yield f"{len(runs)} healthy runs of {families} families: {alarmed} with a warning or more."


def _varied(runs: Sequence[Run]) -> Iterator[str]:
    """Where something else was said of a variation of a run."""
    yield ""
    for run in runs:
        for difference in run.differences:
            yield f"{run.name} seed {run.seed}, {difference.how}: {', '.join(difference.kinds)}"
    other = sum(bool(run.differences) for run in runs)
    yield f"{len(runs)} runs in other units, windows, ranks, and sparse: {other} judged otherwise."
