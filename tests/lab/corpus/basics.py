"""What the families of the corpus are made of: data, the order of batches, models, optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import nn

from rankscope.server.demo.training import LEARNING_RATE, DigitsNet, augmented
from tests.lab.corpus.training import Batch, Recipe

Source = Callable[[np.random.Generator], Iterator[list[torch.Tensor]]]
Family = Callable[[int], tuple[Recipe, dict[str, Any]]]

# ------------------------------------------------------------------------------------------- data


@cache
def digits() -> Batch:
    """1,437 images, standardised, and their labels."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))[:1437]
    x = (x[order] - x.mean(0)) / np.maximum(x.std(0), 1e-6)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y[order])


@cache
def unseen_digits() -> Batch:
    """The 360 images that are not among `digits`."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))[1437:]
    x = (x[order] - x.mean(0)) / np.maximum(x.std(0), 1e-6)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y[order])


@cache
def images() -> Batch:
    """1,437 images of 8 x 8 pixels in [0, 1], for convolutions."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))[:1437]
    return torch.tensor(x[order], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(
        y[order]
    )


@cache
def diabetes() -> Batch:
    """442 patients; progression standardised."""
    x, y = load_diabetes(return_X_y=True, scaled=False)
    x = (x - x.mean(0)) / x.std(0)
    y = (y - y.mean()) / y.std()
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None]


def epochs(count: int, batch: int, ranks: int) -> Source:
    """Without replacement, shuffled anew for each epoch: what DistributedSampler gives."""

    def source(random: np.random.Generator) -> Iterator[list[torch.Tensor]]:
        while True:
            order = random.permutation(count)
            for low in range(0, count - batch * ranks + 1, batch * ranks):
                chosen = order[low : low + batch * ranks].reshape(ranks, batch)
                yield [torch.from_numpy(row.copy()) for row in chosen]

    return source


def shards(count: int, batch: int, ranks: int) -> Source:
    """Each rank its own fixed part of the data, shuffled inside."""

    def source(random: np.random.Generator) -> Iterator[list[torch.Tensor]]:
        parts = np.array_split(random.permutation(count), ranks)
        while True:
            yield [torch.from_numpy(random.choice(part, batch, replace=False)) for part in parts]

    return source


def everything(count: int, ranks: int) -> Source:
    """Full batch: each rank its part of all data at every step."""

    def source(random: np.random.Generator) -> Iterator[list[torch.Tensor]]:
        parts = [
            torch.from_numpy(p.copy()) for p in np.array_split(random.permutation(count), ranks)
        ]
        while True:
            yield parts

    return source


def in_order(keys: np.ndarray, batch: int, ranks: int) -> Source:
    """Sorted by key and never shuffled."""
    order = np.argsort(keys, kind="stable")

    def source(random: np.random.Generator) -> Iterator[list[torch.Tensor]]:
        while True:
            for low in range(0, len(order) - batch * ranks + 1, batch * ranks):
                chosen = order[low : low + batch * ranks].reshape(ranks, batch)
                yield [torch.from_numpy(row.copy()) for row in chosen]

    return source


# ---------------------------------------------------------------------------------------- recipes


def mlp(seed: int, *, hidden: int = 64, inputs: int = 64, outputs: int = 10) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def sgd(rate: float, momentum: float = 0.0, decay: float = 0.0) -> Any:
    return lambda p: torch.optim.SGD(p, lr=rate, momentum=momentum, weight_decay=decay)


def adam(rate: float) -> Any:
    return lambda p: torch.optim.Adam(p, lr=rate)


def on_digits(seed: int, *, batch: int = 16, hidden: int = 64, **options: Any) -> Recipe:
    ranks = options.get("ranks", 4)
    options.setdefault("optimizer", sgd(0.05, 0.9))
    options.setdefault("batches", epochs(1437, batch, ranks))
    options.setdefault("held_out", unseen_digits())
    model = options.pop("model", None) or mlp(seed, hidden=hidden)
    return Recipe(model=model, data=options.pop("data", digits()), **options)


def on_images(seed: int, *, batch: int = 32, **options: Any) -> Recipe:
    """The demo's own training."""
    torch.manual_seed(seed)
    model = DigitsNet()
    ranks = options.get("ranks", 4)
    generator = torch.Generator().manual_seed(seed + 1000)
    more = options.pop("spoil", None)

    def spoil(step: int, rank: int, given: Batch) -> Batch:
        given = augmented(given[0], generator), given[1]
        return more(step, rank, given) if more else given

    options.setdefault("optimizer", lambda p: torch.optim.AdamW(p, lr=LEARNING_RATE))
    options.setdefault("steps", 400)
    return Recipe(
        model=model,
        data=images(),
        batches=epochs(1437, batch, ranks),
        spoil=spoil,
        **options,
    )


def noisy_labels(seed: int, share: float) -> Batch:
    x, y = digits()
    random = np.random.default_rng(seed)
    wrong = torch.from_numpy(random.random(len(y)) < share)
    return x, torch.where(wrong, torch.from_numpy(random.integers(0, 10, len(y))), y)


def cosine(peak: float, warm: int, period: int) -> Callable[[int], float]:
    def rate(step: int) -> float:
        if step < warm:
            return peak * (step + 1) / warm
        return 0.5 * peak * (1 + math.cos(math.pi * ((step - warm) % period) / (period - 1)))

    return rate


def plain(make: Callable[[int], Recipe]) -> Family:
    """A family without facts."""
    return lambda seed: (make(seed), {})
