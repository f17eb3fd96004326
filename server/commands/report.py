"""`rankscope report RUN -o FILE.html`: one self-contained file, to be kept or sent."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rankscope.dashboard import alert_chart
from rankscope.dashboard.report import Chart, Report, render
from rankscope.server.commands import client
from rankscope.server.commands.files import refusals
from rankscope.server.commands.run_facts import RunFacts, headline, load
from rankscope.server.comparison.configurations import flattened
from rankscope.server.exchange.points import write_whole

# Charts of the whole run, in this order; then evaluations, by name.
_CURVES = (
    *("loss", "accuracy", "grad_norm", "grad_norm_local", "lr", "step_seconds"),
    *("samples_per_second", "update_ratio", "weight_norm"),
)
_MOST_CURVES = 24
_MOST_ALERT_CHARTS = 12
_POINTS = "300"
# Cells of a heatmap: each has a text of some 14 bytes, twice.
_CELLS = 6000
# Bytes of all figures: with plotly the file stays below 3 MB.
_BUDGET = 1_300_000
# Steps around an alert that its chart shows at least.
_AROUND = 20


@client.command
def report(argv: Sequence[str]) -> int:
    """Writes the report of a run."""
    parser = client.parser(
        "report",
        "Writes a run into one HTML file that needs no server and no network: headline, alerts "
        "with their evidence, curves, checks, configuration.",
        prints_json=False,
    )
    parser.add_argument("run", metavar="RUN", type=client.run_id, help="id of the run")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="HTML file to write"
    )
    options = parser.parse_args(argv)
    content = render(_collect(client.server_of(options), options)).encode()
    with refusals(f"cannot write {options.output}", client.FAILED):
        write_whole(options.output, content)
    print(f"{options.output}: {len(content) / 1e6:.1f} MB")
    return client.OK


def _collect(server: client.Server, options: argparse.Namespace) -> Report:
    facts = load(server, options.run, points=2)
    metrics = server.get(f"{client.run_path(options.run)}/metrics", {"tensors": "false"})
    names = [metric["name"] for metric in metrics["items"]]
    figures = _Figures(server, facts, frozenset(names))
    # First what is wrong: where there is no room for more, it is the curves that are left out.
    of_alerts = list(figures.of_alerts())
    charts, left_out = figures.of_the_run(names)
    return Report(
        run=facts.run,
        verdict=facts.verdict,
        headline=headline(facts),
        alerts=of_alerts,
        charts=charts,
        configuration=sorted(flattened(facts.run["config"])),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        left_out=left_out,
    )


class _Figures:
    """The figures of the dashboard, as the server draws them."""

    def __init__(self, server: client.Server, facts: RunFacts, metrics: frozenset[str]) -> None:
        self._server = server
        self._facts = facts
        self._metrics = metrics
        self._used = 0
        self._folder = f"{client.run_path(facts.run['id'])}/figures"

    def of_the_run(self, names: Sequence[str]) -> tuple[list[Chart], list[str]]:
        """Charts of all steps, and what is left out: sentences."""
        wanted = [name for name in _CURVES if name in self._metrics]
        evaluations = sorted(name for name in names if name.startswith("eval/"))
        shown = (wanted + evaluations)[:_MOST_CURVES]
        bits = self._divergence("Are the replicas identical?", {})
        charts = [chart for name in shown if (chart := self._curves(name, name)) is not None]
        missing = len(names) - len(charts)
        left_out = [f"{missing} further series of the run: on its page, not shown here."]
        return [*([bits] if bits else []), *charts], left_out if missing else []

    def of_alerts(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]], Chart | None]]:
        """Roots with what follows from them and a chart of the steps around them."""
        by_id = {alert["id"]: alert for alert in self._facts.alerts}
        drawn = 0
        for alert in self._facts.roots:
            below = [by_id[one] for one in alert["consequences"] if one in by_id]
            chart = self._of_alert(alert) if drawn < _MOST_ALERT_CHARTS else None
            drawn += chart is not None
            yield alert, below, chart

    def _of_alert(self, alert: dict[str, Any]) -> Chart | None:
        first, last = alert["first_step"], alert["last_step"]
        room = max(_AROUND, last - first) // 2
        steps = {
            "from_step": str(max(0, first - room)),
            "to_step": str(max(last, min(last + room, self._facts.run["last_step"]))),
        }
        choice = alert_chart.choose(alert["kind"], alert["evidence"], self._metrics)
        if choice.bits:
            stage = {"stage": alert["stage"]} if alert["stage"] else {}
            chart = self._divergence(f"Around step {first}", steps | stage)
            if chart is not None:
                return chart
        if choice.metric is None:
            return None
        ranks = ",".join(map(str, alert["ranks"]))
        title = f"{choice.metric} around step {first}"
        return self._curves(choice.metric, title, steps | ({"highlight": ranks} if ranks else {}))

    def _curves(self, metric: str, title: str, more: dict[str, str] | None = None) -> Chart | None:
        query = {"metric": metric, "max_points": _POINTS, **(more or {})}
        return self._chart(title, self._figure("curves.json", query))

    def _divergence(self, title: str, more: dict[str, str]) -> Chart | None:
        if len(self._facts.run["ranks"]) < 2:
            return None
        count = len(self._facts.run["ranks"])
        columns = max(20, min(160, _CELLS // count))
        figure = self._figure("divergence.json", {"columns": str(columns), **more})
        if not figure["layout"].get("meta", {}).get("stages"):
            return None
        return self._chart(title, figure, tall=min(120 + 14 * count, 480))

    def _chart(self, title: str, figure: dict[str, Any], tall: int | None = None) -> Chart | None:
        """The chart, as long as there is room for it."""
        size = len(json.dumps(figure))
        if self._used + size > _BUDGET:
            return None
        self._used += size
        return Chart(title, figure, tall)

    def _figure(self, name: str, query: dict[str, str]) -> dict[str, Any]:
        return self._server.get(f"{self._folder}/{name}", query, prefix="")
