"""The page of each kind of alert, and the table of all: what the detectors' docstrings say."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path

from docs.markdown import NOTICE, split, table
from rankscope.server.detectors import DETECTORS
from rankscope.server.detectors.policy import thresholds

KINDS = {kind: detector for detector in DETECTORS for kind in detector.kinds}

_SYMPTOMS = Path(__file__).parent / "symptoms.md"


def overview() -> str:
    """The table of all kinds, in the order of the registry."""
    lines = [
        "# What Rankscope looks for",
        "",
        NOTICE,
        "",
        "Each detector answers for every run: `ok`, `open`, or why it could not judge",
        "(`insufficient_data`, `missing_input`, `not_applicable`, `suspended`, `off`, `error`).",
        "The verdict carries all answers: what was not checked never reads as passed.",
        "",
        "Any of them can be switched off, and any threshold set, for a server or for a project:",
        "[Settings of the detectors](detector-settings.md). Where each is checked and where it",
        "fires: [coverage](coverage.md). If you have a symptom and no alert yet:",
        "[by symptom](symptoms.md).",
        "",
        *table(
            ("kind", "what it says", "needs", "ranks"),
            (
                (
                    f"[`{kind}`](kinds/{kind}.md)",
                    _sections(kind)[""][0],
                    ", ".join(f"`{name}`" for name in detector.needs) or "-",
                    f"{detector.min_ranks} or more",
                )
                for kind, detector in KINDS.items()
            ),
        ),
    ]
    return "\n".join(lines) + "\n"


def page(kind: str) -> str:
    """What one kind means, when it is how severe, and, folded, how it is computed.

    Raises:
        KeyError: there is no such kind.
    """
    detector = KINDS[kind]
    parts = _sections(kind)
    statistic = parts.pop("Statistic", [])
    lines = [f"# {kind}", "", NOTICE, "", *parts.pop("")]
    if others := [f"[`{k}`]({k}.md)" for k in detector.kinds if k != kind]:
        lines += ["", f"Judged together with {', '.join(others)}."]
    needs = ", ".join(f"`{name}`" for name in detector.needs)
    lines += [
        "",
        f"Needs {detector.min_ranks} or more ranks" + (f" and {needs}." if needs else "."),
    ]
    if symptoms := _symptoms(kind):
        lines += ["", "Symptoms that lead here: " + ", ".join(symptoms) + "."]
    for title, text in parts.items():
        lines += ["", f"## {title}", "", *text]
    if statistic:
        lines += ["", "## Statistic", "", *_folded("How it is computed", statistic)]
    if declared := thresholds(detector.policies):
        lines += ["", "## Thresholds", ""]
        lines += [f"[How to set them](../detector-settings.md), by `{kind}`.", ""]
        lines += table(
            ("name", "default", "unit", "meaning"),
            ((f"`{t.name}`", f"{t.default:g}", t.unit or "-", t.meaning) for t in declared),
        )
    return "\n".join(lines) + "\n"


def _sections(kind: str) -> dict[str, list[str]]:
    return split(inspect.getdoc(KINDS[kind]) or "")


def _folded(title: str, text: Sequence[str]) -> list[str]:
    """A block that a reader opens: both GitHub and the site show it."""
    return ['<details markdown="1">', f"<summary>{title}</summary>", "", *text, "", "</details>"]


def _symptoms(kind: str) -> list[str]:
    """Links to the sections of the page of symptoms that name the kind."""
    text = _SYMPTOMS.read_text(encoding="utf-8")
    found = re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, flags=re.MULTILINE)
    return [
        f"[{title.rstrip('?')}](../symptoms.md#{_slug(title)})"
        for title, body in found
        if f"kinds/{kind}.md" in body
    ]


def _slug(title: str) -> str:
    """The anchor of a heading, as Python-Markdown and GitHub make it of plain words."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
