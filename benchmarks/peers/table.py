"""The results as text."""

from __future__ import annotations

from typing import Any

# The lines that the others are compared with: what a user of Rankscope writes, and what is fastest.
_OURS = {"ordinary": "rankscope, ordinary", "fast": "rankscope, fast"}
_HEAD = (
    "tracker, way",
    "version",
    "points",
    "points/s",
    "ratio",
    "bytes a point",
    "ratio",
    "log call us (p99)",
    "read ms",
)


def peers(results: dict[str, Any]) -> str:
    """Markdown: a line for each tracker and way; those that failed below, with the reason.

    Ratios are Rankscope's figure of the same way (ordinary or fast) to the line's for points a
    second, the line's to Rankscope's for bytes: above 1, Rankscope is the better one.
    """
    ways = results["ways"]
    rows = []
    for name, line in ways.items():
        if "failed" in line:
            continue
        ours = ways[_OURS[name.rpartition(", ")[2]]]
        call = line["call_us"]
        rows.append(
            (
                name,
                line["version"],
                f"{line['points']:,.0f}",
                f"{line['points_per_s']:,.0f}",
                _ratio(ours.get("points_per_s"), line["points_per_s"]),
                f"{line['bytes_per_point']:.1f}",
                _ratio(line["bytes_per_point"], ours.get("bytes_per_point")),
                f"{call['p50']:,.1f} ({call['p99']:,.0f})",
                "-" if line["read_ms"] is None else f"{line['read_ms']:,.0f}",
            )
        )
    failed = [f"- {name}: {line['failed']}" for name, line in ways.items() if "failed" in line]
    text = markdown(_HEAD, rows)
    return text if not failed else text + "\nNot measured:\n\n" + "\n".join(failed) + "\n"


def _ratio(above: float | None, below: float | None) -> str:
    return "-" if above is None or not below else f"{above / below:,.2f}"


def own(parts: dict[str, Any]) -> str:
    """Markdown: what Rankscope alone was measured for; a part that failed with the reason."""
    rows = []
    for part, found in parts.items():
        if "failed" in found:
            rows.append((part, "not measured", found["failed"], ""))
            continue
        rows += [(part, *row) for row in _ROWS[part](found["report"])]
        if found["exit_code"]:
            rows.append((part, "exit code", str(found["exit_code"]), "its own goal is missed"))
    return markdown(("part", "figure", "measured", "goal"), rows)


def _ingest(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    latency = report["latency_ms"]
    per_cpu = report["points_per_server_cpu_s"]
    return [
        ("points a second over HTTP, committed", f"{report['points_per_s']:,.0f}", "500,000"),
        ("points a second of the server's CPU", "-" if per_cpu is None else f"{per_cpu:,.0f}", ""),
        ("ms a post, 50 / 99 %", f"{latency['p50']:,.0f} / {latency['p99']:,.0f}", ""),
        ("bytes a point", f"{report['disk_bytes_per_point']:.1f}", "12"),
        ("refused, errors", f"{report['refused']}, {report['errors']}", "0, 0"),
    ]


def _query(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    size = f"{report['ranks']} x {report['steps']:,} x {report['metrics']}"
    return [
        (
            f"{view['view']} ({size}), ms 50 / 95 %",
            f"{view['median_ms']:.0f} / {view['p95_ms']:.0f}",
            "" if view["goal_ms"] is None else str(view["goal_ms"]),
        )
        for view in report["views"]
    ]


def _evaluation(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    seen = report["visible"]
    size = f"{report['ranks']} ranks, {report['pace']:.0f} steps/s"
    text = f"{seen['p50_ms']:,.0f} / {seen['p95_ms']:,.0f}"
    return [
        (f"ms from a step's end to its alert ({size}), 50 / 95 %", text, "1,000"),
        ("alerts missed", str(report["missed"]), "0"),
    ]


def _agent(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for name, found in report["calls"].items():
        if isinstance(found, str):
            rows.append((f"{name}, 20 scalars", found, ""))
            continue
        for where, times in found.items():
            figure = f"{times['median_us']:,.1f} ({times['p99_us']:,.0f})"
            rows.append((f"{name}, 20 scalars, {where.replace('_', ' ')}, us (p99)", figure, ""))
    for name, found in report["workloads"].items():
        mean = found["agent"]["mean"]
        text = "too few steps"
        if mean is not None:
            text = f"{mean['value']:.3f} [{mean['low']:.3f}, {mean['high']:.3f}]"
        rows.append((f"{name}: step time with the agent to without", text, ""))
    return rows


_ROWS = {"ingest": _ingest, "query": _query, "evaluation": _evaluation, "agent": _agent}


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table whose columns stand below each other."""
    table = [head, *rows]
    widths = [max(len(row[n]) for row in table) for n in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in table
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"
