"""Which batches may go on now: as many as the server can take soon, and everybody in turn.

A batch that was received holds one of a number of places until it is answered. A run may hold as
many as are left free, and a sender (a token, or else an address) three times that: whoever floods
is stopped by itself, and always leaves places for those who come later (dynamic thresholds, as
switches share a buffer between their ports). While another run sends, too, it may hold no more
than a part of that: all that is under way takes the same threads, and each of one's is a wait for
the other's. What finds no place waits, in a queue of its own for each sender and, within that, for
each run; they are served round-robin. What would get none for more than two seconds, at the rate at
which places become free, is not taken: the agent asks again later instead of waiting in vain.

The same holds for the bytes of what is received: bodies that come slowly, or never to their end,
fill no more than a part of the memory that there is for them.

For one event loop: nothing here is locked.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)

AT_ONCE = 128
"""Places. One run alone may hold half of them: as many as are stored in one transaction."""

AMONG_OTHERS = 32
"""Places that a run may hold while others send, too: with fewer, less is stored at once, and
storing costs more; with more, the others wait longer for each of theirs."""

LONGEST_WAIT_S = 2.0
"""For a place, as far as can be foreseen. An agent waits for an answer for 3 s, and storing takes
its time, too."""

LONGEST_STALL_S = 10.0
"""For a place, where nothing could be foreseen: a disk or a machine that does nothing for a while.
What waits is stored once it goes on, also where the agent has asked again meanwhile."""

MAX_BYTES = 256 * 2**20
"""Of bodies under way: eight of the largest there may be, and of the usual ones 100,000."""

# A sender may hold this many times as much as is free: it may be a proxy for all there are, and is
# held back only where it leaves nearly nothing to the others.
_SENDER_SHARE = 3
# Whoever waits beyond this number could not get a place in time on any machine.
_MAX_WAITING = 8192
# For how long a run counts as one that sends: agents send every four seconds.
_SENDS_S = 5.0
# Seconds over which the rate is averaged at which places become free while others wait for them,
# and how many at least it takes to know it.
_RATE_S, _FEWEST = 30.0, 20
# When to ask again, seconds. At most as often as agents send anyway, about.
_SOONEST_S, _LATEST_S = 1.0, 8.0


class Busy(Exception):
    """The server cannot take this now.

    Attributes:
        retry_after: seconds until it is worth asking again.
    """

    def __init__(self, why: str, retry_after: int) -> None:
        super().__init__(why)
        self.retry_after = retry_after


@dataclass(slots=True, eq=False)
class _Waiting:
    sender: str
    run: str
    admitted: asyncio.Future[None]
    queued: bool = True


class Admission:
    """Places for batches, and room for their bytes.

    Args:
        at_once: places.
        longest_wait: seconds that a batch waits for one, by what can be foreseen.
        longest_stall: seconds that it waits in no case.
        max_bytes: of bodies that are being received, or wait, or are stored.

    Attributes:
        refused: batches that were not taken.
    """

    def __init__(
        self,
        *,
        at_once: int = AT_ONCE,
        longest_wait: float = LONGEST_WAIT_S,
        longest_stall: float = LONGEST_STALL_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.refused = 0
        self._free = at_once
        # The two runs that sent last, and when, the last one first.
        self._last = self._before = "", -math.inf
        self._longest_wait = longest_wait
        self._longest_stall = longest_stall
        self._runs: Counter[tuple[str, str]] = Counter()
        self._senders: Counter[str] = Counter()
        # Sender -> run -> those that wait; whoever is next in turn comes first.
        self._queues: OrderedDict[str, OrderedDict[str, deque[_Waiting]]] = OrderedDict()
        self._waiting = 0
        self._free_bytes = max_bytes
        self._bytes: Counter[str] = Counter()
        # Places that became free while others waited, and the seconds that took, of the last ones
        # the most; and since when the next one is waited for.
        self._left, self._took = 0.0, 0.0
        self._since = 0.0

    @property
    def under_way(self) -> int:
        """Batches that hold a place."""
        return self._senders.total()

    @property
    def waiting(self) -> int:
        """Batches that wait for one."""
        return self._waiting

    async def enter(self, sender: str, run: str) -> None:
        """Gives a batch a place, for which it may have to wait; `leave` takes it back.

        Args:
            sender: a token or an address.
            run: its id, as far as it is known before the batch is decoded; empty for all runs
                together of which nothing has been stored.

        Raises:
            Busy: there was none in time.
        """
        if run:
            if self._last[0] != run:
                self._before = self._last
            self._last = run, time.monotonic()
        if self._fits(sender, run):
            self._take(sender, run)
        else:
            await self._wait(sender, run)

    def leave(self, sender: str, run: str) -> None:
        """A batch has been answered: those whose turn it is take its place."""
        if self._waiting:
            now = time.monotonic()
            took = now - self._since
            kept = math.exp(-took / _RATE_S)
            self._left, self._took = self._left * kept + 1, self._took * kept + took
            self._since = now
        self._free += 1
        _less(self._runs, (sender, run))
        _less(self._senders, sender)
        while self._waiting and (found := self._next()) is not None:
            if not found.admitted.done():  # else it has just given up
                self._take(found.sender, found.run)
                found.admitted.set_result(None)

    def hold(self, sender: str, size: int) -> None:
        """Notes that so many more bytes of a sender are held; `let_go` takes that back.

        Raises:
            Busy: a sender may hold no more than is free, so that others find room.
        """
        left, held = self._free_bytes - size, self._bytes[sender]
        if left < 0 or (held and held + size > left):
            raise self._busy("too much is being sent at once", _SOONEST_S)
        self._free_bytes = left
        self._bytes[sender] += size

    def let_go(self, sender: str, size: int) -> None:
        """Bytes that were held are so no more."""
        self._free_bytes += size
        _less(self._bytes, sender, size)

    def _fits(self, sender: str, run: str) -> bool:
        # At rest all who wait hold too much for that, so that nobody is overtaken by whom this
        # lets in.
        return self._run_fits(sender, run) and self._senders[sender] < _SENDER_SHARE * self._free

    def _run_fits(self, sender: str, run: str) -> bool:
        held = self._runs[sender, run]
        if held < AMONG_OTHERS:
            return held < self._free
        other = self._before if self._last[0] == run else self._last
        return held < self._free and time.monotonic() - other[1] > _SENDS_S

    def _take(self, sender: str, run: str) -> None:
        self._free -= 1
        self._runs[sender, run] += 1
        self._senders[sender] += 1

    async def _wait(self, sender: str, run: str) -> None:
        if self._waiting >= _MAX_WAITING:
            raise self._busy("too many batches wait", _LATEST_S)
        seconds = self._foreseen(sender, run)
        if seconds > self._longest_wait:
            raise self._busy("more comes than can be stored", seconds)
        if not self._waiting:
            self._since = time.monotonic()
        loop = asyncio.get_running_loop()
        one = _Waiting(sender, run, loop.create_future())
        self._queues.setdefault(sender, OrderedDict()).setdefault(run, deque()).append(one)
        self._waiting += 1
        late = loop.call_later(self._longest_stall, self._late, one)
        try:
            await one.admitted
        except asyncio.CancelledError:
            if one.admitted.cancelled():
                self._forget(one)
            elif one.admitted.exception() is None:
                self.leave(sender, run)
            raise
        finally:
            late.cancel()

    def _late(self, one: _Waiting) -> None:
        if not one.admitted.done():
            self._forget(one)
            one.admitted.set_exception(self._busy("nothing can be stored at the moment", _LATEST_S))

    def _next(self) -> _Waiting | None:
        """Whose turn it is, among those that do not hold too much; no longer waiting then."""
        for sender, runs in self._queues.items():
            if self._senders[sender] >= _SENDER_SHARE * self._free:
                continue
            for run, queue in runs.items():
                if not self._run_fits(sender, run):
                    continue
                one = queue[0]
                # The others first, next time.
                self._queues.move_to_end(sender)
                runs.move_to_end(run)
                self._forget(one)
                return one
        return None

    def _forget(self, one: _Waiting) -> None:
        if not one.queued:
            return
        one.queued = False
        runs = self._queues[one.sender]
        queue = runs[one.run]
        queue.remove(one)
        self._waiting -= 1
        if not queue:
            del runs[one.run]
            if not runs:
                del self._queues[one.sender]

    def _foreseen(self, sender: str, run: str) -> float:
        """Seconds until one more of a run would get a place; 0 where that is not known."""
        if self._left < _FEWEST or not self._took:
            return 0.0
        runs: Mapping[str, deque[_Waiting]] = self._queues.get(sender, {})
        # Each time one of its own is let in, one of each other may be, too.
        before = (len(runs.get(run, ())) + 1) * max(len(runs), 1) * max(len(self._queues), 1)
        return min(before, self._waiting + 1) * self._took / self._left

    def _busy(self, why: str, seconds: float) -> Busy:
        self.refused += 1
        seconds = min(max(seconds, _SOONEST_S), _LATEST_S)
        # Whoever is sent away together must not come back together.
        return Busy(why, math.ceil(seconds * random.uniform(1.0, 2.0)))


def _less(held: Counter[_Key], key: _Key, number: int = 1) -> None:
    """Takes something back; what nobody holds any more is forgotten."""
    held[key] -= number
    if not held[key]:
        del held[key]
