"""Runs whose batch, or whose number of ranks, changes on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rankscope.server.window import Window
from tests.support.runs.traces import Trace


@dataclass(frozen=True)
class Resized:
    """A run of which some ranks are gone from a step on; `steps` and `series` as in `trace`."""

    trace: Trace
    left: int
    at: int

    def windows(self, cuts: Iterable[int] = ()) -> Iterator[Window]:
        """Whoever asks later knows the world as it is then; a rank that is gone stays known."""
        for window in self.trace.windows(cuts):
            gone = window.last_step >= self.at
            yield replace(
                window,
                world_size=self.left if gone else self.trace.ranks,
                liveness=tuple(
                    replace(life, last_step=self.at - 1)
                    if gone and life.rank >= self.left
                    else life
                    for life in window.liveness
                ),
            )


def resized(
    seed: int,
    *,
    sizes: Mapping[int, int],
    rates: Mapping[int, float],
    warm: int = 0,
    ranks: int = 4,
    left: int = 0,
    at: int = 10_000,
    rises: float = 0.0,
    signed: bool = False,
    optimizer: str = "SGD",
    every: int = 1,
    steps: int = 700,
) -> Resized:
    """Steps with the samples, the learning rate and the loss of every rank.

    Args:
        sizes: first step -> samples of a rank's batch; 0: another number at every step.
        rates: first step -> learning rate, reached in `warm` steps.
        left: ranks that there are from step `at` on.
        rises: by which the loss is larger from the first change on.
        signed: the loss is below zero at times.
        every: samples are reported at one step in this number only.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)

    def held(told: Mapping[int, float]) -> np.ndarray:
        firsts = sorted(told)
        return np.array([told[max(f for f in firsts if f <= step)] for step in each.tolist()])

    size = np.broadcast_to(held(sizes), (ranks, steps)).copy()
    varied = random.integers(20, 200, (ranks, steps))
    size = np.where(size == 0, varied, size).astype(np.float64)
    rate = held(rates)
    for step in sorted(rates)[1:] if warm else ():
        span = each[step : step + warm]
        rate[span] = rate[step - 1] + (rate[span] - rate[step - 1]) * (span - step + 1) / warm
    first = min([*sorted(sizes)[1:], at])
    loss = 2.0 * np.exp(-0.01 * each) + 0.3 + rises * (each >= first)
    loss = loss * np.exp(0.05 * random.standard_normal((ranks, steps))) - (2.0 if signed else 0.0)
    there = np.ones((ranks, steps), dtype=bool)
    if left:
        there[left:, at:] = False
    trace = Trace(
        "resized",
        seed,
        each,
        {"loss": loss, "lr": np.broadcast_to(rate, (ranks, steps)).copy(), "samples": size},
        {"loss": there, "lr": there, "samples": there & (each % every == 0)},
        config={"optimizer": optimizer},
    )
    return Resized(trace, left or ranks, at)
