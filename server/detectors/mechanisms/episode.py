"""A condition that is examined now and then: from when to when it held."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.window import Window

Facts = TypeVar("Facts")


@dataclass(slots=True, kw_only=True)
class Episode(Incident, Generic[Facts]):
    """Something wrong while it lasts.

    Attributes:
        facts: what its detector knows of it.
        holding: whether the last observation found it; it is taken to go on until one does not.
        seen: number of observations that found it.
        agreed_until: last observation before that did not; None for none.
    """

    facts: Facts
    holding: bool = True
    seen: int = 1
    agreed_until: int | None = None


# What is back so soon, in units of the steps after which it was over, recurs; and from so many
# times on it is taken to, so that it is over only after twice as long as it last stayed away.
_SOON, _RECURS = 16, 2


@dataclass(slots=True)
class Watch(Generic[Facts]):
    """Follows one condition over the steps at which it can be judged.

    Attributes:
        clear_after: steps without it after which it is over.
        gathers: whether what comes back again and again is one episode from the third time on, and
            no further alert for each.
        judged, found: observations so far, and those that found it.
        agreed_until: the last one that did not.
    """

    clear_after: int = 8
    gathers: bool = False
    judged: int = 0
    found: int = 0
    current: Episode[Facts] | None = None
    agreed_until: int | None = None
    _ended: list[Episode[Facts]] = field(default_factory=list)
    _last: int | None = None
    _returns: int = 0

    def bad(self, step: int, facts: Facts, *, first_step: int | None = None) -> Episode[Facts]:
        """An observation that found it; `facts` count where an episode begins.

        Args:
            first_step: since when, where it began before this observation.
        """
        self.judged += 1
        self.found += 1
        known = self.current
        if known is not None and not known.holding and known.over(step):
            self._end(known)
            known = None
        if known is None:
            first = step if first_step is None else first_step
            known = self.current = Episode(
                first_step=first,
                seen_step=step,
                last_step=step,
                clear_after=self._patience(first),
                facts=facts,
                agreed_until=self.agreed_until,
            )
            return known
        known.holding = True
        known.last_step = max(known.last_step, step)
        known.seen += 1
        return known

    def good(self, step: int) -> None:
        """An observation that did not find it."""
        self.judged += 1
        self.agreed_until = step
        known = self.current
        if known is None:
            return
        if known.holding:
            known.holding = False
            # Nothing showed before this step that it was over.
            known.last_step = max(known.last_step, step - 1)
        elif known.over(step):
            self._end(known)
            self.current = None

    def _end(self, episode: Episode[Facts]) -> None:
        self._ended.append(episode)
        self._last = episode.last_step

    def _patience(self, first: int) -> int:
        """Steps without it after which an episode that begins now is over."""
        away = math.inf if self._last is None else first - self._last
        self._returns = self._returns + 1 if away <= _SOON * self.clear_after else 0
        if not self.gathers or self._returns < _RECURS:
            return self.clear_after
        return max(self.clear_after, 2 * int(away))

    def take(self, last_step: int) -> Iterator[Episode[Facts]]:
        """Episodes to be reported after a window: those that ended in it, and the current one."""
        yield from self._ended
        self._ended = []
        if self.current is not None:
            if self.current.holding:
                self.current.last_step = max(self.current.last_step, last_step)
            yield self.current

    def open(self, step: int) -> Episode[Facts] | None:
        """The episode that is not over at a step."""
        known = self.current
        return None if known is None or (not known.holding and known.over(step)) else known


class Condition(ABC, Generic[Facts]):
    """Part of a detector that follows one condition of several, and reports it by itself.

    Attributes:
        watch: of the condition.
    """

    __slots__ = ()

    watch: Watch[Facts]

    @abstractmethod
    def finding(self, episode: Episode[Facts]) -> Finding:
        """What is reported of an episode."""

    def findings(self, window: Window) -> list[Finding]:
        """Those of a window."""
        return [self.finding(episode) for episode in self.watch.take(window.last_step)]

    def title(self, step: int) -> str:
        """Of what is not over at a step; empty for nothing."""
        episode = self.watch.open(step)
        return "" if episode is None else self.finding(episode).title
