"""Where each kind is checked and stays quiet, and where it fires: `docs/coverage.md`.

Three places: the corpus (real trainings), the cases beside the detectors (`tests/server/detectors/
cases`), which the tests hold the detectors to, and the fault lab, of which this page says what it
expects; its own score says what was found.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import yaml

from rankscope.server.detectors import DETECTORS
from rankscope.server.detectors.registry import KINDS
from tests.lab.faults.case import Setting
from tests.lab.faults.families import REGISTRY
from tests.support.judging import Judgement

_CASES = Path(__file__).parents[3] / "tests" / "server" / "detectors" / "cases"
_HEAD = """# Where every detector is checked, and where it fires

<!-- Written by `make corpus`. Do not edit by hand. -->

A kind counts as checked in a healthy run where it could judge (`ok`, or `open` for information) and
said nothing of severity warning or above; it counts as firing in a broken run where it opened an
alert. Cases are recorded or simulated runs that the tests judge. The fault lab breaks real
trainings of several processes; what it found of this is in its own score.

| kind | checked: healthy runs of the corpus | checked: cases | fires: broken runs of the corpus | \
fires: cases | expected in the fault lab |
|---|---|---|---|---|---|
"""


class Judged(Protocol):
    """A run of the corpus with what was said of it."""

    @property
    def name(self) -> str: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def judgement(self) -> Judgement: ...


def page(runs: Sequence[Judged]) -> str:
    """The page as it has to be."""
    checked, fired = Counter[str](), defaultdict[str, Counter[str]](Counter)
    for run in runs:
        for kind, check in run.judgement.checks.items():
            loud = [a for a in run.judgement.of(kind) if a.severity != "info"]
            if run.healthy:
                checked[kind] += check.status in ("ok", "open") and not loud
            elif run.judgement.of(kind):
                fired[kind][run.name[:3]] += 1
    quiet, loud_cases = _cases()
    lab = _fault_lab()
    lines, gaps = [], []
    for kind in sorted({k for d in DETECTORS for k in d.kinds}, key=KINDS.index):
        places = ", ".join(f"{n} {family}" for family, n in sorted(fired[kind].items()))
        lines.append(
            f"| `{kind}` | {checked[kind] or '-'} | {quiet[kind] or '-'} | {places or '-'} "
            f"| {loud_cases[kind] or '-'} | {', '.join(lab[kind]) or '-'} |"
        )
        if not (checked[kind] or quiet[kind]):
            gaps.append(f"`{kind}` is not checked in a healthy run or case.")
        if not (fired[kind] or loud_cases[kind]):
            gaps.append(f"`{kind}` fires in no broken run or case.")
    silent = [kind for kind in KINDS if kind not in {k for d in DETECTORS for k in d.kinds}]
    if silent:
        gaps.append(f"No detector yet: {', '.join(f'`{kind}`' for kind in silent)}.")
    end = "\n".join(gaps) or "Every kind is checked somewhere and fires somewhere."
    return f"{_HEAD}{chr(10).join(lines)}\n\n{end}\n"


def _cases() -> tuple[Counter[str], Counter[str]]:
    """Number of cases, by kind, in which it can judge and says nothing; in which it speaks."""
    quiet, loud = Counter[str](), Counter[str]()
    for path in sorted(_CASES.glob("*.yaml")):
        for case in yaml.safe_load(path.read_text(encoding="utf-8"))["cases"]:
            if case["finds"] != "nothing":
                loud[path.stem] += 1
            elif case.get("answer", "ok") == "ok":
                quiet[path.stem] += 1
    return quiet, loud


def _fault_lab() -> dict[str, list[str]]:
    """Kind -> faults of the lab that it has to report."""
    found = defaultdict[str, list[str]](list)
    for name, case in sorted(REGISTRY.cases.items()):
        setting = Setting(world=max(case.worlds), model=case.models[0], seed=0)
        for kind in case(setting).expected().kinds:
            found[kind].append(name)
    return found
