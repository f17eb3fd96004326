"""Trainings in which single layers, batches or steps go wrong, and some that look like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.lab.corpus.basics import Family, adam, mlp, on_digits, sgd
from tests.lab.corpus.training import Batch


class Cut(nn.Module):
    """Three layers; from one call on what goes into the last is detached."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 32)
        self.hidden = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls -= torch.is_grad_enabled()
        x = self.hidden(self.inner(x).relu()).relu()
        return self.head(x.detach() if self.calls < 0 else x)


class TopShare(torch.optim.SGD):
    """Steps with the largest elements of each gradient alone; what is left out is forgotten."""

    def __init__(self, parameters: Any, rate: float, share: float) -> None:
        super().__init__(parameters, lr=rate)
        self.share = share
        self.cosine = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        whole = kept = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                flat = p.grad.flatten()
                count = max(1, int(self.share * len(flat)))
                floor = flat.abs().topk(count).values[-1]
                whole += float(p.grad.square().sum())
                p.grad = torch.where(p.grad.abs() >= floor, p.grad, torch.zeros(()))
                kept += float(p.grad.square().sum())
        # What is left out stands at a right angle to what is kept.
        self.cosine = (kept / whole) ** 0.5 if whole else 1.0
        super().step(closure)


def decayed(rate: float, decay: float) -> Callable[[Any], torch.optim.Optimizer]:
    """Decay that takes a tenth of the weights at each step, and a rate that puts it back."""
    return lambda p: torch.optim.AdamW(p, lr=rate, weight_decay=decay)


def dying(seed: int) -> Callable[[int, nn.Module, Any], None]:
    """Pushes the biases of the first layer so far down, once, that no input reaches its units."""

    def before(step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 200:
            with torch.no_grad():
                model[0].bias.sub_(40.0)  # type: ignore[index,union-attr,operator]

    return before


def tanhs(seed: int, layers: int) -> nn.Module:
    """Narrow layers of tanh with small weights: each scales the gradient down."""
    torch.manual_seed(seed)
    made: list[nn.Module] = [nn.Linear(64, 24), nn.Tanh()]
    for _ in range(layers):
        made += [nn.Linear(24, 24), nn.Tanh()]
    for module in made:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)
    return nn.Sequential(*made, nn.Linear(24, 10))


def odd_batch(rank: int, every: int, first: int) -> Callable[[int, int, Batch], Batch]:
    """One rank's batch has the labels of other classes, once in a while."""

    def spoil(step: int, at: int, given: Batch) -> Batch:
        if at != rank or step < first or (step - first) % every:
            return given
        return given[0], (given[1] + 3) % 10

    return spoil


def magnified(rank: int, factor: float, every: int = 1) -> Callable[[int, int], float]:
    """One rank's gradient is too large: always, or at an interval of steps."""
    return lambda step, at: factor if at == rank and (step + 1) % every == 0 else 1.0


def faulty() -> dict[str, Family]:
    """What `expected` names has to be found at step `by` at the latest."""
    return {
        "F17-jitter": lambda s: (
            on_digits(s, clip=1.0, distort=magnified(3, 50.0, 37)),
            {"expected": "rank.gradient_outlier", "by": 450, "rank": 3},
        ),
        "F18-sum-for-mean": lambda s: (
            on_digits(s, distort=magnified(0, 6.0), optimizer=sgd(0.02, 0.9)),
            {"expected": "rank.gradient_outlier", "by": 100, "rank": 0},
        ),
        "F60-detached": lambda s: (
            on_digits(s, model=Cut(calls=4 * 150), optimizer=sgd(0.05, 0.9), steps=400),
            {"expected": "layer.dead", "by": 160, "onset": 150},
        ),
        "F61-dead-units": lambda s: (
            on_digits(s, optimizer=sgd(0.05), before=dying(s), steps=400),
            {"expected": "layer.dead", "by": 260, "onset": 200},
        ),
        "F62-tanhs": lambda s: (
            on_digits(s, model=tanhs(s, 6), optimizer=sgd(0.05), steps=400),
            {"expected": "gradient.vanishing", "by": 300},
        ),
        "F63-large-updates": lambda s: (
            on_digits(s, optimizer=decayed(0.1, 1.0), steps=400),
            {"expected": "update.ratio", "by": 200},
        ),
        "F64-odd-batches": lambda s: (
            on_digits(s, spoil=odd_batch(s % 4, 60, 150), steps=500),
            {"expected": "data.outlier", "by": 460, "onset": 150, "rank": s % 4},
        ),
        "F65-one-odd-batch": lambda s: (
            on_digits(s, spoil=odd_batch(s % 4, 10_000, 300), steps=400),
            {"expected": "data.outlier", "by": 310, "onset": 300, "rank": s % 4},
        ),
        "F66-top-elements": lambda s: (
            on_digits(s, optimizer=lambda p: TopShare(p, 0.05, 0.001), steps=400),
            {"expected": "compression.error", "by": 200},
        ),
        "F67-few-samples": lambda s: (
            on_digits(s, batch=1, ranks=2, optimizer=sgd(0.002), steps=800),
            {"expected": "batch.noise", "by": 800},
        ),
    }


def healthy() -> dict[str, Family]:
    """Layers that may look dead, and are not."""
    return {
        "H60-experts": lambda s: (
            on_digits(s, model=Sparse(s), optimizer=adam(2e-3), steps=400),
            {},
        ),
        "H61-deep-relus": lambda s: (
            on_digits(s, model=relus(s, 6), optimizer=adam(1e-3), steps=400),
            {},
        ),
        "H62-half-kept": lambda s: (
            on_digits(s, optimizer=lambda p: TopShare(p, 0.1, 0.3), steps=400),
            {},
        ),
        "H63-warm-up": lambda s: (
            on_digits(
                s, model=mlp(s), optimizer=adam(1e-3), rate=lambda t: 1e-3 * min((t + 1) / 150, 1)
            ),
            {},
        ),
    }


def relus(seed: int, layers: int) -> nn.Module:
    """As many layers as ReLU trains without a fault with its own initial weights."""
    torch.manual_seed(seed)
    made: list[nn.Module] = [nn.Linear(64, 48), nn.ReLU()]
    for _ in range(layers):
        made += [nn.Linear(48, 48), nn.ReLU()]
    for module in made:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return nn.Sequential(*made, nn.Linear(48, 10))


class Sparse(nn.Module):
    """Eight experts of which each sample takes one: some have no sample of a batch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gate = nn.Linear(64, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 24), nn.GELU(), nn.Linear(24, 10)) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(1)
        if self.training:
            # Every expert gets its turn, as with a loss that balances them.
            scores = scores + 0.3 * torch.rand_like(scores)
        best = scores.argmax(1)
        result = x.new_zeros(len(x), 10)
        for place, expert in enumerate(self.experts):
            mine = best == place
            if mine.any():
                result = result.index_add(
                    0, mine.nonzero()[:, 0], expert(x[mine]) * scores[mine, place][:, None]
                )
        return result
