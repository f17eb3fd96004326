"""Small real trainings: sorts of models, optimizers, batches and held-out data, of a seed each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from rankscope.server.comparison.courses import Course
from rankscope.server.comparison.measures import Recorded

Batch = tuple[Tensor, Tensor]
_EVERY = 20


@dataclass(frozen=True)
class Sort:
    """A sort of training.

    Attributes:
        model: makes one.
        optimizer: makes it, of parameters and number of steps; with what sets its rate at a step.
        loss: of what the model gives and the targets.
        train, held_out: data.
        batch: samples of a step.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    train: Batch
    held_out: Batch
    steps: int
    batch: int
    anneals: bool = False


def recorded(sort: Sort, seed: int, *, every: int = 1) -> Recorded:
    """A training of a seed.

    Args:
        every: steps between two updates: of 2 it takes twice as many steps to wherever it comes.
    """
    torch.manual_seed(seed)
    model = sort.model()
    optimizer = sort.optimizer(model.parameters())
    usual = [group["lr"] for group in optimizer.param_groups]
    inputs, targets = sort.train
    losses, seconds, evaluations = [], [], []
    for step in range(sort.steps):
        began = time.perf_counter()
        if sort.anneals:
            share = 0.5 * (1 + np.cos(np.pi * step / sort.steps))
            for group, rate in zip(optimizer.param_groups, usual, strict=True):
                group["lr"] = rate * share
        chosen = torch.randint(0, len(inputs), (sort.batch,))
        loss = sort.loss(model(inputs[chosen]), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        if step % every == 0:
            optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        if step % _EVERY == _EVERY - 1:
            with torch.no_grad():
                held = sort.loss(model(sort.held_out[0]), sort.held_out[1])
            evaluations.append(held.item())
    steps = np.arange(sort.steps)
    return Recorded(
        f"{seed}",
        {
            "loss": Course(steps, np.array(losses)),
            "step_seconds": Course(steps, np.array(seconds)),
            "eval/loss": Course(steps[_EVERY - 1 :: _EVERY], np.array(evaluations)),
        },
    )


def _digits() -> tuple[Batch, Batch]:
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    x = torch.tensor(pixels[order] / 16.0, dtype=torch.float32)
    y = torch.tensor(labels[order])
    return (x[:1400], y[:1400]), (x[1400:], y[1400:])


def _noisy(samples: int, number: int) -> Batch:
    teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 16, generator=generator)
    y = (x @ teacher).argmax(1)
    wrong = torch.rand(samples, generator=generator) < 0.2
    return x, torch.where(wrong, torch.randint(0, 4, (samples,), generator=generator), y)


def _friedman(samples: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    x = torch.rand(samples, 10, generator=generator)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = y + 10 * x[:, 3] + 5 * x[:, 4] + torch.randn(samples, generator=generator)
    return x, y[:, None] / 5


def _text() -> tuple[Batch, Batch]:
    """Eight letters and the next one, of the texts of this repository."""
    folder = Path(__file__).parents[3]
    text = "".join(p.read_text(encoding="utf-8") for p in sorted((folder / "docs").glob("*.md")))
    codes = torch.tensor([min(ord(c), 127) for c in text])
    windows = codes.unfold(0, 9, 1)
    held = len(windows) // 10
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    inputs, targets = windows[:, :8], windows[:, 8]
    some = order[held : held + 2048]
    return (inputs[order[held:]], targets[order[held:]]), (inputs[some], targets[some])


def _sums(samples: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    x = torch.randint(0, 12, (samples, 2), generator=generator)
    return x, (x.sum(1)) % 12


class _Sequence(nn.Module):
    def __init__(self, symbols: int, length: int, classes: int, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        read: Tensor = self.head(self.layer(self.embed(x) + self.place).mean(1))
        return read


def sorts() -> dict[str, Sort]:
    """By name."""
    digits, held = _digits()
    text, held_text = _text()
    entropy, squares = functional.cross_entropy, functional.mse_loss

    def perceptron(inputs: int, hidden: int, outputs: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(
            nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
        )

    def network() -> nn.Module:
        return nn.Sequential(
            *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)),
        )

    def letters() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(128, 16), nn.Flatten(), nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 128)
        )

    def momentum(rate: float) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
        return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)

    def adam(rate: float) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
        return lambda parameters: torch.optim.Adam(parameters, lr=rate)

    return {
        "digits perceptron": Sort(
            perceptron(64, 64, 10), momentum(0.05), entropy, digits, held, 400, 64
        ),
        "digits convolution": Sort(network, adam(2e-3), entropy, digits, held, 250, 64),
        "digits logistic": Sort(
            lambda: nn.Linear(64, 10), momentum(0.1), entropy, digits, held, 400, 128
        ),
        "digits autoencoder": Sort(
            perceptron(64, 16, 64),
            adam(3e-3),
            squares,
            (digits[0], digits[0]),
            (held[0], held[0]),
            400,
            64,
        ),
        "noisy labels": Sort(
            perceptron(16, 48, 4),
            momentum(0.05),
            entropy,
            _noisy(16384, 2),
            _noisy(4096, 3),
            400,
            256,
        ),
        "regression": Sort(
            perceptron(10, 32, 1),
            adam(5e-3),
            squares,
            _friedman(8192, 2),
            _friedman(2048, 3),
            400,
            128,
            anneals=True,
        ),
        "letters": Sort(letters, adam(3e-3), entropy, text, held_text, 400, 256, anneals=True),
        "sums": Sort(
            lambda: _Sequence(12, 2, 12),
            adam(3e-3),
            entropy,
            _sums(2048, 2),
            _sums(512, 3),
            300,
            64,
        ),
    }
