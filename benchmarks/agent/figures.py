"""Figures from the times of a noisy machine.

Every step's time is divided by the median of the plain steps of the same round, so that a machine
that is slow for ten seconds is slow for both sides. All figures are of these relative times, and
their uncertainty comes from drawing whole rounds' blocks again (steps of one block are not
independent of each other).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
# A step is slow when it takes this much longer than the plain median.
SLOW = 1.2
_DRAWS = 600


def relative(rounds: Sequence[dict[str, list[Times]]]) -> dict[str, list[list[Times]]]:
    """Relative times: arm -> rounds -> blocks.

    Args:
        rounds: for each round, arm -> its blocks, each the step times in seconds, [n].
    """
    made: dict[str, list[list[Times]]] = {}
    for blocks in rounds:
        median = float(np.median(np.concatenate(blocks["plain"])))
        for arm, times in blocks.items():
            made.setdefault(arm, []).append([t / median for t in times])
    return made


def compared(plain: list[list[Times]], other: list[list[Times]], seed: int = 0) -> dict[str, Any]:
    """One arm against the plain one.

    Args:
        plain: relative times, rounds -> blocks.
        other: the same of the arm.

    Returns:
        For each figure its value and a 95 % interval: ratios of medians, of the 99th and of the
        99.9th percentile, and how many steps in a thousand are slower than `SLOW` times the plain
        median more than without it. And `steps`, of the arm.
    """
    figures: dict[str, Callable[[Times, Times], float]] = {
        "median": lambda a, b: float(np.median(b) / np.median(a)),
        "p99": lambda a, b: float(np.quantile(b, 0.99) / np.quantile(a, 0.99)),
        "p99.9": lambda a, b: float(np.quantile(b, 0.999) / np.quantile(a, 0.999)),
        "slow_per_1000": lambda a, b: float(1e3 * ((b > SLOW).mean() - (a > SLOW).mean())),
    }
    a, b = _pooled(plain), _pooled(other)
    drawn: dict[str, list[float]] = {name: [] for name in figures}
    draw = np.random.default_rng(seed)
    pieces_a, pieces_b = _pieces(plain), _pieces(other)
    for _ in range(_DRAWS):
        again_a = np.concatenate(
            [pieces_a[i] for i in draw.integers(len(pieces_a), size=len(pieces_a))]
        )
        again_b = np.concatenate(
            [pieces_b[i] for i in draw.integers(len(pieces_b), size=len(pieces_b))]
        )
        for name, figure in figures.items():
            drawn[name].append(figure(again_a, again_b))
    result: dict[str, Any] = {"steps": len(b)}
    for name, figure in figures.items():
        low, high = np.quantile(drawn[name], [0.025, 0.975])
        result[name] = {"value": figure(a, b), "low": float(low), "high": float(high)}
    return result


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    values = 1e6 * np.asarray(seconds)
    return {"median_us": float(np.median(values)), "p99_us": float(np.quantile(values, 0.99))}


def _pooled(rounds: list[list[Times]]) -> Times:
    return np.concatenate([t for blocks in rounds for t in blocks])


def _pieces(rounds: list[list[Times]]) -> list[Times]:
    """Quarters of blocks: few blocks would make an interval of few values."""
    return [piece for blocks in rounds for t in blocks for piece in np.array_split(t, 4)]
