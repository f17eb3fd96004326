"""What a user logs: series of several ranks that are noisy, smoothed, scheduled, or at fault."""

from __future__ import annotations

import numpy as np

from tests.support.runs.traces import Trace


def logged(
    seed: int,
    *,
    fault: str = "none",
    at: int = 300,
    every: int = 7,
    steps: int = 600,
    ranks: int = 4,
    size: float = 3.0,
    rank: int = 1,
    sigma: float = 0.1,
) -> Trace:
    """Two metrics that every rank logs, `reward` around 1 and `margin` around 0, and a schedule.

    Args:
        fault: `shift`, `start`, `single`, `recurring` (of one rank), `level`, `spike`, `spikes`,
            `together` (of all), `silent`, `all-silent`, `smoothed`, `drifts`, `phases`.
        at: step of the fault.
        size: of it, in the unit of the series.
    """
    random = np.random.default_rng(seed)
    number = np.arange(steps)
    reward = 1.0 + sigma * random.standard_normal((ranks, steps))
    margin = sigma * random.standard_normal((ranks, steps))
    present = np.ones((ranks, steps), dtype=bool)
    late = number >= at
    again = late & ((number - at) % every == 0)
    if fault == "shift":
        reward[rank] += size * late
    elif fault == "both":
        reward[rank] += size * late
        margin[rank] -= size * late
    elif fault == "start":
        reward[rank] += size
    elif fault == "single":
        reward[rank, at] += size
    elif fault == "recurring":
        reward[rank] += size * again
    elif fault == "level":
        reward += size * late
    elif fault == "spike":
        reward[:, at] += size
    elif fault == "spikes":
        reward += size * again
    elif fault == "silent":
        present[rank, at:] = False
    elif fault == "back":
        present[rank, at : at + 150] = False
    elif fault == "all-silent":
        present[:, at:] = False
    elif fault == "smoothed":
        # A mean over the last 100 episodes, as trainers of policies log it.
        heavy = random.standard_t(3, (ranks, steps + 99))
        reward = np.stack([np.convolve(row, np.ones(100) / 100, "valid") for row in heavy])
    elif fault == "drifts":
        reward += np.cumsum(sigma * random.standard_normal((ranks, steps)), axis=1)
    elif fault == "phases":
        reward = np.where(late, 0.1, 1.0) * np.cos(number / 900) * np.ones((ranks, 1))
        margin += 0.02 * number
    reward = np.where(present, reward, 0.0)
    course = 2.3 * np.exp(-0.01 * number) + 0.2
    return Trace(
        "logged",
        seed,
        number,
        {
            "loss": course * np.exp(0.1 * random.standard_normal((ranks, steps))),
            "reward/mean": reward,
            "margin": margin,
            "beta": np.tile(np.where(number < 200, 0.0, 0.5 * (1 + number // 100)), (ranks, 1)),
            "epoch": np.tile(number // 50, (ranks, 1)).astype(float),
            "time/rollout": 0.1 * np.exp(random.standard_normal((ranks, steps))),
        },
        present={"reward/mean": present},
    )
