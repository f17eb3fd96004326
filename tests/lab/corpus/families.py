"""The families of the corpus: `HEALTHY` must raise nothing, `FAULTY` what they name.

Numbers as in the plan of the corpus: H for healthy, F for faulty.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests.lab.corpus import layers, meaning, not_learning, other, resized
from tests.lab.corpus.basics import (
    Family,
    adam,
    cosine,
    diabetes,
    digits,
    epochs,
    everything,
    in_order,
    mlp,
    noisy_labels,
    on_digits,
    on_images,
    plain,
    sgd,
    shards,
)
from tests.lab.corpus.training import Batch, Recipe, train


def resumed(seed: int) -> Recipe:
    def trained(model: nn.Module) -> None:
        train("", seed + 77, on_digits(seed, model=model), {})

    return on_digits(seed, optimizer=sgd(1e-4, 0.9), prepare=trained)


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


# By the module that defines them, so that what is changed in one is not recorded anew in all.
_DEFINED: dict[ModuleType, tuple[dict[str, Family], dict[str, Family]]] = {
    sys.modules[__name__]: (healthy(), faulty()),
    other: (other.healthy(), {}),
    not_learning: ({}, not_learning.faulty()),
    layers: (layers.healthy(), layers.faulty()),
    resized: (resized.healthy(), resized.faulty()),
    meaning: (meaning.healthy(), meaning.faulty()),
}

HEALTHY = {name: family for good, _ in _DEFINED.values() for name, family in good.items()}
FAULTY = {name: family for _, bad in _DEFINED.values() for name, family in bad.items()}
MODULES = {name: module for module, kinds in _DEFINED.items() for f in kinds for name in f}

# What the losses of some families are, as their trainers would say.
PROFILES = {
    "H18-ring-gan": "adversarial",
    "H19-bandit": "reinforcement",
    "H53-contrastive": "contrastive",
}
