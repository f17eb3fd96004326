"""Six models on real data, in three sizes, and what each is trained with."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import nn

Samples = tuple[torch.Tensor, torch.Tensor]

_TEXT = Path(__file__).parents[3] / "LICENSE"
_CONTEXT, _LETTERS = 16, 48
_HELD_OUT = 128


class Gru(nn.Module):
    """Reads an image row by row."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.gru = nn.GRU(8, width, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, 10] of [N, 64]."""
        states, _ = self.gru(x.view(-1, 8, 8))
        logits: torch.Tensor = self.head(self.drop(states[:, -1]))
        return logits


class Transformer(nn.Module):
    """One block over the letters of a text; predicts the next one."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_LETTERS, width)
        self.position = nn.Parameter(0.02 * torch.randn(_CONTEXT, width))
        self.block = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, _LETTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, letters] of the letter after [N, context] ones."""
        logits: torch.Tensor = self.head(self.block(self.embedding(x) + self.position)[:, -1])
        return logits


def _cnn(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, width // 2, 3, padding=1),
        nn.BatchNorm2d(width // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width // 2, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, 10),
    )


def _mlp(inputs: int, outputs: int, width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LayerNorm(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, outputs),
    )


def build(model: str, width: int, dropout: float) -> nn.Module:
    """A fresh model, drawn with torch's own generator."""
    match model:
        case "mlp":
            return _mlp(64, 10, width, dropout)
        case "cnn":
            return _cnn(width, dropout)
        case "gru":
            return Gru(width, dropout)
        case "transformer":
            return Transformer(width, dropout)
        case "autoencoder":
            return _mlp(64, 64, width, dropout)
    return _mlp(10, 1, width, dropout)


def criterion_of(model: str) -> nn.Module:
    """Its loss."""
    return nn.MSELoss() if model in ("autoencoder", "regression") else nn.CrossEntropyLoss()


@functools.cache
def data_of(model: str) -> tuple[Samples, Samples]:
    """Training set and held-out set."""
    if model == "transformer":
        letters = sorted(set(text := _TEXT.read_text(encoding="utf-8").lower()))
        codes = torch.tensor([letters.index(c) % _LETTERS for c in text])
        windows = codes.unfold(0, _CONTEXT + 1, 1)
        inputs, targets = windows[:, :-1].contiguous(), windows[:, -1].contiguous()
    elif model == "regression":
        x, y = load_diabetes(return_X_y=True, scaled=False)
        inputs = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
        targets = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)[:, None]
    else:
        images, labels = load_digits(return_X_y=True)
        inputs = torch.tensor(images, dtype=torch.float32)
        inputs = (inputs - inputs.mean()) / inputs.std()
        targets = inputs if model == "autoencoder" else torch.tensor(labels)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    held, rest = order[:_HELD_OUT], order[_HELD_OUT:]
    return (inputs[rest], targets[rest]), (inputs[held], targets[held])
