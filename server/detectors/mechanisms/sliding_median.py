"""Median of the newest values of a series."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque


class SlidingMedian:
    """Median of the last values, kept in order so that a new one costs no sorting.

    Args:
        size: how many values count.
    """

    __slots__ = ("_ordered", "_values")

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._ordered: list[float] = []

    def push(self, value: float) -> float | None:
        """Takes a value that is not NaN; returns the one that no longer counts, if any."""
        passed = self._values[0] if len(self._values) == self._values.maxlen else None
        if passed is not None:
            del self._ordered[bisect_left(self._ordered, passed)]
        self._values.append(value)
        insort(self._ordered, value)
        return passed

    def clear(self) -> None:
        """Forgets all values."""
        self._values.clear()
        self._ordered.clear()

    @property
    def median(self) -> float:
        """Of no value NaN."""
        count = len(self._ordered)
        if count == 0:
            return math.nan
        return (self._ordered[(count - 1) // 2] + self._ordered[count // 2]) / 2

    @property
    def largest(self) -> float:
        """Of no value NaN."""
        return self._ordered[-1] if self._ordered else math.nan
