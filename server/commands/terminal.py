"""A run in the terminal: headline, alerts, numbers of the ranks, the course of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rankscope.server.commands.run_facts import RunFacts, headline, said_by
from rankscope.server.detectors.mechanisms.wording import count, listing, number, ranks

MOST_RANKS = 16
_MOST_ALERTS = 8
_STYLES = {
    "ok": "bold green",
    "warning": "bold yellow",
    "critical": "bold red",
    "info": "bold blue",
    "muted": "bold",
}
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = ".:-=+*%#"
# What does not lie on the scale: NaN and infinities.
_LOST = "!"


def console(**options: Any) -> Console:
    """A console that prints what it is given: no markup, no guessed colours, no emoji."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=False, **options)


def view(facts: RunFacts, *, width: int, plain: bool = False) -> RenderableType:
    """All of a run.

    Args:
        width: columns of the terminal.
        plain: for one that knows ASCII alone.
    """
    parts: list[RenderableType] = [*_headline(facts), Text(), _about(facts.run)]
    loss = mean_loss(facts.loss)
    if loss:
        parts += [Text(), *_loss(loss, width, plain)]
    parts += [Text(), _ranks(facts)]
    if len(facts.run["rank_status"]) > MOST_RANKS:
        more = len(facts.run["rank_status"]) - MOST_RANKS
        parts.append(Text(f"and {count(more, 'more rank')}"))
    parts += [*_alerts(facts), *_checks(facts)]
    return Group(*parts)


def sparkline(values: Sequence[float], *, width: int, plain: bool = False) -> str:
    """A line of bars, at most `width`, from the smallest to the largest finite value."""
    bars = _PLAIN_BARS if plain else _BARS
    cells = _resampled(values, width)
    finite = [value for value in cells if math.isfinite(value)]
    if not finite:
        return _LOST * len(cells)
    low, span = min(finite), max(finite) - min(finite)
    top = len(bars) - 1

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return _LOST
        return bars[round(top * (value - low) / span) if span else 0]

    return "".join(bar(value) for value in cells)


def mean_loss(series: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Step and mean over the ranks, at steps that as many ranks have as any."""
    by_step: dict[int, list[float]] = {}
    for one in series:
        for step, value in zip(one["steps"], one["values"], strict=True):
            by_step.setdefault(step, []).append(float(value))
    most = max((len(values) for values in by_step.values()), default=0)
    return [
        (step, sum(values) / len(values))
        for step, values in sorted(by_step.items())
        if len(values) == most
    ]


def _resampled(values: Sequence[float], width: int) -> list[float]:
    """Means of equal parts; one that holds a value that is not finite is not finite."""
    if len(values) <= width:
        return list(values)
    edges = [round(n * len(values) / width) for n in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a]


def _headline(facts: RunFacts) -> Iterator[RenderableType]:
    said = headline(facts)
    yield Text.assemble((said.word, _STYLES[said.tone]), f"  {said.title}")
    for detail in said.details:
        yield Text(detail, style="dim")


def _about(run: dict[str, Any]) -> Text:
    step = "no step yet" if run["last_step"] < 0 else f"step {run['last_step']}"
    seen = datetime.fromisoformat(run["last_seen_at"]).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Text(
        f"{run['id']} ({run['project']}): {run['state']}, {len(run['ranks'])} of "
        f"{run['world_size']} ranks, {step}, last heard of {seen}"
    )


def _loss(loss: Sequence[tuple[int, float]], width: int, plain: bool) -> Iterator[Text]:
    values = [value for _, value in loss]
    yield Text(
        f"loss {number(values[0])} at step {loss[0][0]}, {number(values[-1])} at step "
        f"{loss[-1][0]} (mean over the ranks)"
    )
    yield Text(sparkline(values, width=max(width, 1), plain=plain), no_wrap=True, overflow="crop")


def _ranks(facts: RunFacts) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("RANK", "LAST STEP", "LOSS", "STEP TIME"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    table.add_column("HOST", overflow="ellipsis", no_wrap=True)
    suspects = facts.suspects
    status = sorted(facts.run["rank_status"], key=lambda r: (r["rank"] not in suspects, r["rank"]))
    for one in status[:MOST_RANKS]:
        suspect = one["rank"] in suspects
        state = f"{one['state']}{', suspect' if suspect else ''}"
        table.add_row(
            str(one["rank"]),
            "-" if one["last_step"] < 0 else str(one["last_step"]),
            _number(one["loss"]),
            _seconds(one["step_seconds"]),
            Text(state, style="red" if suspect or one["state"] == "failed" else ""),
            Text(one["host"]),
        )
    return table


def _alerts(facts: RunFacts) -> Iterator[RenderableType]:
    roots = [a for a in facts.roots if a["severity"] != "info" or a["state"] == "open"]
    yield Text()
    if not roots:
        yield Text("No alert.")
        return
    for alert in roots[:_MOST_ALERTS]:
        yield from alert_lines(alert)
    if len(roots) > _MOST_ALERTS:
        yield Text(f"and {len(roots) - _MOST_ALERTS} more: `rankscope alerts` has all of them")


def alert_lines(alert: dict[str, Any]) -> Iterator[Text]:
    """An alert: what, since when, who, what to do."""
    notes = [alert["state"]]
    if alert["acknowledged"]:
        notes.append(f"acknowledged {said_by(alert['acknowledgement'])}".rstrip())
    if alert["silenced"]:
        notes.append(f"silenced {said_by(alert['silence'])}".rstrip())
    yield Text.assemble(
        (alert["severity"].upper(), _STYLES[alert["severity"]]),
        f" {alert['kind']} ({', '.join(notes)}): {alert['title']}",
    )
    who = f", {ranks(alert['ranks'])}" if alert["ranks"] else ""
    tensors = f", in {listing(alert['tensors'], most=3)}" if alert["tensors"] else ""
    yield Text(f"  since step {alert['first_step']}{who}{tensors}")
    if alert["state"] == "open" and alert["remedy"]:
        yield Text(f"  {alert['remedy']}")


def _checks(facts: RunFacts) -> Iterator[Text]:
    states = [check["state"] for check in facts.verdict["checks"]]
    passed, failed, left = (states.count(s) for s in ("passed", "failed", "not_run"))
    yield Text()
    yield Text(
        f"Verdict: {facts.verdict['verdict']}. Checks: {passed} passed, {failed} failed, {left} "
        "not run."
    )


def _number(value: float | str | None) -> str:
    return "-" if value is None else number(float(value))


def _seconds(value: float | str | None) -> str:
    if value is None:
        return "-"
    seconds = float(value)
    return f"{number(1000 * seconds)} ms" if seconds < 1 else f"{number(seconds)} s"
