"""What is done about an alert, by all ranks at the same step: stop, save, leave a batch out.

An alert reaches the ranks at different times, and one that acts alone leaves the others in a
collective for ever. So what an alert asks for is a number, and the ranks do what the largest of
their numbers says. How they find that, one all-reduce, is the trainer's: the agent calls no
collective.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

# In the order in which one goes before the other where several are asked for.
_ACTIONS = ("", "skip", "save", "stop")
# Times that a batch is left out, or a checkpoint saved, so that a storm of alerts neither fills a
# disk nor leaves nothing to train on.
_MOST = 10
# Seconds after something was done in which alerts that ask for it again are taken for the same one:
# each rank asks the server every five seconds, and hears of an alert at a time of its own.
_ECHO_S = 20.0
# Seconds by which the server's clock may be behind: alerts that were open before this process began
# are about the one before it, and what they asked for has been done, or mended.
_CLOCKS_S = 5.0


class Actions:
    """Takes alerts as callbacks of `monitor.on_alert`, and says at each step what is to be done.

    Args:
        agree: called by `due` on all ranks at once with a small whole number; returns the largest
            that any of them gave.
        every: at how many calls of `due` the ranks agree once.
        alone: there is one rank, which needs nobody's consent.
    """

    def __init__(
        self, agree: Callable[[int], int] | None = None, *, every: int = 1, alone: bool = True
    ) -> None:
        self._agree = agree
        self._every = max(1, int(every))
        self._alone = alone
        self._calls = 0
        self._asked: set[int] = set()
        self._done: Counter[int] = Counter()
        self._done_at: dict[int, float] = {}
        self._began = time.time()

    def stop(self, alert: Mapping[str, Any] | None = None) -> None:
        """Asks for the end of the training: `monitor.on_alert(actions.stop)`."""
        self._ask("stop", alert)

    def save(self, alert: Mapping[str, Any] | None = None) -> None:
        """Asks for a checkpoint, 10 times at most."""
        self._ask("save", alert)

    def skip(self, alert: Mapping[str, Any] | None = None) -> None:
        """Asks for a batch to be left out, 10 times at most."""
        self._ask("skip", alert)

    def _ask(self, action: str, alert: Mapping[str, Any] | None) -> None:
        which, told = _ACTIONS.index(action), alert or {}
        if _opened(told) < self._began - _CLOCKS_S:
            return
        if "id" in told and time.monotonic() - self._done_at.get(which, -_ECHO_S) < _ECHO_S:
            return
        self._asked.add(which)

    def due(self) -> str:
        """What all ranks do now: `stop`, `save`, `skip`, or nothing (an empty text).

        Call it once a step, at the same place on all ranks: between `backward()` and
        `optimizer.step()`, where a batch can still be left out. What `agree` raises is raised.
        """
        self._calls += 1
        if self._calls % self._every:
            return ""
        # A copy: alerts come in another thread.
        asked = max(tuple(self._asked), default=0)
        if self._agree is not None:
            asked = min(max(int(self._agree(asked)), 0), len(_ACTIONS) - 1)
        elif not self._alone:
            return ""
        self._asked.discard(asked)
        # All ranks count the same.
        self._done[asked] += 1
        self._done_at[asked] = time.monotonic()
        is_over = _ACTIONS[asked] != "stop" and self._done[asked] > _MOST
        return "" if is_over else _ACTIONS[asked]


def _opened(alert: Mapping[str, Any]) -> float:
    """When an alert was opened, seconds since 1970; infinite where that is not said."""
    try:
        return datetime.fromisoformat(str(alert.get("opened_at"))).timestamp()
    except ValueError:
        return float("inf")
