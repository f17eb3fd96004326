"""A real Chromium, driven by Playwright, that reports everything a page should not do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    expect,
    sync_playwright,
)

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A machine that is busy with other work needs a while for a page: no test measures that.
_PATIENCE_MS = 180_000
expect.set_options(timeout=_PATIENCE_MS)
HOW_TO_INSTALL = (
    "no Chromium on the PATH, looked for " + ", ".join(NAMES) + "; install one of them with the "
    "system's package manager, for example: apt-get install chromium"
)
# Nothing that would reach for the network by itself; no sandbox, as containers rarely allow one.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
    "--force-color-profile=srgb",
)


def find_chromium() -> str | None:
    """Path of an installed Chromium or Chrome."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser.

    Raises:
        FileNotFoundError: there is none; the message says what to install.
    """
    path = find_chromium()
    if path is None:
        raise FileNotFoundError(HOW_TO_INSTALL)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page, and what it did that it should not have done.

    Attributes:
        complaints: console errors and warnings, uncaught exceptions, refused resources.
        foreign: addresses outside the page's own origin that it asked for.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def assert_clean(self) -> None:
        """Fails with all complaints and foreign requests so far."""
        assert not self.complaints, self.complaints
        assert not self.foreign, self.foreign


def watch(page: Page, origin: str) -> Watched:
    """Listens to a page that may talk to `origin` only."""
    watched = Watched(page)

    def heard(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            watched.complaints.append(f"{message.type}: {message.text}")

    def asked(request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("data", "blob"):
            return
        if f"{parts.scheme}://{parts.netloc}" != origin.rstrip("/"):
            watched.foreign.append(request.url)

    page.on("console", heard)
    page.on("pageerror", lambda error: watched.complaints.append(f"exception: {error}"))
    page.on("request", asked)
    return watched


@contextmanager
def watched_page(
    browser: Browser, origin: str, *, width: int = 1400, height: int = 900, scheme: str = "light"
) -> Iterator[Watched]:
    """A fresh page with cookies and storage of its own."""
    context = browser.new_context(
        base_url=origin,
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(_PATIENCE_MS)
    try:
        yield watch(context.new_page(), origin)
    finally:
        context.close()


def wait_until_drawn(page: Page) -> None:
    """Returns once everything in view has been drawn and no figure is being fetched."""
    page.wait_for_function(
        """() => {
          const seen = (node) => {
            const box = node.getBoundingClientRect();
            return node.checkVisibility() && box.bottom > 0 && box.top < innerHeight;
          };
          const plots = [...document.querySelectorAll('.chart, #heat, #matrix')].filter(seen);
          return !document.querySelector('#headline[aria-busy]')
            && document.querySelector('#charts > *, #empty:not([hidden])')
            && plots.every((node) => node.dataset.drawn || node.querySelector('.broken'));
        }"""
    )


def save_screenshot(
    server: str,
    path: str,
    target: str,
    *,
    width: int = 1400,
    height: int = 900,
    scheme: str = "light",
    whole_page: bool = False,
) -> None:
    """Writes a picture (PNG) of a page of a running server.

    Args:
        server: its address.
        path: of the page, for example `/runs/brave-otter`.
        target: file to write.
        width: of the window, CSS pixels.
        height: of the window, CSS pixels.
        scheme: `light` or `dark`.
        whole_page: everything down to the end of the page instead of what the window shows.
    """
    with (
        chromium() as browser,
        watched_page(browser, server, width=width, height=height, scheme=scheme) as watched,
    ):
        page = watched.page
        page.goto(path)
        if "/runs/" in path:
            wait_until_drawn(page)
        if whole_page:
            # Charts draw when they come into view: make the window as tall as the page.
            tall = page.evaluate("document.documentElement.scrollHeight")
            page.set_viewport_size({"width": width, "height": max(height, tall)})
            page.evaluate("new Promise(requestAnimationFrame)")
            if "/runs/" in path:
                wait_until_drawn(page)
        page.evaluate("document.fonts.ready")
        page.screenshot(path=target, full_page=whole_page)
