"""Ranks that train one softmax regression in earnest, on data that agree or not."""

from __future__ import annotations

import numpy as np

from rankscope.server.comparison import directions
from rankscope.server.comparison.compare import compare_digests
from tests.support.runs.traces import Trace

_FEATURES, _CLASSES, _BATCH = 16, 8, 32


def pulling(
    seed: int,
    *,
    ranks: int = 2,
    steps: int = 600,
    exchanged: int = -1,
    at: int = 0,
    shards: str = "alike",
    samples: int = 0,
    rate: float = 0.3,
    every: int = 1,
    apart: int = -1,
) -> Trace:
    """Their losses, their batches, and where their gradients point.

    Args:
        exchanged: rank whose labels are exchanged among the classes from step `at` on.
        shards: `alike`; `classes`: each rank has classes of its own; `domains`: each rank has the
            answers of its own, and an input that distinguishes it.
        samples: of each rank, of which every batch takes all; 0 for new ones in every batch. Their
            labels are mostly noise.
        every: step that is sampled.
        apart: from here on the ranks are said to hold other parameters; -1 for never.
    """
    random = np.random.default_rng(seed)
    truths = 1.5 * random.standard_normal((ranks, _FEATURES, _CLASSES))
    if shards != "domains":
        truths[:] = truths[0]
    order = np.roll(np.arange(_CLASSES), 3)
    count = samples or _BATCH
    kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def read(rank: int) -> tuple[np.ndarray, np.ndarray]:
        if samples and rank in kept:
            return kept[rank]
        x = random.standard_normal((8 * count, _FEATURES))
        noise = random.gumbel(size=(8 * count, _CLASSES)) * (6.0 if samples else 0.3)
        y = (x @ truths[rank] + noise).argmax(axis=1)
        mine = y % ranks == rank if shards == "classes" else np.ones(len(y), dtype=bool)
        kept[rank] = x[mine][:count], y[mine][:count]
        return kept[rank]

    # An input times what tells the rank gives a model the means to answer each one its own way.
    wide = _FEATURES * (1 + ranks * (shards == "domains")) + 1
    model = np.zeros((wide, _CLASSES))
    losses, products = np.zeros((ranks, steps)), []
    words = np.zeros((ranks, steps), dtype=np.uint64)
    for step in range(steps):
        gradients = np.zeros((ranks, 1, model.size))
        for rank in range(ranks):
            x, y = read(rank)
            words[rank, step] = abs(hash(x.tobytes())) % 2**62
            if rank == exchanged and step >= at:
                y = order[y]
            x = _widened(x, rank, ranks) if shards == "domains" else x
            x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
            scores = x @ model
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
            losses[rank, step] = -np.log(shares[np.arange(len(y)), y] + 1e-12).mean()
            shares[np.arange(len(y)), y] -= 1.0
            gradients[rank, 0] = (x.T @ shares / len(y)).ravel()
        if step % every == 0:
            products.append(directions.of_gradients(step, np.arange(ranks), gradients))
        model -= rate * gradients.mean(axis=0).reshape(model.shape)
    norms = np.stack([np.sqrt(made.squares) for made in products], axis=1)
    sampled = np.arange(steps) % every == 0
    local = np.zeros((ranks, steps))
    local[:, sampled] = norms
    everyone = np.arange(ranks)
    compared = [
        compare_digests(
            step, "parameters", everyone, np.where(everyone == 0, 1, 2 if step >= apart else 1)
        )
        for step in range(steps if apart >= 0 else 0)
    ]
    return Trace(
        "pulling",
        seed,
        np.arange(steps),
        {"loss": losses, "grad_norm_local": local},
        present={"grad_norm_local": np.tile(sampled, (ranks, 1))},
        products=tuple(products),
        words={"batch": words},
        comparisons=tuple(compared),
    )


def _widened(x: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    parts = [np.zeros_like(x) for _ in range(ranks)]
    parts[rank] = 0.5 * x
    return np.concatenate([x, *parts], axis=1)
