"""Three families of models on real data: small, and with what real ones have."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

BATCH = 16
SAMPLES = 1024
_TEXT = Path(__file__).parents[3] / "LICENSE"
_CONTEXT = 16
_LETTERS = 64

Samples = tuple[torch.Tensor, torch.Tensor]


class Mlp(nn.Module):
    """Two hidden layers, a normalisation, dropout where asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.hidden = nn.Linear(32, 32)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, 10] of [N, 64]."""
        x = torch.relu(self.norm(self.inner(x)))
        logits: torch.Tensor = self.head(self.drop(torch.relu(self.hidden(x))))
        return logits


class Cnn(nn.Module):
    """Two convolutions with batch normalisation."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, 10] of [N, 64]."""
        x = torch.max_pool2d(torch.relu(self.bn1(self.conv1(x.view(-1, 1, 8, 8)))), 2)
        x = torch.max_pool2d(torch.relu(self.bn2(self.conv2(x))), 2)
        logits: torch.Tensor = self.head(self.drop(x.flatten(1)))
        return logits


class Transformer(nn.Module):
    """One block over the letters of a text; predicts the next one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        width = 32
        self.embedding = nn.Embedding(_LETTERS, width)
        self.position = nn.Parameter(0.02 * torch.randn(_CONTEXT, width))
        self.norm1 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, _LETTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, letters] of the letter after [N, context] ones."""
        h = self.embedding(x) + self.position
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.attend(self.norm1(h)).chunk(3, -1)
        )
        a = nn.functional.scaled_dot_product_attention(q, k, v)
        h = h + self.mix(a.transpose(1, 2).flatten(2))
        h = h + self.narrow(torch.relu(self.widen(self.norm2(h))))
        logits: torch.Tensor = self.head(self.drop(h[:, -1]))
        return logits


def build(model: str, dropout: float = 0.0) -> nn.Module:
    """A fresh model, drawn with torch's own generator."""
    kinds = {"mlp": Mlp, "cnn": Cnn, "transformer": Transformer}
    return kinds[model](dropout)


def epoch_steps(world: int) -> int:
    """Steps of an epoch, at one batch a step."""
    return SAMPLES // world // BATCH


_held: dict[str, tuple[Samples, Samples]] = {}


def data_of(model: str) -> tuple[Samples, Samples]:
    """Training set (1,024 samples) and test set (256) of a model."""
    kind = "text" if model == "transformer" else "digits"
    if kind not in _held:
        inputs, targets = _text() if kind == "text" else _digits()
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        training, test = order[:SAMPLES], order[SAMPLES : SAMPLES + 256]
        _held[kind] = ((inputs[training], targets[training]), (inputs[test], targets[test]))
    return _held[kind]


def order_of(epoch: int, *, seed: int, samples: int = SAMPLES) -> torch.Tensor:
    """The order of an epoch: the same on all ranks that have the same seed."""
    generator = torch.Generator().manual_seed(seed * 10_000 + epoch)
    return torch.randperm(samples, generator=generator)


def batches_of(order: torch.Tensor, *, rank: int, world: int) -> Iterator[torch.Tensor]:
    """A rank's share of an order, as rows of full batches."""
    own = order[rank::world]
    for begin in range(0, len(own) - BATCH + 1, BATCH):
        yield own[begin : begin + BATCH]


def _digits() -> Samples:
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32)
    return (pixels - pixels.mean()) / pixels.std(), torch.tensor(labels)


def _text() -> Samples:
    letters = sorted(set(text := _TEXT.read_text(encoding="utf-8").lower()))
    codes = torch.tensor([letters.index(c) % _LETTERS for c in text])
    windows = codes.unfold(0, _CONTEXT + 1, 1)
    return windows[:, :-1].contiguous(), windows[:, -1].contiguous()


@functools.cache
def names_of(model: str) -> tuple[str, ...]:
    """Names of a model's parameters."""
    with torch.random.fork_rng():
        return tuple(name for name, _ in build(model).named_parameters())
