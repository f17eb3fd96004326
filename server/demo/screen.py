"""What the demo prints: one line of progress that is written over, and what stays."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

_INDENT = "    "
_PLAIN_PROGRESS_SECONDS = 5.0


class Screen:
    """Writes to a terminal, or, where standard output is none, plain lines now and then."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._width = max(shutil.get_terminal_size((100, 24)).columns, 40)
        self._over = False
        self._last_progress = -math.inf

    def say(self, text: str = "") -> None:
        """Prints lines that stay."""
        if self._over:
            sys.stdout.write("\r\x1b[2K")
            self._over = False
        print(text, flush=True)

    def progress(self, *, step: int, steps: int, losses: Mapping[int, float]) -> None:
        """Shows how far the training is, on one line."""
        per_rank = "  ".join(f"{rank}: {loss:.3f}" for rank, loss in sorted(losses.items()))
        line = f"step {step + 1}/{steps}" + (f"   loss of rank {per_rank}" if per_rank else "")
        if self._terminal:
            # Longer than the terminal is wide, it could not be written over.
            sys.stdout.write(f"\r\x1b[2K{line[: self._width - 1]}")
            sys.stdout.flush()
            self._over = True
        elif time.monotonic() - self._last_progress >= _PLAIN_PROGRESS_SECONDS:
            self._last_progress = time.monotonic()
            print(line, flush=True)

    def alert(self, alert: Mapping[str, Any], address: str) -> None:
        """Prints an alert in full."""
        ranks, tensors = alert["ranks"], alert["tensors"]
        facts = [f"since step {alert['first_step']}"]
        if ranks:
            facts.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
        if alert.get("stage"):
            facts.append(f"stage {alert['stage']}")
        self.say()
        self.say(f"ALERT  {alert['severity']}  {alert['kind']}  {'  '.join(facts)}")
        self.paragraph(_INDENT, alert["title"])
        if tensors:
            self.paragraph(f"{_INDENT}tensor  ", _some(tensors))
        self.paragraph(f"{_INDENT}cause   ", alert["cause"])
        self.paragraph(f"{_INDENT}remedy  ", alert["remedy"])
        self.say(f"{_INDENT}{address}")
        self.say()

    def paragraph(self, label: str, text: str) -> None:
        """Prints a text in as many lines as it needs, all of them beside its label."""
        self.say(
            textwrap.fill(
                text,
                width=min(self._width, 100),
                initial_indent=label,
                subsequent_indent=" " * len(label),
            )
        )


def _some(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
