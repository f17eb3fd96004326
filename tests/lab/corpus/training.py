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
from torch import nn

from tests.support.runs.traces import Trace

Batch = tuple[torch.Tensor, torch.Tensor]
Objective = Callable[[nn.Module, Batch], tuple[torch.Tensor, int | None]]


@dataclass(kw_only=True)
class Recipe:
    """One training.

    Attributes:
        data: inputs and targets.
        batches: indices of each rank's samples, step by step.
        optimizer: made from the parameters.
        rate: learning rate at a step, None for the optimizer's own.
        spoil: what is done to one rank's batch at a step.
        prepare: called once, with the model, before anything is recorded.
        before: called before each step with the model and the optimizer.
        distort: what a rank's gradient is multiplied by at a step, before it is reduced.
        clip: largest norm of the gradient.
        micro: micro-batches in a step.
        objective: loss of a batch and the number of right answers in it (None: there are none),
            where it is neither cross-entropy (`classes`) nor a squared error.
        held_out: data on which the model is evaluated after every 25th step.
    """

    model: nn.Module
    data: Batch
    batches: Callable[[np.random.Generator], Iterator[list[torch.Tensor]]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int = 600
    ranks: int = 4
    rate: Callable[[int], float] | None = None
    spoil: Callable[[int, int, Batch], Batch] | None = None
    prepare: Callable[[nn.Module], None] | None = None
    before: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None
    distort: Callable[[int, int], float] | None = None
    clip: float | None = None
    micro: int = 1
    classes: bool = True
    objective: Objective | None = None
    held_out: Batch | None = None


# How many steps lie between two evaluations on held-out data, two samples of the updates' size.
EVALUATED = 25
SAMPLED = 4


def supervised(criterion: nn.Module, *, classes: bool) -> Objective:
    """The usual: what the model makes of the inputs against the targets."""

    def objective(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int | None]:
        output = model(batch[0])
        right = int((output.argmax(1) == batch[1]).sum()) if classes else None
        return criterion(output, batch[1]), right

    return objective


def norm(gradients: list[torch.Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))


def train(name: str, seed: int, recipe: Recipe, facts: dict[str, Any]) -> Trace:
    """Runs a recipe and keeps what its ranks saw."""
    random = np.random.default_rng(seed)
    inputs, targets = recipe.data
    criterion: nn.Module = nn.CrossEntropyLoss() if recipe.classes else nn.MSELoss()
    objective = recipe.objective or supervised(criterion, classes=recipe.classes)
    if recipe.prepare is not None:
        recipe.prepare(recipe.model)
    parameters = list(recipe.model.parameters())
    optimizer = recipe.optimizer(parameters)
    source = recipe.batches(random)
    shape = recipe.ranks, recipe.steps
    metrics = ["loss", "accuracy", "grad_norm", "grad_norm_local", "lr", "samples"]
    if recipe.clip is not None:
        metrics += ["grad_norm_preclip", "clip_coefficient"]
    sparse = ("update_ratio", "weight_norm", "eval/loss", "eval/accuracy")
    series = {metric: np.full(shape, np.nan) for metric in (*metrics, *sparse)}
    present = {metric: np.zeros(shape, dtype=bool) for metric in sparse}
    for step in range(recipe.steps):
        if recipe.rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
        if recipe.before is not None:
            recipe.before(step, recipe.model, optimizer)
        total = [torch.zeros_like(p) for p in parameters]
        losses, right, seen = np.zeros(recipe.ranks), np.full(recipe.ranks, np.nan), 0
        locals_ = [[torch.zeros_like(p) for p in parameters] for _ in range(recipe.ranks)]
        for _ in range(recipe.micro):
            for rank, chosen in enumerate(next(source)):
                batch = inputs[chosen], targets[chosen]
                if recipe.spoil is not None:
                    batch = recipe.spoil(step, rank, batch)
                loss, hits = objective(recipe.model, batch)
                gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
                losses[rank] += float(loss.detach()) / recipe.micro
                if hits is not None:
                    right[rank] = np.nan_to_num(right[rank]) + hits
                seen = len(chosen)
                torch._foreach_add_(locals_[rank], gradients, alpha=1 / recipe.micro)
        for rank, gradients in enumerate(locals_):
            if recipe.distort is not None:
                torch._foreach_mul_(gradients, recipe.distort(step, rank))
            series["grad_norm_local"][rank, step] = norm(gradients)
            torch._foreach_add_(total, gradients, alpha=1 / recipe.ranks)
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient
        if recipe.clip is not None:
            whole = float(nn.utils.clip_grad_norm_(parameters, recipe.clip))
            series["grad_norm_preclip"][:, step] = whole
            series["clip_coefficient"][:, step] = min(recipe.clip / (whole + 1e-6), 1.0)
        series["grad_norm"][:, step] = norm(total)
        series["lr"][:, step] = optimizer.param_groups[0]["lr"]
        series["loss"][:, step] = losses
        series["samples"][:, step] = seen * recipe.micro
        series["accuracy"][:, step] = right / max(seen * recipe.micro, 1)
        sampled = step % SAMPLED == 0
        before = [p.detach().clone() for p in parameters] if sampled else []
        optimizer.step()
        if sampled:
            size = norm([p.detach() for p in parameters])
            moved = norm([p.detach() - old for p, old in zip(parameters, before, strict=True)])
            series["weight_norm"][:, step], present["weight_norm"][:, step] = size, True
            series["update_ratio"][:, step], present["update_ratio"][:, step] = moved / size, True
        if recipe.held_out is not None and step % EVALUATED == 0 and step > 0:
            with torch.no_grad():
                loss, hits = objective(recipe.model, recipe.held_out)
            series["eval/loss"][:, step], present["eval/loss"][:, step] = float(loss), True
            if hits is not None:
                share = hits / len(recipe.held_out[0])
                series["eval/accuracy"][:, step] = share
                present["eval/accuracy"][:, step] = True
    if np.isnan(series["accuracy"]).all():
        del series["accuracy"]
    for metric in sparse:
        if not present[metric].any():
            del series[metric], present[metric]
        else:
            series[metric] = np.where(present[metric], series[metric], 0.0)
    return Trace(name, seed, np.arange(recipe.steps), series, present, facts=facts)
