"""How many predictions hit their target, for the losses that have classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

# To search the largest of more numbers than this would cost more than an accuracy is worth at
# every step (a language model has 50,000 classes a token): then the leading rows are judged.
_MAX_ELEMENTS = 1 << 20

# Targets of a binary loss are classes where they take few values: 0 and 1, those values smoothed,
# and what a mixture of two samples makes of them. Pixels and probabilities, which an autoencoder
# is trained to give back, take nearly as many values as are examined.
_MAX_VALUES = 16
_VALUES_SEEN = 256

CLASS_INDEX_LOSSES = frozenset(("cross_entropy", "nll_loss", "multi_margin_loss"))
# Loss -> the score from which on the class is the positive one.
_BINARY_LOSSES = {"binary_cross_entropy_with_logits": 0.0, "binary_cross_entropy": 0.5}


class Hits(NamedTuple):
    """Correct predictions among judged ones: numbers on a CPU, one-element tensors on a device."""

    correct: Any
    judged: Any

    def __add__(self, other: object) -> Hits:
        """The hits of both."""
        if not isinstance(other, Hits):
            return NotImplemented
        return Hits(self.correct + other.correct, self.judged + other.judged)

    def ratio(self) -> float | torch.Tensor | None:
        """The accuracy; None where nothing was judged.

        On a device that is not known without waiting: there it is NaN.
        """
        if isinstance(self.judged, int) and not self.judged:
            return None
        ratio: float | torch.Tensor = self.correct / self.judged
        return ratio


def hits_of(name: str, given: Mapping[str, Any]) -> Hits | None:
    """Hits of the loss function of that name, called with `given`; None for any other loss."""
    scores, target = given.get("input"), given.get("target")
    if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    if name in CLASS_INDEX_LOSSES:
        ignore = given.get("ignore_index")
        return hits(scores.detach(), target.detach(), ignore=ignore)
    threshold = _BINARY_LOSSES.get(name)
    if threshold is None or scores.shape != target.shape:
        return None
    scores = scores.detach().reshape(-1)[:_MAX_ELEMENTS]
    target = target.detach().reshape(-1)[:_MAX_ELEMENTS]
    correct = ((scores > threshold) == (target > 0.5)).sum()
    if not target.is_floating_point() or target.numel() <= _MAX_VALUES:
        return Hits(_number(correct), target.numel())
    classes = _few_values(target)
    if target.is_cpu:
        return Hits(_number(correct), target.numel()) if classes else None
    return Hits(correct * classes, classes * target.numel())


def _few_values(target: torch.Tensor) -> torch.Tensor:
    """Whether elements from all over a tensor take few values; of one element, on its device.

    Args:
        target: [N].
    """
    # An odd stride: rows of an image have even lengths, and would be met at the same places.
    values = target[:: target.numel() // _VALUES_SEEN | 1].sort().values
    return (values[1:] != values[:-1]).sum() < _MAX_VALUES


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
    if rows < scores.shape[0]:
        scores, target = scores[:rows], target[:rows]
    if target.shape == scores.shape and target.is_floating_point():
        target, ignore = target.argmax(1), None
    if target.shape != scores.shape[:1] + scores.shape[2:]:
        return None
    correct = scores.argmax(1) == target
    if ignore is None:
        return Hits(_number(correct.sum()), correct.numel())
    judged = target != ignore
    if 0 <= ignore < scores.shape[1]:
        correct = correct & judged  # it could be guessed
    return Hits(_number(correct.sum()), _number(judged.sum()))


def _number(tensor: torch.Tensor) -> int | torch.Tensor:
    return int(tensor.item()) if tensor.is_cpu else tensor
