"""How often a training has been through its data: memorising takes many epochs. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.agent.wire import NO_SAMPLE, SAMPLE_DIGESTS
from rankscope.server.window import Window

# Samples that are counted. When there are more, every second one is from then on.
_MEMORY = 16_384
# Mean number of visits up to which every sample is new, but for some that the data hold twice.
_NEW = 1.05


@dataclass(slots=True)
class Visits:
    """Counts how often each sample came, of those that the agents report.

    Of a batch these are the ones with the smallest hashes, the same ones wherever they come. Of
    inputs that are made or augmented at each step every one is new.
    """

    _times: Counter[int] = field(default_factory=Counter)
    _halvings: int = 0
    _waiting: deque[tuple[int, list[int]]] = field(default_factory=deque)

    def take(self, window: Window) -> None:
        """Counts a window's samples, of all ranks."""
        self.lay(window)
        self.pass_to(window.last_step)

    def lay(self, window: Window) -> None:
        """Lays a window's samples ready; `pass_to` then lets them count step by step."""
        found: dict[int, list[int]] = {}
        for name in SAMPLE_DIGESTS:
            series = window.digests.get(name)
            if series is None:
                continue
            for column in np.flatnonzero(series.present.any(axis=0)).tolist():
                pairs = series.values[series.present[:, column], column]
                items = np.concatenate((pairs >> np.uint64(32), pairs & np.uint64(NO_SAMPLE)))
                kept = items[items != np.uint64(NO_SAMPLE)].tolist()
                found.setdefault(int(window.steps[column]), []).extend(kept)
        self._waiting.extend(sorted(found.items()))

    def pass_to(self, step: int) -> None:
        """Lets everything up to and including a step count."""
        while self._waiting and self._waiting[0][0] <= step:
            low = (1 << self._halvings) - 1
            self._times.update(i for i in self._waiting.popleft()[1] if not i & low)
            while len(self._times) > _MEMORY:
                self._halvings += 1
                low = (1 << self._halvings) - 1
                self._times = Counter({i: n for i, n in self._times.items() if not i & low})

    @property
    def all_new(self) -> bool:
        """Whether samples are reported, and next to none of them came a second time."""
        return self.mean < _NEW

    @property
    def mean(self) -> float:
        """How often a sample has come so far; NaN where no samples are reported."""
        return self._times.total() / len(self._times) if self._times else math.nan
