"""Trainings that break without a bang: nothing moves, too little does, or the wrong thing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.lab.corpus.basics import (
    Family,
    adam,
    digits,
    epochs,
    mlp,
    noisy_labels,
    on_digits,
    sgd,
)
from tests.lab.corpus.training import Batch


def on_a_copy(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer of parameters that nobody trains."""
    return torch.optim.SGD(copy.deepcopy(parameters), lr=0.05)


def dead(seed: int) -> nn.Module:
    """Hidden units that no input reaches."""
    model = mlp(seed)
    with torch.no_grad():
        model[0].bias.fill_(-30.0)  # type: ignore[index]
    return model


def sigmoids(seed: int) -> nn.Module:
    """Eight layers of sigmoids: the gradient fades on its way to the first."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(64, 32), nn.Sigmoid()]
    for _ in range(7):
        layers += [nn.Linear(32, 32), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(32, 10))


def few(seed: int) -> Batch:
    """100 samples, 30 % of them with a wrong label."""
    x, y = noisy_labels(seed, 0.3)
    return x[:100], y[:100]


def one_class_of_twelve(seed: int) -> Batch:
    """8 % of one class, 92 % of all the others."""
    x, y = digits()
    zeros, others = x[y == 0], x[y != 0]
    random = np.random.default_rng(seed)
    kept = random.choice(len(others), 1100, replace=False)
    less = zeros[:95]
    inputs = torch.cat([less, others[kept]])
    return inputs, torch.cat([torch.ones(95), torch.zeros(1100)]).long()


def nothing_yet(seed: int) -> nn.Module:
    """Its last layer begins with zeros: what it learns first is which class is the frequent one."""
    model = mlp(seed, outputs=2)
    with torch.no_grad():
        model[2].weight.zero_()  # type: ignore[index]
        model[2].bias.zero_()  # type: ignore[index]
    return model


def random_labels(seed: int) -> Batch:
    x, y = digits()
    generator = torch.Generator().manual_seed(seed)
    return x, y[torch.randperm(len(y), generator=generator)]


def one_sample(seed: int, onset: int) -> Any:
    """From a step on the whole batch of all ranks is one sample, many times over."""
    x, y = digits()
    chosen = np.random.default_rng(seed).integers(0, len(x), 2000)

    def spoil(step: int, rank: int, given: Batch) -> Batch:
        if step < onset:
            return given
        at = int(chosen[step])
        return x[at : at + 1].expand_as(given[0]), y[at : at + 1].expand_as(given[1])

    return spoil


def faulty() -> dict[str, Family]:
    """What `expected` names has to be found at step `by` at the latest."""
    return {
        "F03-tiny-lr": lambda s: (
            on_digits(s, optimizer=sgd(1e-6), steps=400),
            {"expected": "lr.too_low", "by": 300},
        ),
        "F04-other-parameters": lambda s: (
            on_digits(s, optimizer=on_a_copy, steps=400),
            {"expected": "loss.plateau", "by": 300},
        ),
        "F05-dead": lambda s: (
            on_digits(s, model=dead(s), steps=400),
            {"expected": "loss.plateau", "by": 300},
        ),
        "F06-sigmoids": lambda s: (
            on_digits(s, model=sigmoids(s), optimizer=sgd(0.05), steps=400),
            {"expected": "loss.plateau", "by": 300},
        ),
        "F10-overfit": lambda s: (
            on_digits(s, hidden=256, data=few(s), batches=epochs(100, 16, 4), optimizer=adam(3e-3)),
            {"expected": "generalization.gap", "by": 300},
        ),
        "F11-majority": lambda s: (
            on_digits(
                s,
                model=nothing_yet(s),
                data=one_class_of_twelve(s),
                batches=epochs(1195, 16, 4),
                optimizer=adam(5e-5),
                held_out=None,
            ),
            {"expected": "accuracy.stalled", "by": 300},
        ),
        "F12-lr-collapse": lambda s: (
            on_digits(s, optimizer=sgd(0.02), rate=lambda t: 0.02 if t < 120 else 2e-6),
            {"expected": "lr.too_low", "by": 260, "onset": 120},
        ),
        "F13-clip": lambda s: (
            on_digits(s, clip=0.02, steps=400),
            {"expected": "clipping.saturated", "by": 150},
        ),
        "F24-one-sample": lambda s: (
            on_digits(s, batch=32, spoil=one_sample(s, 300)),
            {"expected": "gradient.oscillating", "by": 380, "onset": 300},
        ),
        "F44-labels-shuffled": lambda s: (
            on_digits(
                s, hidden=8, data=random_labels(s), optimizer=sgd(0.02), steps=400, held_out=None
            ),
            {"expected": "loss.plateau", "by": 300},
        ),
    }
