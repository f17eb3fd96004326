"""How long the page of a run takes in a real browser, from an empty cache.

    python -m benchmarks.page --ranks 1024 --rounds 5 --beside /tmp/before

Posts a run to a server of its own, then opens its page in a new Chromium each time: until the
verdict stands there in words, until the first curve can be seen, and until it is drawn by the
library with all that a pointer does; and the processor time of server and browser until then.
`--beside` names another checkout, with an environment of its own in `.venv`: both are measured in
turns on copies of one database, as on a machine with other work only their ratio says something.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
from playwright.sync_api import sync_playwright

from rankscope.agent.wire import codec
from rankscope.server.demo.processes import RANKSCOPE, Process, free_port
from tests.support.runs.fixture_run import SyntheticRun
from tests.support.servers.browser import FLAGS, find_chromium
from tests.support.servers.service import Service

_ROOT = Path(__file__).parent.parent
# Steps of a batch: ranks that post all they have at once are too far apart in time to be compared.
_A_BATCH = 16
_PATIENCE_S = 120
# Seconds in which what came last is judged, rolled up and merged.
_SETTLES_S = 20
# No layout is asked for: that would be measured, too.
_WATCH = """(() => {
  const found = (window.found = {});
  const look = () => {
    const there = {
      verdict: '#headline:not([aria-busy])',
      curve: '.chart .sketch path, .chart[data-drawn]',
      drawn: '.chart[data-drawn]',
    };
    for (const [name, what] of Object.entries(there)) {
      if (name in found || !document.querySelector(what)) continue;
      found[name] = performance.now();
    }
  };
  new MutationObserver(look).observe(document, {
    subtree: true, childList: true, attributes: true, attributeFilter: ['aria-busy', 'data-drawn'],
  });
})()"""


def fill(folder: Path, run: SyntheticRun) -> None:
    """Posts a run to a server on a database in a folder, and waits until it has been judged."""
    with Service(folder) as service:
        headers = {"Content-Type": codec.CONTENT_TYPE}
        with httpx.Client(base_url=service.url, headers=headers, timeout=_PATIENCE_S) as client:
            for batch in run.batches(size=_A_BATCH):
                client.post("/api/v1/ingest", content=codec.encode(batch)).raise_for_status()
        time.sleep(_SETTLES_S)


def serve(stack: ExitStack, tree: Path, database: Path) -> tuple[str, int]:
    """Address and process of a server of a checkout on a copy of a database."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    shutil.copy(database, folder / database.name)
    address = f"sqlite:///{folder / database.name}"
    port = free_port()
    rankscope = RANKSCOPE if tree == _ROOT else (str(tree / ".venv/bin/rankscope"),)
    command = [*rankscope, "serve", "--port", str(port), "--db", address]
    process = stack.enter_context(Process(command, log=folder / "server.log"))
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return url, process.pid
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, process.tail(40)
        time.sleep(0.1)


def cpu_ms(pid: int) -> float:
    """Processor time of a process and those below it, in milliseconds."""
    parent = psutil.Process(pid)
    total = 0.0
    for process in (parent, *parent.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += 1000 * (times.user + times.system)
    return total


def measure(url: str, server: int, run: str, height: int) -> dict[str, float]:
    """Milliseconds from the start of the navigation, and of processor time until it is drawn."""
    mine = psutil.Process()
    before = {child.pid for child in mine.children(recursive=True)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
        try:
            new = [c for c in mine.children(recursive=True) if c.pid not in before]
            root = min(
                (c for c in new if "chrom" in c.name()), key=lambda process: process.create_time()
            )
            page = browser.new_page(viewport={"width": 1400, "height": height})
            page.set_default_timeout(1000 * _PATIENCE_S)
            page.add_init_script(_WATCH)
            began = cpu_ms(root.pid), cpu_ms(server)
            page.goto(f"{url}/runs/{run}", wait_until="commit")
            page.wait_for_function("() => found.verdict && found.drawn", polling=50)
            ended = cpu_ms(root.pid), cpu_ms(server)
            found: dict[str, float] = page.evaluate("found")
        finally:
            browser.close()
    return found | {"browser_cpu": ended[0] - began[0], "server_cpu": ended[1] - began[1]}


def main() -> int:
    """Prints medians, and from where to where they reach."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--height", type=int, default=2000, help="of the window, in pixels")
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run = SyntheticRun(run="wide", ranks=options.ranks, steps=options.steps, told=True, buckets=4)
    trees = {"this": _ROOT} | ({"beside": options.beside} if options.beside else {})
    results: dict[str, list[dict[str, float]]] = defaultdict(list)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fill(home, run)
        database = home / "rankscope.db"
        servers = {name: serve(stack, tree, database) for name, tree in trees.items()}
        for turn in range(options.rounds + 1):
            for name in list(servers)[:: 1 if turn % 2 else -1]:
                found = measure(*servers[name], run.run, options.height)
                # The first is of a server that has answered nothing yet.
                results[name] += [found] if turn else []
    for name, lines in results.items():
        sys.stdout.write(f"{name}, load average {os.getloadavg()[0]:.1f}\n")
        for what in lines[0]:
            of: list[Any] = [line[what] for line in lines]
            sys.stdout.write(
                f"  {what:12} {statistics.median(of):7.0f} ms ({min(of):.0f} to {max(of):.0f})\n"
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
