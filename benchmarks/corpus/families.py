"""The families of the corpus: `HEALTHY` must raise nothing, `FAULTY` what they name.

Numbers as in the plan of the corpus: H for healthy, F for faulty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from support.traces import Trace
from torch import nn

from benchmarks.corpus.training import Batch, Recipe, train
from rankscope.server.demo.training import LEARNING_RATE, DigitsNet, augmented

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
    return Recipe(model=mlp(seed, hidden=hidden), data=options.pop("data", digits()), **options)


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


def resumed(seed: int) -> Recipe:
    recipe = on_digits(seed)
    train("", seed + 77, recipe, {})
    recipe.optimizer = sgd(1e-4, 0.9)
    return recipe


def shuffled(seed: int, rank: int, onset: int) -> Callable[[int, int, Batch], Batch]:
    generator = torch.Generator().manual_seed(seed)

    def spoil(step: int, at: int, given: Batch) -> Batch:
        if at != rank or step < onset:
            return given
        return given[0], given[1][torch.randperm(len(given[1]), generator=generator)]

    return spoil


def shifted(first: int, last: int) -> Callable[[int, int, Batch], Batch]:
    def spoil(step: int, rank: int, given: Batch) -> Batch:
        return (given[0], (given[1] + 3) % 10) if first <= step <= last else given

    return spoil


def not_a_number(step: int, rank: int) -> Callable[[int, int, Batch], Batch]:
    def spoil(at_step: int, at_rank: int, given: Batch) -> Batch:
        if (at_step, at_rank) != (step, rank):
            return given
        spoilt = given[0].clone()
        spoilt.view(-1)[7] = math.nan
        return spoilt, given[1]

    return spoil


def multiplied(onset: int, factor: float) -> Callable[[int, Any, torch.optim.Optimizer], None]:
    def before(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        if step == onset:
            for group in optimizer.param_groups:
                group["lr"] *= factor

    return before


def regression(seed: int, **options: Any) -> Recipe:
    torch.manual_seed(seed)
    model = nn.Linear(10, 1)
    return Recipe(
        model=model, data=diabetes(), batches=everything(442, 4), classes=False, **options
    )


def healthy() -> dict[str, Family]:
    def plain(make: Callable[[int], Recipe]) -> Family:
        return lambda seed: (make(seed), {})

    return {
        "H01-sgd": plain(on_digits),
        "H02-restarts": plain(lambda s: on_digits(s, rate=cosine(0.1, 40, 140))),
        "H03-adam": plain(lambda s: on_digits(s, optimizer=adam(1e-3))),
        "H04-tiny-batches": plain(
            lambda s: on_digits(s, batch=2, steps=1500, optimizer=adam(1e-3))
        ),
        "H05-cosine-to-0": plain(
            lambda s: on_digits(s, steps=1200, optimizer=adam(2e-3), rate=cosine(2e-3, 1, 1200))
        ),
        "H06-step-decay": plain(
            lambda s: on_digits(
                s, optimizer=sgd(0.1), rate=lambda t: 0.1 * 0.1 ** ((t >= 300) + (t >= 450))
            )
        ),
        "H07-label-noise": plain(
            lambda s: on_digits(
                s,
                hidden=16,
                steps=500,
                data=noisy_labels(s, 0.3),
                optimizer=sgd(0.05, 0.9, 1e-3),
            )
        ),
        "H09-regression": plain(
            lambda s: Recipe(
                model=mlp(s, hidden=32, inputs=10, outputs=1),
                data=diabetes(),
                batches=epochs(442, 16, 4),
                optimizer=sgd(0.02, 0.9, 1e-3),
                classes=False,
            )
        ),
        "H10-clipped": plain(lambda s: on_digits(s, clip=0.5)),
        "H11-accumulation": plain(lambda s: on_digits(s, batch=4, micro=4)),
        "H12-resumed": plain(resumed),
        "H13-single-samples": plain(
            lambda s: on_digits(s, batch=1, steps=1500, optimizer=adam(1e-3))
        ),
        "H16-warm-up": plain(
            lambda s: on_digits(
                s, optimizer=adam(1e-3), rate=lambda t: 2e-3 * min((t + 1) / 300, 1)
            )
        ),
        "H30-fixed-shards": plain(lambda s: on_digits(s, batches=shards(1437, 16, 4))),
        "H31-eight-ranks": plain(lambda s: on_digits(s, batch=8, ranks=8)),
        "H32-two-ranks": plain(lambda s: on_digits(s, ranks=2)),
        "H33-demo": plain(lambda s: on_images(s)),
        "H35-edge-of-stability": plain(
            lambda s: on_digits(s, batches=everything(1437, 4), optimizer=sgd(3.0), steps=400)
        ),
        "H34-no-momentum-long": plain(
            lambda s: on_digits(s, steps=1500, optimizer=sgd(0.2), batch=8)
        ),
    }


def faulty() -> dict[str, Family]:
    return {
        "F01-lr-6": lambda s: (on_digits(s, optimizer=sgd(6.0)), {}),
        "F02-unstable-descent": lambda s: (
            regression(s, steps=200, optimizer=sgd(0.3)),
            {},
        ),
        "F07-bad-batch": lambda s: (on_digits(s, spoil=shifted(300, 300)), {"onset": 300}),
        "F08-random-labels": lambda s: (
            on_digits(s, spoil=shuffled(s, 2, 0)),
            {"onset": 0, "rank": 2},
        ),
        "F14-growing-lr": lambda s: (
            on_digits(s, steps=700, rate=lambda t: 0.05 * 1.03 ** max(t - 300, 0)),
            {"onset": 300},
        ),
        "F15-new-labels": lambda s: (on_digits(s, spoil=shifted(350, 9999)), {"onset": 350}),
        "F20-momentum": lambda s: (
            regression(s, steps=400, optimizer=sgd(0.005, 0.995)),
            {},
        ),
        "F22-sorted": lambda s: (
            on_digits(s, batches=in_order(digits()[1].numpy(), 16, 4), optimizer=sgd(0.05)),
            {},
        ),
        "F40-labels-midway": lambda s: (
            on_digits(s, spoil=shuffled(s, s % 4, 300)),
            {"onset": 300, "rank": s % 4},
        ),
        "F41-nan": lambda s: (
            on_digits(s, steps=400, spoil=not_a_number(250, (s + 1) % 4)),
            {"onset": 250, "rank": (s + 1) % 4},
        ),
        "F42-demo-labels": lambda s: (
            on_images(s, spoil=shuffled(s, s % 4, 200)),
            {"onset": 200, "rank": s % 4},
        ),
        **{
            f"F43-demo-lr-x{factor}": lambda s, factor=factor: (
                on_images(s, before=multiplied(200, float(factor))),
                {"onset": 200},
            )
            for factor in (10, 30, 100)
        },
    }


HEALTHY = healthy()
FAULTY = faulty()


def record(name: str, seed: int) -> Trace:
    """Trains a family's member."""
    recipe, facts = (HEALTHY | FAULTY)[name](seed)
    return train(name, seed, recipe, facts)
