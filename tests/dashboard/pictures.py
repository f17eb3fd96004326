"""Pictures of every page, for people to look at: `make pictures ARGS="-o FOLDER"`.

Runs of 2, 16, 256 and 1,024 ranks, broken in several ways, on a server of its own; light and dark,
at the widths of a desk and of a phone. What no test can say (ugly, crowded, hard to read) is seen
here; and each page is checked for what a test can: nothing reaches beyond the window, no console
error.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
from playwright.sync_api import Browser

from rankscope.agent.wire import codec
from rankscope.agent.wire.batch import Batch, Column
from tests.support.runs.fixture_run import SyntheticRun, post, wait_until_evaluated
from tests.support.runs.read_data import ReadRun
from tests.support.servers.browser import chromium, wait_until_drawn, watched_page
from tests.support.servers.service import Service

WIDTHS = {"desk": 1400, "phone": 400}
SCHEMES = ("light", "dark")
RUNS = (
    SyntheticRun(run="ranks-2", ranks=2, steps=300, told=True),
    SyntheticRun(run="ranks-16", ranks=16, steps=300, desync=(5, 140), nan=(3, 220), told=True),
    SyntheticRun(run="ranks-256", ranks=256, steps=200, desync=(99, 120), told=True, buckets=8),
    SyntheticRun(run="ranks-1024", ranks=1024, steps=64, desync=(777, 32), told=True, buckets=4),
)
# What each rank read, of few ranks: of a thousand it is the same picture.
READ = ReadRun("data", ranks=16, steps=64, epoch=32, same=((5, 3),))
LIVING = SyntheticRun(run="living", ranks=4, steps=4000, state="running", project="speech")
PAGES = {
    "runs": "/",
    "fleet": "/fleet",
    "alerts": "/alerts",
    "notifications": "/notifications",
    "compare": "/compare?runs=ranks-2,ranks-16",
    "login": "/login",
    "not-there": "/runs/ranks-3",
    "data": "/runs/data",
    "living": "/runs/living",
    **{run.run: f"/runs/{run.run}" for run in RUNS},
}
# Taller pages than this are cut off: a screen of a desk has 900.
_TALLEST = 12_000


def with_times(run: SyntheticRun) -> Iterator[Batch]:
    """A run's batches with where its time goes, and its memory; the last rank is slow."""
    for batch in run.batches(size=run.steps):
        steps = np.arange(run.steps)
        slow = batch.rank == run.ranks - 1
        parts = {
            "data_seconds": 0.002,
            "compute_seconds": 0.018,
            "wait_seconds": 0.0005 if slow else 0.006,
            "process_resident_memory_bytes": 2.1e9 + 1e7 * batch.rank,
            "samples": 32.0,
        }
        columns = {name: Column(steps, np.full(run.steps, v)) for name, v in parts.items()}
        yield replace(batch, columns=batch.columns | columns)


def fill(server: str) -> None:
    """Posts all runs and waits until they have been judged."""
    headers = {"Content-Type": codec.CONTENT_TYPE}
    with httpx.Client(base_url=server, headers=headers, timeout=60) as client:
        for run in RUNS:
            for batch in with_times(run):
                client.post("/api/v1/ingest", content=codec.encode(batch)).raise_for_status()
    READ.post(server)
    post(server, LIVING, 0, 900, size=300)
    for run in (*RUNS, READ.posted):
        wait_until_evaluated(server, run, 600)


def take(browser: Browser, server: str, name: str, folder: Path) -> list[str]:
    """Pictures of a page, down to its end; returns what is wrong with it."""
    wrong = []
    for (where, width), scheme in itertools.product(WIDTHS.items(), SCHEMES):
        with watched_page(browser, server, width=width, scheme=scheme) as watched:
            page, path = watched.page, PAGES[name]
            page.goto(path)
            # The lists come after the frame.
            page.wait_for_timeout(1500)
            for _ in range(2):
                # Charts draw when they come into view: the window becomes as tall as the page.
                tall = page.evaluate("document.documentElement.scrollHeight")
                page.set_viewport_size({"width": width, "height": min(max(900, tall), _TALLEST)})
                page.wait_for_timeout(1500)
                if page.query_selector("#headline"):
                    wait_until_drawn(page)
            page.screenshot(path=folder / f"{name}-{where}-{scheme}.png")
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                wrong.append(f"{name}, {where}: {wide} pixels wide in a window of {width}")
            said = [c for c in watched.complaints if "404" not in c]
            wrong += [f"{name}, {where}, {scheme}: {c}" for c in said]
    return wrong


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("pictures"))
    parser.add_argument("--only", nargs="*", choices=PAGES, default=list(PAGES))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as home, Service(Path(home)) as service:
        began = time.monotonic()
        fill(service.url)
        print(f"runs posted and judged in {time.monotonic() - began:.0f} s", flush=True)
        with chromium() as browser:
            for name in options.only:
                wrong += take(browser, service.url, name, options.output)
                print(f"{name}: {len(WIDTHS) * len(SCHEMES)} pictures", flush=True)
    print("\n".join(wrong) or f"nothing is too wide, no console error; {options.output}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
