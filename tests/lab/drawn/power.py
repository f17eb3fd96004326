"""Tables and curves of what was found, by site, timing and size of effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]

_PARTS = ("tuning", "judging")


def table(lines: Sequence[Line]) -> str:
    """Both parts: what was found of what matters, and false alarms of healthy runs."""
    rows = [f"{'':28}{'runs':>6}{'matter':>8}{'found':>7}{'placed':>8}{'rank':>12}{'step':>7}"]
    for part in _PARTS:
        faulty = [x for x in lines if x["faulty"] and x["part"] == part and not x["error"]]
        if not faulty:
            continue
        rows.append(_row(f"{part}: all", faulty))
        for name, key in (("site", _site), ("timing", _timing), ("scope", _scope)):
            for value in sorted({key(x) for x in faulty}):
                rows.append(_row(f"  {name} {value}", [x for x in faulty if key(x) == value]))
    for part in _PARTS:
        healthy = [x for x in lines if not x["faulty"] and x["part"] == part and not x["error"]]
        alarmed = [x for x in healthy if x["false_alarms"]]
        if healthy:
            rows.append(f"{part}: healthy runs {len(healthy)}, with a warning {len(alarmed)}")
    broken = sum(bool(x["error"]) for x in lines)
    rows.append(f"not judged: {broken}")
    return "\n".join(rows)


def _row(name: str, faulty: Sequence[Line]) -> str:
    matter = [x for x in faulty if x["effect"]["matters"]]
    scores = [x["score"] for x in matter]
    found, placed, step = (sum(s[key] for s in scores) for key in ("found", "placed", "step"))
    ranked = [s["rank"] for s in scores if s["rank"] is not None]
    ranks = f"{sum(ranked)} of {len(ranked)}"
    return f"{name:28}{len(faulty):6}{len(matter):8}{found:7}{placed:8}{ranks:>12}{step:7}"


def _site(line: Line) -> str:
    return str(line["fault"]["site"])


def _timing(line: Line) -> str:
    return str(line["fault"]["timing"])


def _scope(line: Line) -> str:
    ranks, world = len(line["fault"]["ranks"]), line["recipe"]["world"]
    return "all ranks" if ranks == world else "one rank" if ranks == 1 else "some ranks"


# -------------------------------------------------------------------------------------- the page

_SIZES = (0.0, 0.3, 1.0, 2.0, 4.0, 10.0, float("inf"))
_WIDTH, _HEIGHT, _MARGIN = 560, 260, 46


def write_page(lines: Sequence[Line], page: Path) -> None:
    """The table, and a curve of power against size of effect beside it."""
    faulty = [x for x in lines if x["faulty"] and not x["error"] and x["effect"]]
    curves = {
        part: curve([x for x in faulty if x["part"] == part], lambda x: bool(x["score"]["found"]))
        for part in _PARTS
    }
    picture = page.with_suffix(".svg")
    picture.write_text(_svg({part: points for part, points in curves.items() if points}))
    page.write_text(
        "# What is found of faults that were drawn\n\n"
        "Made by `python -m tests.lab.drawn score FOLDER --page PAGE`. Families of faults are "
        "split once, by hash: detectors are tuned on one part, and the other is judged.\n\n"
        f"![found against size of effect]({picture.name})\n\n"
        "An effect of 1 is the least that has to be found: a norm or a loss tenfold, a final loss "
        "worse by three standard errors, steps half as long again; ranks that differ, values that "
        "are not finite and processes that end are 10.\n\n```\n" + table(lines) + "\n```\n"
    )


def curve(lines: Sequence[Line], good: Callable[[Line], bool]) -> list[tuple[float, float, int]]:
    """(effect, share that is good, runs), by size of effect."""
    points = []
    for low, high in zip(_SIZES, _SIZES[1:], strict=False):
        chosen = [x for x in lines if low <= x["effect"]["size"] < high]
        if chosen:
            middle = sorted(float(x["effect"]["size"]) for x in chosen)[len(chosen) // 2]
            share = sum(good(x) for x in chosen) / len(chosen)
            points.append((middle, share, len(chosen)))
    return points


def _svg(curves: dict[str, list[tuple[float, float, int]]]) -> str:
    """Drawn by hand: no library that is here writes a picture without a browser."""
    inner = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    colours = {"tuning": "#7a869a", "judging": "#1f6feb"}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for share in (0.0, 0.5, 0.9, 1.0):
        y = _MARGIN + inner[1] * (1 - share)
        parts.append(
            f'<path d="M{_MARGIN} {y}h{inner[0]}" stroke="#ddd"/>'
            f'<text x="8" y="{y + 4}">{share:.0%}</text>'
        )
    for place, (low, high) in enumerate(zip(_SIZES, _SIZES[1:], strict=False)):
        x = _MARGIN + inner[0] * (place + 0.5) / (len(_SIZES) - 1)
        label = f"{low:g}-{high:g}" if high < float("inf") else f"{low:g} and more"
        parts.append(f'<text x="{x}" y="{_HEIGHT - 24}" text-anchor="middle">{label}</text>')
    parts.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">size of the effect</text>'
    )
    for row, (part, points) in enumerate(curves.items()):
        places = []
        for effect, share, runs in points:
            place = sum(effect >= low for low in _SIZES) - 1
            x = _MARGIN + inner[0] * (place + 0.5) / (len(_SIZES) - 1)
            y = _MARGIN + inner[1] * (1 - share)
            places.append(f"{x:.1f},{y:.1f}")
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colours[part]}">'
                f"<title>{share:.0%} of {runs}</title></circle>"
            )
        parts.append(
            f'<polyline points="{" ".join(places)}" fill="none" stroke="{colours[part]}"/>'
            f'<text x="{_MARGIN + 90 * row}" y="20" fill="{colours[part]}">{part}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
