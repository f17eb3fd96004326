"""The last lines that this process has printed, kept in memory where that is asked for.

What is seen goes through `sys.stdout` and `sys.stderr`, `print` and `logging` among it; what C
libraries write to the terminal by themselves does not.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

# Characters that are kept of a line, and of one that has no end yet: more than are shown, so that
# a secret that is cut off there, and not known as one any more, is beyond what is shown.
_LONGEST = 2000


class Console:
    """The last lines of a process.

    Args:
        lines: how many are kept.
        guarded: makes a function of ours one that never raises.
    """

    def __init__(
        self, lines: int, guarded: Callable[[Callable[..., None]], Callable[..., None]]
    ) -> None:
        self._lines: deque[str] = deque(maxlen=lines)
        self._open: dict[str, str] = {}
        self._take = guarded(self._keep)
        # Each stream with what we have put over its method, and what was there.
        self._streams: list[tuple[Any, Any, Any]] = []
        self._on = False
        self.written = 0  # lines so far

    def begin(self) -> None:
        """Listens to both streams, beside whoever else does."""
        self._on = True
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None or any(stream is known for known, _, _ in self._streams):
                continue
            before = vars(stream).get("write") if hasattr(stream, "__dict__") else None
            ours = self._heard(name, stream.write)
            try:
                stream.write = ours
            except AttributeError:
                continue  # a stream of somebody else's that lets nobody listen
            self._streams.append((stream, ours, before))

    def end(self) -> None:
        """Listens no more."""
        self._on = False
        for stream, ours, before in self._streams:
            # Who has put something over ours since keeps it; ours hands on and does nothing else.
            if vars(stream).get("write") is not ours:
                continue
            if before is None:
                del stream.write
            else:
                stream.write = before
        self._streams = []

    @property
    def tail(self) -> list[str]:
        """The lines, oldest first, with those that have no end yet."""
        return [*list(self._lines), *(text for text in list(self._open.values()) if text)]

    def _heard(self, name: str, write: Callable[[str], Any]) -> Callable[[str], Any]:
        def written(text: str) -> Any:
            result = write(text)
            if self._on:
                self._take(name, text)
            return result

        return written

    def _keep(self, name: str, text: str) -> None:
        *whole, rest = (self._open.get(name, "") + text).split("\n")
        for line in whole:
            # Of a bar that is drawn again and again over itself, what stood there last.
            self._lines.append(line.rstrip("\r").rpartition("\r")[2][:_LONGEST])
        self.written += len(whole)
        self._open[name] = rest.rpartition("\r")[2][:_LONGEST]
