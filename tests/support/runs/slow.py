"""A loss that stays as it is, and steps that hardly change anything."""

from __future__ import annotations

import numpy as np

from tests.support.runs.traces import Trace


def slow(
    seed: int,
    *,
    update: float = 1e-7,
    rises: float = 1.0,
    falls: float = 0.0,
    cosine: float | None = None,
    explained: float = 0.05,
    norm_left: float | None = None,
    eps: float = 0.0,
    steps: int = 140,
) -> Trace:
    """Every step posts its update over the parameters.

    Args:
        rises: learning rate in the end over that at first; updates are proportional to it.
        falls: share of the loss that is gained until the end.
        cosine: of the gradients of consecutive samples; None where none is posted.
        explained: share of the deviance at the end, posted with it.
        eps: of the optimizer; 0 where it has none.
        norm_left: gradient norm after some 50 steps, over that at first; None where none is posted.
    """
    random = np.random.default_rng(seed)
    course = np.linspace(0, 1, steps)
    rate = rises**course
    shape = (1, steps)
    series = {
        "loss": 2.3 * (1 - falls * course) * np.exp(0.05 * random.standard_normal(shape)),
        "update_ratio": update * rate * np.exp(0.1 * random.standard_normal(shape)),
        "lr": np.broadcast_to(1e-6 * rate, shape).copy(),
    }
    if cosine is not None:
        series["grad_cosine"] = cosine + 0.1 * random.standard_normal(shape)
        series["explained_deviance"] = np.broadcast_to(explained * course, shape).copy()
    if norm_left is not None:
        norms = np.maximum(np.exp(-0.1 * np.arange(steps)), norm_left)
        series["grad_norm"] = norms * np.exp(0.1 * random.standard_normal(shape))
    config = {"optimizer": "Adam", "parameter_groups": [{"lr": 1e-6, "eps": eps}]} if eps else {}
    return Trace("slow", seed, np.arange(steps), series, config=config)
