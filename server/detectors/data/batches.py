"""Digests of the ranks' batches and of their labels, and how often two are alike by chance."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from rankscope.agent.wire import BATCH_PART, LABELS
from rankscope.server.window import Series, Window

# What they are recorded as.
BATCHES = ("words/batch", f"words/{BATCH_PART}")

# Series of what comes of a batch on its own rank.
RESULTS = ("loss", "grad_norm_local")
# Spreads the bits of a number over all bits of a word.
_ODD = np.uint64(0x9E3779B97F4A7C15)

# How often, in a whole run, labels may be said to come again that do so by chance.
_ERRORS = 1e-6
# Different labels in a sequence that comes again, at least: of fewer, a pattern that a balanced
# sampler gives every epoch.
_DISTINCT = 8


def batch_digests(window: Window) -> Series | None:
    """Digests of batches [R, S]: of a part where that is posted, else of the whole.

    Which one a rank posts follows from the size of the batch, so that equal ones are of one kind.
    """
    whole, part = window.digests.get("batch"), window.digests.get(BATCH_PART)
    if whole is None or part is None:
        return part if whole is None else whole
    values = np.where(part.present, part.values, whole.values)
    return Series(values, part.present | whole.present)


def result_digests(window: Window) -> Series | None:
    """What each rank computed of its batch [R, S]: its loss and the norm of its own gradient.

    Where nobody sees the batches, these are as good as digests of them: two batches do not give the
    same two numbers to the last bit, step by step.
    """
    loss, norm = (window.series.get(name) for name in RESULTS)
    if loss is None or norm is None:
        return None
    there = loss.present & norm.present & np.isfinite(loss.values) & np.isfinite(norm.values)
    bits = [np.ascontiguousarray(one.values, np.float64).view(np.uint64) for one in (loss, norm)]
    return Series(np.where(there, bits[0] * _ODD ^ bits[1], np.uint64(0)), there)


def label_digests(window: Window) -> Series | None:
    """Digests of the targets of the losses [R, S]."""
    return window.digests.get(LABELS)


@dataclass(slots=True)
class Collisions:
    """How likely two steps have the same labels by chance, as the run itself shows.

    Of n digests, each with all before it, this many of the pairs were equal; of none among N pairs
    the probability is below 3 / N in 95 of 100 cases.
    """

    count: int = 0
    equal: int = 0
    _times: Counter[int] = field(default_factory=Counter)

    def push(self, digest: int, *, counts: bool = True) -> None:
        """Takes the next digest; one that continues a sequence is no chance and does not count."""
        if counts:
            self.equal += self._times[digest]
        self._times[digest] += 1
        self.count += 1

    @property
    def probability(self) -> float:
        """Of two digests being equal."""
        pairs = self.count * (self.count - 1) / 2
        return min((self.equal + 3) / pairs, 1.0) if pairs else 1.0

    def needed(self) -> int:
        """Consecutive observations that repeat earlier ones, beyond what chance does here."""
        probability = self.probability
        if probability >= 0.5:
            return 2**31  # such labels show nothing
        tries = max(self.count, 2) ** 2 / _ERRORS
        return max(math.ceil(math.log(tries) / -math.log(probability)), _DISTINCT)
