"""How many predictions hit their target, for the losses that have classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Looking for the largest of more numbers than this would cost more than an accuracy is worth at
# every step (a language model has 50,000 classes a token): then the leading rows are judged.
_MAX_ELEMENTS = 1 << 20

_CLASS_INDEX_LOSSES = (
    torch.nn.CrossEntropyLoss,
    torch.nn.NLLLoss,
    torch.nn.MultiMarginLoss,
)
_BINARY_LOSSES = (torch.nn.BCEWithLogitsLoss, torch.nn.BCELoss)


@dataclass(frozen=True, slots=True)
class Hits:
    """Correct predictions among judged ones; both tensors of one element."""

    correct: torch.Tensor
    judged: torch.Tensor


def hits_of_module(loss: torch.nn.Module, args: tuple[Any, ...]) -> Hits | None:
    """Hits of a classification loss module called with `args`; None for any other loss."""
    if len(args) < 2 or not all(isinstance(a, torch.Tensor) for a in args[:2]):
        return None
    scores, target = args[0].detach(), args[1].detach()
    if isinstance(loss, _CLASS_INDEX_LOSSES):
        return hits(scores, target, ignore=getattr(loss, "ignore_index", None))
    if isinstance(loss, _BINARY_LOSSES) and scores.shape == target.shape:
        threshold = 0.0 if isinstance(loss, torch.nn.BCEWithLogitsLoss) else 0.5
        scores, target = scores.reshape(-1), target.reshape(-1)
        scores, target = scores[:_MAX_ELEMENTS], target[:_MAX_ELEMENTS]
        correct = (scores > threshold) == (target > 0.5)
        return Hits(correct.sum(), torch.tensor(correct.numel()))
    return None


def hits_of_function(args: tuple[Any, ...], ignore: int) -> Hits | None:
    """Hits of `cross_entropy` or `nll_loss` called as functions with `args`."""
    if len(args) < 2 or not all(isinstance(a, torch.Tensor) for a in args[:2]):
        return None
    return hits(args[0].detach(), args[1].detach(), ignore=ignore)


def hits(scores: torch.Tensor, target: torch.Tensor, *, ignore: int | None) -> Hits | None:
    """Hits where classes are numbered.

    Args:
        scores: [N, C] or [N, C, ...], or [C] for a single sample.
        target: class numbers, [N], [N, ...] or a scalar; class probabilities, of the shape of
            `scores`, count by their largest entry.
        ignore: target that is not judged.
    """
    if scores.dim() == 1:
        scores, target = scores.unsqueeze(0), target.unsqueeze(0)
    if scores.dim() < 2 or not scores.shape[0]:
        return None
    rows = max(1, _MAX_ELEMENTS // max(scores[0].numel(), 1))
    scores, target = scores[:rows], target[:rows]
    if target.shape == scores.shape and target.is_floating_point():
        target = target.argmax(1)
    if target.shape != scores.shape[:1] + scores.shape[2:]:
        return None
    correct = scores.argmax(1) == target
    if ignore is None:
        return Hits(correct.sum(), torch.tensor(correct.numel()))
    judged = target != ignore
    return Hits((correct & judged).sum(), judged.sum())
