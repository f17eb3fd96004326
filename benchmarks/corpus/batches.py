"""The digests of the batches that a run of the corpus was made of, as agents post them.

They are not recorded: which samples each rank gets at which step follows from the family and the
seed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from support.traces import Trace

from benchmarks.corpus.training import Recipe
from rankscope.server.window import Series, Window


@dataclass(frozen=True)
class Fed:
    """A run with the digests of its batches, uint64 [R, S]."""

    trace: Trace
    digests: np.ndarray

    def windows(self, cuts: Iterable[int] = ()) -> Iterator[Window]:
        """The run's windows, each with its part of the digests."""
        low = 0
        for window in self.trace.windows(cuts):
            part = self.digests[:, low : low + len(window.steps)]
            low += len(window.steps)
            words = {"batch": Series(part, np.ones(part.shape, dtype=bool))}
            yield replace(window, words={**window.words, **words})


def fed(trace: Trace, recipe: Recipe) -> Fed:
    """A recorded run with what its recipe gave to the ranks."""
    source = recipe.batches(np.random.default_rng(trace.seed))
    digests = np.zeros((recipe.ranks, recipe.steps), dtype=np.uint64)
    for step in range(recipe.steps):
        micro = [next(source) for _ in range(recipe.micro)]
        for rank in range(recipe.ranks):
            digest = hashlib.blake2b(digest_size=8)
            for chosen in micro:
                digest.update(chosen[rank].numpy().tobytes())
            digests[rank, step] = int.from_bytes(digest.digest(), "little")
    return Fed(trace, digests)
