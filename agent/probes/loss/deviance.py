"""How much better a model's answers are than the best answer that is always the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rankscope.agent.model.tensors import number
from rankscope.agent.probes.base import StepFacts
from rankscope.agent.probes.loss.kept_targets import ABSOLUTE, KeptTargets
from rankscope.agent.probes.tables import readable

# Numbers that are kept of one kind of target: a class, or a place in a target, has one of its own.
# Pixels of a 256 x 256 image or a vocabulary of 65,536 tokens, half a megabyte.
_MOST_PLACES = 1 << 16
# Kinds of targets (function, shape) that one training has: more are no fixed ones.
_MOST_KINDS = 8
# The best constant answer is computed anew at each of the first batches, then at every
# eighth: by then eight more change what is known of the targets by less than an eighth.
_FIRST, _EVERY = 64, 8

# Targets of a batch that say how they scatter: fewer are of one class by chance.
_SOME = 8

_BINARY = frozenset(("binary_cross_entropy", "binary_cross_entropy_with_logits"))
_CLASSES = frozenset(("cross_entropy", "nll_loss"))
_WEIGHTS = ("weight", "pos_weight")


class _Kind:
    """Targets of one kind: sums over them, and the loss of the best constant answer."""

    __slots__ = ("batches", "constant", "count", "kept", "mixed", "of_step", "squares", "sums")

    def __init__(self, places: int, device: torch.device) -> None:
        self.sums = torch.zeros(places, dtype=torch.float64, device=device)
        self.squares: torch.Tensor | None = None
        self.kept: KeptTargets | None = None
        self.count: Any = 0
        self.batches = 0
        self.constant: float | torch.Tensor | None = None
        # Of classes: their numbers in the step's losses, and the label smoothing.
        self.of_step: tuple[torch.Tensor, float] | None = None
        # Of two labels: whether a step had both of them; of classes it does not matter.
        self.mixed: torch.Tensor | None = None

    def due(self) -> bool:
        """Whether the best constant answer is to be computed anew."""
        self.batches += 1
        return self.batches <= _FIRST or not self.batches % _EVERY


class Deviance:
    """The share of the deviance that a model explains, of one loss after the other.

    1 - L / L0: L is the loss of the batch, L0 that of the best answer which does not depend on the
    input, by all targets that were seen so far: of a cross entropy the entropy of the classes'
    frequencies (of each label's, where they are binary), of a squared error the variance, of an
    absolute one (L1, Huber) the mean distance from the median of the newest ones (`KeptTargets`).
    For classes this is McFadden's pseudo R^2 (1974), for squares R^2. Nothing is learned from the
    inputs as long as it is 0 or less.

    `target_deviance` is L0 by the targets of one step alone: of targets that become others, as
    where further classes come in, it changes, whatever the model does. `target_share` is, of
    classes, that over L0: 1 where batches are drawn at random, and less the more the targets of a
    step are alike; 0 where all so far are of one class. Of 8 targets or more. Of binary labels, one
    a sample, it is 1 until a step had both: what has one label at a time from the start on is a
    player of a game, as a discriminator that is shown the real ones in one step and the made ones
    in the next.

    Nothing waits for a device: there it stays a tensor.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self._variances: list[float | torch.Tensor] = []

    def end(self, facts: StepFacts) -> None:
        """Reports what the targets of the step's losses are."""
        alone: list[Any] = []
        for kind in self._kinds.values():
            if kind.of_step is None:
                continue
            sums, smoothing = kind.of_step
            kind.of_step = None
            if sums.is_cpu and sums.sum() < _SOME:
                continue
            entropy = _entropy(sums, smoothing)
            if kind.mixed is not None:
                kind.mixed |= (sums > 0).all()
                if kind.constant is None or (sums.is_cpu and not kind.constant):
                    continue
                entropy = torch.where(
                    kind.mixed, entropy, torch.as_tensor(kind.constant, dtype=torch.float64)
                )
            alone.append(number(entropy))
            if isinstance(kind.constant, torch.Tensor):
                facts.scalars["target_share"] = alone[-1] / kind.constant.clamp_min(1e-30)
            elif kind.constant:
                facts.scalars["target_share"] = alone[-1] / kind.constant
            elif len(sums) > 1:
                facts.scalars["target_share"] = 0.0
        alone += self._variances
        self._variances.clear()
        if alone:
            facts.scalars["target_deviance"] = sum(alone) / len(alone)

    def explained(
        self, name: str, given: Mapping[str, Any], output: torch.Tensor
    ) -> float | torch.Tensor | None:
        """The share of one loss: a number, or one element on its device.

        Args:
            name: of the loss function.
            given: what it was called with.
            output: what it returned.

        Returns:
            None for other losses, for weighted ones, for such as are neither a mean nor a sum, and
            where a constant answer makes no loss.
        """
        scores, target = given.get("input"), given.get("target")
        if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor):
            return None
        if any(given.get(weight) is not None for weight in _WEIGHTS) or target.requires_grad:
            return None
        reduction = given.get("reduction")
        if output.numel() != 1 or reduction not in ("mean", "sum") or not scores.numel():
            return None
        if not readable(target) or not readable(scores) or scores.dtype.is_complex:
            return None
        counted: Any = None
        if name in _CLASSES:
            counted = self._classes(name, given, scores, target)
        elif name in ABSOLUTE and scores.shape == target.shape:
            counted = self._absolute(name, given, target)
        elif (name in _BINARY or name == "mse_loss") and scores.shape == target.shape:
            counted = self._values(name, target)
        if counted is None:
            return None
        constant, elements = counted
        loss: Any = number(output.detach())
        if reduction == "sum" and not (isinstance(elements, int) and not elements):
            loss = loss / elements
        if isinstance(constant, float):
            return 1 - float(loss) / constant if constant > 0 else None
        share: torch.Tensor = 1 - loss.double().reshape(()) / constant
        return share

    def _kind(self, key: tuple[Any, ...], places: int, device: torch.device) -> _Kind | None:
        known = self._kinds.get(key)
        if known is None and len(self._kinds) < _MOST_KINDS:
            known = self._kinds[key] = _Kind(places, device)
        return known

    def _classes(
        self, name: str, given: Mapping[str, Any], scores: torch.Tensor, target: torch.Tensor
    ) -> tuple[float | torch.Tensor, Any] | None:
        if scores.dim() == 1:
            scores, target = scores.unsqueeze(0), target.unsqueeze(0)
        places = scores.shape[1]
        if places > _MOST_PLACES or target.device != scores.device:
            return None
        kind = self._kind((name, places, scores.device), places, scores.device)
        if kind is None:
            return None
        if target.shape == scores.shape and target.is_floating_point():
            sums = target.double().transpose(0, 1).reshape(places, -1).sum(1)
            elements: Any = target.numel() // places
        elif target.shape == scores.shape[:1] + scores.shape[2:]:
            flat, ignored = target.reshape(-1), given.get("ignore_index", -100)
            if flat.is_cpu:
                chosen = flat[flat != ignored]
                sums, elements = torch.bincount(chosen, minlength=places), chosen.numel()
            else:
                # Weights of 0 in place of a choice, whose number the device would have to report.
                judged = (flat != ignored).double()
                sums = torch.zeros_like(kind.sums)
                sums.scatter_add_(0, flat.clamp(0, places - 1).long(), judged)
                elements = judged.sum()
        else:
            return None
        kind.sums += sums
        smoothing = given.get("label_smoothing") or 0.0
        before = kind.of_step[0] if kind.of_step is not None else 0
        kind.of_step = sums + before, smoothing
        if kind.due() or kind.constant is None:
            kind.constant = number(_entropy(kind.sums, smoothing))
        return kind.constant, elements

    def _values(self, name: str, target: torch.Tensor) -> tuple[float | torch.Tensor, int] | None:
        shape = tuple(target.shape[1:])
        places = math.prod(shape)
        if not target.dim() or not 0 < places <= _MOST_PLACES:
            return None
        kind = self._kind((name, shape, target.device), places, target.device)
        if kind is None:
            return None
        rows = target.reshape(target.shape[0], places).double()
        kind.sums += rows.sum(0)
        kind.count += target.shape[0]
        if name == "mse_loss":
            squares = (rows * rows).sum(0)
            kind.squares = squares if kind.squares is None else kind.squares + squares
        elif places == 1:
            ones = rows.sum()
            labels = torch.stack((target.shape[0] - ones, ones))
            kind.of_step = labels + (kind.of_step[0] if kind.of_step is not None else 0), 0.0
            if kind.mixed is None:
                kind.mixed = torch.zeros((), dtype=torch.bool, device=target.device)
        if kind.due() or kind.constant is None:
            kind.constant = number(_spread(kind))
        if name == "mse_loss" and len(rows) >= _SOME:
            self._variances.append(number(rows.var(0).mean()))
        return kind.constant, target.numel()

    def _absolute(
        self, name: str, given: Mapping[str, Any], target: torch.Tensor
    ) -> tuple[float | torch.Tensor, int] | None:
        shape = tuple(target.shape[1:])
        places = math.prod(shape)
        if not target.dim() or not places or not KeptTargets.fits(places):
            return None
        kind = self._kind((name, shape, target.device), 1, target.device)
        if kind is None:
            return None
        kept = kind.kept = kind.kept or KeptTargets(name, given, places, target.device)
        rows = target.detach().reshape(target.shape[0], places).double()
        kept.add(rows)
        if kind.due() or kind.constant is None:
            kind.constant = number(kept.constant())
        if len(rows) >= _SOME:
            self._variances.append(number(kept.least(rows)))
        return kind.constant, target.numel()


def _entropy(counts: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Of the distribution of classes that were seen so often, in nats; one element.

    With Miller and Madow's correction (1955): of few samples the plain one is too small by about
    (classes - 1) / (2 N).
    """
    total = counts.sum().clamp_min(1.0)
    shares = counts / total * (1 - smoothing) + smoothing / len(counts)
    entropy = -(torch.xlogy(shares, shares)).sum()
    return entropy + ((counts > 0).sum() - 1) / (2 * total)


def _spread(kind: _Kind) -> torch.Tensor:
    """Mean loss of the best constant answer, of squares or of binary labels; one element."""
    mean = kind.sums / kind.count
    if kind.squares is None:
        entropy: torch.Tensor = -(torch.xlogy(mean, mean) + torch.xlogy(1 - mean, 1 - mean)).mean()
        return entropy
    # What is left of a large mean's square is rounding.
    spread = kind.squares / kind.count - mean * mean
    floor = 1e-9 * kind.squares.mean() / kind.count
    least: torch.Tensor = spread.mean()
    return torch.where(least > floor, least, torch.zeros_like(least))
