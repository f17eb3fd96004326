"""Colours and the plotly template of the light and of the dark page.

Text stands out from its background by at least 4.5 : 1 (WCAG AA) in both; a test measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

# Viridis (matplotlib, CC0), sampled at equal distances: sequential and safe for colour-blind eyes.
_VIRIDIS = (
    "#440154", "#481a6c", "#472f7d", "#414487", "#39568c", "#31688e", "#2a788e", "#23888e",
    "#1f988b", "#22a884", "#35b779", "#54c568", "#7ad151", "#a5db36", "#d2e21b", "#fde725",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of one appearance.

    Attributes:
        rank_scale: part of viridis (0 to 1) that stands out from `panel`.
        critical, warning, info: text, lines and marks of alerts.
        equal: cells whose ranks hold the same bits.
        unsized: cells that differ by an unknown amount.
        unchecked: background of the cells that nobody compared.
        differing: colour scale of the distances, from the smallest to the largest.
    """

    name: str
    page: str
    panel: str
    text: str
    muted: str
    grid: str
    critical: str
    warning: str
    info: str
    accent: str
    equal: str
    unsized: str
    unchecked: str
    rank_scale: tuple[float, float]
    differing: tuple[str, ...]

    def severity(self, name: str) -> str:
        """Colour of an alert's severity."""
        return {"critical": self.critical, "warning": self.warning}.get(name, self.info)


LIGHT = Theme(
    name="light",
    page="#f5f6f8",
    panel="#ffffff",
    text="#18202b",
    muted="#566173",
    grid="#e6e9ee",
    critical="#b42318",
    warning="#8a5200",
    info="#1d5bc4",
    accent="#1d5bc4",
    equal="#cfe3f2",
    unsized="#7d4fb5",
    unchecked="#f0f1f3",
    rank_scale=(0.0, 0.74),
    differing=("#fdc070", "#f9903f", "#e55a1f", "#b8301a", "#7a0f14"),
)
DARK = Theme(
    name="dark",
    page="#0e131a",
    panel="#161d27",
    text="#e7ecf3",
    muted="#9daabb",
    grid="#273140",
    critical="#ff8b80",
    warning="#f5bd5c",
    info="#85b4ff",
    accent="#85b4ff",
    equal="#1f4159",
    unsized="#b794f0",
    unchecked="#1d2530",
    rank_scale=(0.3, 1.0),
    differing=("#8f3b12", "#c4561a", "#ee8130", "#ffb454", "#ffe9a6"),
)
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}


def rank_colors(count: int, theme: Theme) -> list[str]:
    """One colour (`#rrggbb`) for each of `count` ranks, in the order of the ranks."""
    return [rank_color(place, count, theme) for place in range(count)]


def rank_color(place: int, count: int, theme: Theme) -> str:
    """That of the rank at a place, from 0, among `count` of them."""
    low, high = theme.rank_scale
    return _mix(_VIRIDIS, low + (high - low) * (place / (count - 1) if count > 1 else 0.35))


def faded(color: str, opacity: float) -> str:
    """`#rrggbb` as a colour with the given opacity, 0 to 1."""
    red, green, blue = _channels(color)
    return f"rgba({red},{green},{blue},{opacity:g})"


def blended(color: str, ground: str, share: float) -> str:
    """`#rrggbb`: so much of a colour, 0 to 1, on a ground; as `faded`, and never seen through."""
    pairs = zip(_channels(color), _channels(ground), strict=True)
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


def layout(theme: Theme) -> dict[str, Any]:
    """What all figures have in common; the size is left to the container."""
    axis = {
        "gridcolor": theme.grid,
        "linecolor": theme.grid,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": theme.grid,
        "title": {"font": {"size": 12, "color": theme.muted}, "standoff": 8},
        "tickfont": {"size": 11, "color": theme.muted},
        "automargin": True,
    }
    return {
        # An empty template: plotly's default one adds 6 kB to every answer and its own colours.
        "template": {"layout": {"xaxis": axis, "yaxis": axis}},
        "font": {"family": FONT, "size": 12, "color": theme.text},
        "paper_bgcolor": theme.panel,
        "plot_bgcolor": theme.panel,
        "margin": {"l": 56, "r": 16, "t": 24, "b": 40},
        "hoverlabel": {
            "bgcolor": theme.panel,
            "bordercolor": theme.muted,
            "font": {"family": FONT, "size": 12, "color": theme.text},
            "namelength": -1,
        },
        "legend": {"font": {"size": 11, "color": theme.muted}, "bgcolor": "rgba(0,0,0,0)"},
    }


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _mix(scale: tuple[str, ...], position: float) -> str:
    place = min(max(position, 0.0), 1.0) * (len(scale) - 1)
    low = min(int(place), len(scale) - 2)
    share = place - low
    pairs = zip(_channels(scale[low]), _channels(scale[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
