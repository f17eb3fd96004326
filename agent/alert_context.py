"""What a person wants to see around an alert, where the trainer has asked for it.

The last lines that each rank has printed, sent when something happens; and what the working tree
has that its commit has not, sent once. Both are bounded, and what looks like a secret is masked
before it leaves the process.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.agent.process.console import Console
from rankscope.agent.process.git import commit_of, diff_of
from rankscope.agent.process.secrets import masked
from rankscope.agent.wire import Event

if TYPE_CHECKING:
    from rankscope.agent.delivery.session import Session
    from rankscope.agent.guard import Probe
    from rankscope.agent.steps.count import StepCount
    from rankscope.agent.verdict import Judgement

# Characters of one report, reports of one process, and seconds between two of them: 40 kB of each
# rank at most, which is what 10,000 points of a series take.
_CHARACTERS, _REPORTS, _SECONDS = 8_000, 5, 2.0
# Characters of a difference: more than anybody reads, and a fourth of what an event may have.
_DIFF_CHARACTERS = 60_000
# Characters of one line.
_LINE_CHARACTERS = 500
_JOIN_SECONDS = 1.0


class Surroundings:
    """Reports what is around a training process.

    Args:
        connection: where it goes; the first rank alone says what the working tree has.
        count: of the steps.
        guard: contains what goes wrong in here.
    """

    def __init__(self, connection: Session, count: StepCount, guard: Probe) -> None:
        options = connection.options
        self._records, self._count, self._guard = connection.records, count, guard
        self._console = Console(options.console, guard) if options.console else None
        self._reports, self._reported_at, self._written = 0, -math.inf, 0
        self._lock = threading.RLock()
        self._diff: threading.Thread | None = None
        if options.git_diff and connection.identity.rank == 0:
            self._diff = threading.Thread(
                target=guard(self._report_diff), name="rankscope-diff", daemon=True
            )

    def begin(self, judgement: Judgement | None) -> None:
        """Listens from now on.

        Args:
            judgement: asked for alerts, at each of which the last lines are sent.
        """
        if self._diff is not None:
            self._diff.start()
        if self._console is not None:
            self._console.begin()
            if judgement is not None:
                judgement.on_alert(lambda alert: self.report(), "warning")

    def report(self) -> None:
        """Sends the last lines, where there are new ones and few were sent; from any thread."""
        if self._console is None:
            return
        with self._lock:
            now, written = time.monotonic(), self._console.written
            is_new = written != self._written or not self._reports
            if not is_new or self._reports >= _REPORTS or now - self._reported_at < _SECONDS:
                return
            self._reports, self._reported_at, self._written = self._reports + 1, now, written
        text = masked("\n".join(self._console.tail), os.environ)
        text = "\n".join(line[:_LINE_CHARACTERS] for line in text.split("\n"))
        lines = text[-_CHARACTERS:].split("\n")
        if len(text) > _CHARACTERS:
            lines = lines[1:]  # the first is cut off
        step = max(self._count.step - 1, 0)
        self._records.event(Event(step=step, kind="console", data={"lines": lines}))

    def end(self) -> None:
        """Listens no more."""
        if self._console is not None:
            self._console.end()
        if self._diff is not None and self._diff.is_alive():
            self._diff.join(_JOIN_SECONDS)

    def _report_diff(self) -> None:
        script = sys.argv[0] if sys.argv else ""
        folder = Path(script).absolute().parent if os.path.isfile(script) else Path.cwd()
        found = diff_of(folder, most=4 * _DIFF_CHARACTERS)
        if not found:
            return
        text = masked(found, os.environ)
        data = {
            "commit": commit_of(folder),
            "diff": text[:_DIFF_CHARACTERS],
            "truncated": len(text) > _DIFF_CHARACTERS,
        }
        self._records.event(Event(step=0, kind="git.diff", data=data))
