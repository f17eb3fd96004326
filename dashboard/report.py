"""One HTML file with all that the page of a run shows, which asks for nothing from anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_FOLDER = Path(__file__).parent
# The smallest of plotly's bundles that knows heatmaps: a third of the whole library.
PLOTLY = _FOLDER / "vendor" / "plotly-cartesian.min.js"


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure under a heading.

    Attributes:
        figure: plotly JSON, as `dashboard.figures` makes it.
        tall: pixels; None for the usual height.
    """

    title: str
    figure: Mapping[str, Any]
    tall: int | None = None

    @property
    def summary(self) -> str:
        """What is on it, in a sentence."""
        meta = self.figure.get("layout", {}).get("meta") or {}
        return str(meta.get("summary", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What stands in the file, from the top to the bottom.

    Attributes:
        run, verdict: as the REST interface gives them.
        headline: with `tone`, `word`, `title` and `details`.
        alerts: roots, each with those that follow from it and its chart, if there is one.
        charts: of the whole run.
        configuration: flattened keys and values.
        made: when, as text.
        left_out: what would have had a place here, and why it has none: sentences.
    """

    run: Mapping[str, Any]
    verdict: Mapping[str, Any]
    headline: Any
    alerts: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]], Chart | None]]
    charts: Sequence[Chart]
    configuration: Sequence[tuple[str, Any]]
    made: str
    left_out: Sequence[str] = ()


def render(report: Report) -> str:
    """The HTML of a report; figures stand in it once, as data."""
    charts = [chart for _, _, chart in report.alerts if chart is not None] + list(report.charts)
    text: str = _template().render(
        report=report,
        place=lambda one: next(n for n, chart in enumerate(charts) if chart is one),
        figures=_json([chart.figure for chart in charts]),
        plotly=_script(PLOTLY.read_text(encoding="utf-8")),
        style=Markup((_FOLDER / "static" / "rankscope.css").read_text(encoding="utf-8")),
        evidence=_shown,
    )
    return text


@cache
def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("report.html")


def _json(value: Any) -> Markup:
    """JSON that can stand in a script element: no letter in it ends one."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(
        text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    )


def _script(text: str) -> Markup:
    if "</script" in text.lower():
        raise ValueError("this script would end its own element")
    return Markup(text)


def _shown(value: Any) -> str:
    """Evidence is free-form: numbers, texts, lists and mappings of these."""
    if value is None:
        return "\u2013"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(not isinstance(one, list | dict) for one in value):
        return ", ".join(_shown(one) for one in value)
    return json.dumps(_rounded(value), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    """The same with six digits of each number that is none of whole ones."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return value
