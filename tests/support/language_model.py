"""A small transformer over tokens, as it is trained on devices."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.before(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, length, width))
        fed: torch.Tensor = x + self.outer(functional.gelu(self.inner(self.between(x))))
        return fed


class LanguageModel(nn.Module):
    """Scores [batch, length, tokens] of the next token.

    Args:
        width, heads, depth: of the blocks.
        tokens: how many there are.
        length: the longest sequence.
    """

    def __init__(
        self, width: int = 64, heads: int = 4, depth: int = 2, tokens: int = 64, length: int = 64
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places[: tokens.shape[1]]
        scores: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next tokens."""
    scores = model(tokens[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def counting(batch: int, length: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Sequences [batch, length] that count on from where they begin, in steps of one to three."""
    device = generator.device
    start = torch.randint(0, tokens, (batch, 1), generator=generator, device=device)
    stride = torch.randint(1, 4, (batch, 1), generator=generator, device=device)
    return (start + stride * torch.arange(length, device=device)) % tokens
