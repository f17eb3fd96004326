"""The charts of a run's page: what they draw, and how a mouse is moved over them."""

from __future__ import annotations

from typing import Any

import numpy as np
from playwright.sync_api import Page

_LINES = """(metric) => {
  const card = document.querySelector(`.chart[data-metric="${CSS.escape(metric)}"] .plot`);
  return card.data.filter((t) => t.meta && t.meta.role === "raw").map((t) => {
    const finite = (v) => (Number.isFinite(v) ? v : String(v));
    const plain = (a) => Array.from(a._inputArray ?? a, finite);
    return { name: t.name, x: plain(t.x), y: plain(t.y) };
  });
}"""


def lines(page: Page, metric: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What a chart really draws: name -> (steps, values)."""
    page.locator(f'.chart[data-metric="{metric}"]').scroll_into_view_if_needed()
    page.wait_for_selector(f'.chart[data-metric="{metric}"][data-drawn]')
    return {
        t["name"]: (np.array(t["x"], int), np.array(t["y"], float))
        for t in page.evaluate(_LINES, metric)
    }


def axis(page: Page, metric: str, name: str = "xaxis") -> dict[str, Any]:
    """Type and range of an axis of a chart."""
    found: dict[str, Any] = page.evaluate(
        """([metric, name]) => {
          const plot = document.querySelector(`.chart[data-metric="${metric}"] .plot`);
          const axis = plot._fullLayout[name];
          return { type: axis.type, range: axis.range };
        }""",
        [metric, name],
    )
    return found


def wait_for_figure(page: Page, condition: str, metric: str = "loss") -> None:
    """Waits until `condition` (JavaScript; `plot` is the chart's element) holds."""
    page.wait_for_function(
        f"""(metric) => {{
          const plot = document.querySelector(`.chart[data-metric="${{metric}}"] .plot`);
          return plot && plot._fullLayout && ({condition});
        }}""",
        arg=metric,
    )


def parameters(page: Page) -> dict[str, str]:
    """What the page's address says of it."""
    return dict(part.split("=", 1) for part in page.url.partition("?")[2].split("&") if part)


def drag(page: Page, selector: str, start: float, end: float) -> None:
    """Drags over a part of a chart, in shares of its plot area."""
    box = page.locator(f"{selector} .nsewdrag").first.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + start * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], y, steps=4)
    page.mouse.up()
