"""The time of day, undisturbed while somebody sets the machine's clock.

Who is alive is known by how long nothing was heard of it: a clock that jumps ahead makes the dead
alive until it has caught up, and the living dead. So a server goes by the clock that cannot be set
(`time.monotonic`), begun at the time of day. It follows small corrections at once, and a jump only
once that has lasted: clocks are set wrong for seconds, and right for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# Seconds up to which a difference is a correction (NTP slews 0.5 ms a second); two readings one
# after the other that a busy machine delays differ by less.
_SMALL_S = 2.0
# How long a jump has to last until it is believed.
_LASTS_S = 300.0


class SteadyClock:
    """Seconds since 1970.

    Args:
        wall: the machine's clock, which may be set.
        steady: one that may not, in seconds since whenever.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._steady = steady
        self._ahead = wall() - steady()
        # A jump that has not lasted long enough yet: to what difference, and since when.
        self._jump: tuple[float, float] | None = None
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """The time now."""
        with self._lock:
            steady = self._steady()
            ahead = self._wall() - steady
            if abs(ahead - self._ahead) <= _SMALL_S:
                self._ahead, self._jump = ahead, None
            elif self._jump is None or abs(ahead - self._jump[0]) > _SMALL_S:
                self._jump = ahead, steady
            elif steady - self._jump[1] >= _LASTS_S:
                self._ahead, self._jump = ahead, None
            return steady + self._ahead


now = SteadyClock()
"""The clock of this process."""
