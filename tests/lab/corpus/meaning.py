"""Trainings whose loss falls, and which go wrong beside it: in answers, or in their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.lab.corpus.basics import Family, digits, mlp, on_digits, plain, sgd
from tests.lab.corpus.training import Batch


def parity() -> Batch:
    """Whether a digit is odd."""
    x, y = digits()
    return x, y % 2


def against(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int | None]:
    """The loss of one answer, and the number of the other ones that are right."""
    output = model(batch[0])
    wrong = int((output.argmax(1) != batch[1]).sum())
    return nn.functional.cross_entropy(output, batch[1]), wrong


def normalised(seed: int) -> nn.Module:
    """What its matrices give does not depend on their size."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 64, bias=False),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 10, bias=False),
        nn.LayerNorm(10),
    )


def growing(factor: float) -> Any:
    """Multiplies the matrices before each step: a decay with the wrong sign."""

    def before(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(factor)

    return before


def _parity(seed: int, **options: Any) -> Any:
    return on_digits(
        seed,
        model=mlp(seed, outputs=2),
        data=parity(),
        held_out=None,
        optimizer=sgd(0.01),
        **options,
    )


def healthy() -> dict[str, Family]:
    return {
        "H73-parity": plain(lambda s: _parity(s)),
        "H74-normalised": plain(
            lambda s: on_digits(s, model=normalised(s), optimizer=sgd(0.1, 0.9, 1e-3))
        ),
    }


def faulty() -> dict[str, Family]:
    """What `expected` names has to be found at step `by` at the latest."""
    return {
        "F71-other-answers": lambda s: (
            _parity(s, objective=against),
            {"expected": "accuracy.mismatch", "by": 300},
        ),
        "F72-decay": lambda s: (
            on_digits(s, optimizer=sgd(0.05, 0.0, 0.5)),
            {"expected": "update.drift", "by": 450},
        ),
        "F73-growing": lambda s: (
            on_digits(s, model=normalised(s), before=growing(1.01)),
            {"expected": "update.drift", "by": 500},
        ),
    }
