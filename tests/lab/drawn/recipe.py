"""A healthy training, drawn: everything about it follows from its number. No torch in here."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SCHEMES = ("single", "ddp", "manual", "accumulated", "local_sgd", "fsdp")
MODELS = ("mlp", "cnn", "gru", "transformer", "autoencoder", "regression")
# Rates at which each optimizer trains these models well; a recipe moves them by up to 1.6 times.
_RATES = {"sgd": 0.05, "momentum": 0.02, "adam": 2e-3, "adamw": 2e-3, "rmsprop": 5e-4}
# Without adaptive steps, recurrent nets and attention need other rates than the rest.
_SGD_FACTORS = {"gru": 4.0, "transformer": 4.0, "autoencoder": 4.0, "regression": 0.4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One healthy training.

    Attributes:
        number: what it was drawn from.
        world: ranks.
        batch: samples of a rank in a micro-batch.
        micro: micro-batches in a step.
        rate: learning rate at its peak.
        schedule: `constant`, `cosine` (with a warm-up), `steps` (a tenth from two thirds on).
        clip: largest norm of the gradient; 0 for none.
        precision: `float32`, or `bfloat16` for autocast.
        width: of the hidden layers.
        every: local SGD: steps from one average to the next.
        evaluated: steps from one evaluation to the next; 0 for none.
    """

    number: int
    scheme: str
    model: str
    world: int
    optimizer: str
    rate: float
    schedule: str
    precision: str
    batch: int
    micro: int
    clip: float
    width: int
    dropout: float
    every: int
    evaluated: int
    steps: int

    @property
    def family(self) -> str:
        """What is alike in it and others, by which the lab is split."""
        return f"{self.scheme}/{self.model}/{self.optimizer}"

    def rate_at(self, step: int) -> float:
        """Learning rate of a step."""
        if self.schedule == "cosine":
            warm = self.steps // 10
            if step < warm:
                return self.rate * (step + 1) / warm
            return 0.5 * self.rate * (1 + math.cos(math.pi * (step - warm) / (self.steps - warm)))
        if self.schedule == "steps" and step >= 2 * self.steps // 3:
            return self.rate / 10
        return self.rate


def draw_recipe(number: int) -> Recipe:
    """The healthy training of a number."""
    drawn = random.Random(f"recipe/{number}")
    scheme = drawn.choices(SCHEMES, (2, 5, 3, 2, 1, 1))[0]
    model = drawn.choice(MODELS[:4] if scheme == "fsdp" else MODELS)
    world = {"single": 1, "fsdp": 2}.get(scheme) or drawn.choice((2, 2, 3, 4))
    optimizer = drawn.choice(tuple(_RATES))
    rate = _RATES[optimizer] * 1.6 ** drawn.uniform(-1, 1)
    if optimizer in ("sgd", "momentum"):
        rate *= _SGD_FACTORS.get(model, 1.0)
    return Recipe(
        number=number,
        scheme=scheme,
        model=model,
        world=world,
        optimizer=optimizer,
        rate=rate,
        schedule=drawn.choice(("constant", "cosine", "steps")),
        precision=drawn.choice(("float32", "float32", "float32", "bfloat16")),
        batch=drawn.choice((8, 16, 32)),
        micro=drawn.choice((2, 3, 4)) if scheme == "accumulated" else 1,
        clip=drawn.choice((0.0, 0.0, 1.0, 5.0)),
        width=drawn.choice((16, 32, 64)),
        dropout=drawn.choice((0.0, 0.0, 0.1)),
        every=drawn.choice((4, 8)),
        evaluated=drawn.choice((0, 0, 40)),
        steps=drawn.choice((120, 160, 200, 240)),
    )
