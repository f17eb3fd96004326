"""Matrices that steps change at the pace of their own learning rate, from what they began with."""

from __future__ import annotations

import math

import numpy as np

from rankscope.agent import wire
from rankscope.server.window import LayerNumbers
from tests.support.runs.traces import Trace

NAMES = ("embed.weight", "inner.weight", "hidden.weight", "hidden.bias", "head.weight")
SHAPES = ((1000, 128), (256, 128), (128, 256), (128,), (10, 128))
_TABLE = wire.TensorTable(NAMES, SHAPES, ("float32",) * 5, ("",) * 5)


def written_over(
    seed: int,
    *,
    times: float = 1.0,
    of: tuple[str, ...] = ("head.weight",),
    rate: float = 1e-3,
    since: int = 0,
    small: float = 1.0,
    steps: int = 200,
    every: int = 2,
) -> Trace:
    """Updates of Adam: each element moves by its rate at first, and less as it learns.

    Args:
        times: learning rate of the tensors named by `of` over that of the others.
        since: step at which these are given to the optimizer.
        small: size of these at first, over the usual.
    """
    random = np.random.default_rng(seed)
    norms = np.array([math.sqrt(shape[0] / 3) for shape in SHAPES])
    odd = np.array([name in of for name in NAMES])
    norms[odd] *= small
    elements = np.array([math.prod(shape) for shape in SHAPES], dtype=float)
    made, whole = [], np.zeros((1, steps))
    for step in range(steps):
        course = 0.2 + 0.8 * math.exp(-step / 40)
        updates = rate * course * np.sqrt(elements) * np.exp(0.1 * random.standard_normal(5))
        updates[odd] *= times if step >= since else 0.0
        # What all steps have in common adds up, the rest does as a random walk.
        norms = np.sqrt(norms**2 + updates**2) + 0.3 * updates
        whole[0, step] = np.linalg.norm(updates) / np.linalg.norm(norms)
        if step % every:
            continue
        for metric, values in (("update_ratio", updates / norms), ("weight_norm", norms.copy())):
            made.append(LayerNumbers(step=step, rank=0, metric=metric, table=_TABLE, values=values))
    looked = (np.arange(steps) % every == 0)[None, :]
    series = {
        "loss": 2.3 * np.exp(-0.02 * np.arange(steps))[None, :] + 0.05,
        "update_ratio": whole,
        "lr": np.full((1, steps), rate),
    }
    if times != 1:
        series |= {"lr/0": series["lr"], "lr/1": np.full((1, steps), rate * times)}
    return Trace(
        "written over",
        seed,
        np.arange(steps),
        series,
        {"update_ratio": looked},
        layers=tuple(made),
    )
