"""Trains with logical ranks: one process that computes every rank's batch in turn.

Each rank's loss and local gradient are what a real rank would report, and the optimizer steps on
the mean of the gradients, as data-parallel training does. It is fast and the same at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support.traces import Trace
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(kw_only=True)
class Recipe:
    """One training.

    Attributes:
        data: inputs and targets.
        batches: indices of each rank's samples, step by step.
        optimizer: made from the parameters.
        rate: learning rate at a step, None for the optimizer's own.
        spoil: what is done to one rank's batch at a step.
        before: called before each step with the model and the optimizer.
        clip: largest norm of the gradient.
        micro: micro-batches in a step.
    """

    model: nn.Module
    data: Batch
    batches: Callable[[np.random.Generator], Iterator[list[torch.Tensor]]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int = 600
    ranks: int = 4
    rate: Callable[[int], float] | None = None
    spoil: Callable[[int, int, Batch], Batch] | None = None
    before: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None
    clip: float | None = None
    micro: int = 1
    classes: bool = True


def norm(gradients: list[torch.Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))


def train(name: str, seed: int, recipe: Recipe, facts: dict[str, Any]) -> Trace:
    """Runs a recipe and keeps what its ranks saw."""
    random = np.random.default_rng(seed)
    inputs, targets = recipe.data
    criterion: nn.Module = nn.CrossEntropyLoss() if recipe.classes else nn.MSELoss()
    parameters = list(recipe.model.parameters())
    optimizer = recipe.optimizer(parameters)
    source = recipe.batches(random)
    shape = recipe.ranks, recipe.steps
    metrics = ("loss", "accuracy", "grad_norm", "grad_norm_local", "lr")
    series = {metric: np.full(shape, np.nan) for metric in metrics}
    for step in range(recipe.steps):
        if recipe.rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
        if recipe.before is not None:
            recipe.before(step, recipe.model, optimizer)
        total = [torch.zeros_like(p) for p in parameters]
        losses, right, seen = np.zeros(recipe.ranks), np.zeros(recipe.ranks), 0
        locals_ = [[torch.zeros_like(p) for p in parameters] for _ in range(recipe.ranks)]
        for _ in range(recipe.micro):
            for rank, chosen in enumerate(next(source)):
                batch = inputs[chosen], targets[chosen]
                if recipe.spoil is not None:
                    batch = recipe.spoil(step, rank, batch)
                output = recipe.model(batch[0])
                loss = criterion(output, batch[1])
                gradients = torch.autograd.grad(loss, parameters)
                losses[rank] += float(loss.detach()) / recipe.micro
                if recipe.classes:
                    right[rank] += float((output.argmax(1) == batch[1]).sum())
                    seen = len(chosen)
                torch._foreach_add_(locals_[rank], gradients, alpha=1 / recipe.micro)
        for rank, gradients in enumerate(locals_):
            series["grad_norm_local"][rank, step] = norm(gradients)
            torch._foreach_add_(total, gradients, alpha=1 / recipe.ranks)
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(parameters, recipe.clip)
        series["grad_norm"][:, step] = norm(total)
        series["lr"][:, step] = optimizer.param_groups[0]["lr"]
        series["loss"][:, step] = losses
        series["accuracy"][:, step] = right / max(seen * recipe.micro, 1)
        optimizer.step()
    if not recipe.classes:
        del series["accuracy"]
    return Trace(name, seed, np.arange(recipe.steps), series, facts=facts)
