"""Whether what a model is to predict is among what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rankscope.agent.model.facts import held
from rankscope.agent.model.tensors import number
from rankscope.agent.probes.base import StepFacts
from rankscope.agent.probes.data.given import tensors_in
from rankscope.agent.probes.loss.next_tokens import counted
from rankscope.agent.probes.tables import readable

# Tensors of one call of the model that are looked at, and numbers of one of them.
_MOST_TENSORS, _MOST_NUMBERS = 4, 1 << 20
# Sequences that short repeat their targets by chance.
_SHORTEST = 4
# Places of a batch that count, at least, which masked language models reach with a few sequences:
# so many classes agree by chance in none of 2^16 batches, even of two.
_FEWEST = 16
# Rows of a table that show a correlation, and columns: of one or two columns, a target that follows
# from one of them in a straight line is the task itself. Columns of a target, at the most.
_ROWS, _COLUMNS, _TARGETS = 8, 3, 64
# Products of numbers that several targets, or classes, are held against a table by: a millisecond.
_PRODUCTS = 1 << 22
# Share of a target's variance that a column that is the target leaves: rounding, of float32.
_ROUNDING = 1e-6
# Scores of a batch whose softmax is taken.
_SCORES = 1 << 22

_CLASSES = ("cross_entropy", "nll_loss")
_VALUES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")


class GivenTargets:
    """`given_target_error`, `given_target_first` and `target_column`, at steps of the tier `full`.

    Of sequences of classes: where one of the tensors that the model is given holds at each place
    the very class that is to be predicted there (at 16 places or more that count, `ignore_index`
    aside), `given_target_error` is the mean cross entropy over all places, in nats, and
    `given_target_first` that at the first place; else both are -1. A model that shifts its input by
    itself cannot know the first place, one that copies does. Not where another tensor holds the
    classes one place on: the decoder of an autoencoder.

    Of tables of 3 columns and 8 rows or more (sequences of numbers are such): where each of the up
    to 64 columns of the target is one of theirs, `target_column` is the number of the one that is
    the first, whatever its scale and offset (a squared correlation above 1 - 1e-6 over the rows of
    the batch), else -1. A class may be one column, or each class one that says whether it is that
    one. Of sequences that predict their next value the last one is not. Not posted
    where the target has more than half as many columns as the table: an autoencoder may be given
    some more.
    """

    def __init__(self) -> None:
        self._sequences: list[torch.Tensor] = []
        self._tables: list[torch.Tensor] = []
        self._errors: list[torch.Tensor] = []
        self._columns: list[torch.Tensor] = []

    def given(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """Takes what the model is given."""
        self._sequences, self._tables = [], []
        for tensor, _ in zip(tensors_in(args, kwargs), range(_MOST_TENSORS), strict=False):
            if tensor.dim() not in (2, 3) or not readable(tensor):
                continue
            if not 0 < tensor.numel() <= _MOST_NUMBERS:
                continue
            rows, columns = len(tensor), tensor.numel() // len(tensor)
            if tensor.is_floating_point():
                if rows >= _ROWS and columns >= _COLUMNS:
                    self._tables.append(held(tensor))
            elif tensor.dim() == 2 and columns >= _SHORTEST:
                if tensor.dtype in (torch.int32, torch.int64):
                    self._sequences.append(held(tensor))

    @torch.no_grad()
    def add(self, name: str, given: Mapping[str, Any]) -> None:
        """Takes what the loss function of that name was called with."""
        if not (self._sequences or self._tables):
            return
        scores, target = given.get("input"), given.get("target")
        if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor):
            return
        if not (readable(scores) and readable(target)) or target.device != scores.device:
            return
        if name in _CLASSES and not target.is_floating_point():
            self._hold_against_sequences(name, scores.detach(), target, counted(target, given))
        if name in _CLASSES + _VALUES + _BINARY:
            classes = name in _CLASSES and scores.dim() == 2 and not target.is_floating_point()
            self._hold_against_tables(target, scores.shape[1] if classes else 0)

    def end(self, facts: StepFacts) -> None:
        """Reports what the losses of the step showed."""
        self._sequences, self._tables = [], []
        errors, self._errors = self._errors, []
        columns, self._columns = self._columns, []
        if errors:
            together = torch.stack(errors)
            known = (together >= 0).all()
            none = torch.full_like(together[0, 0], -1.0)
            for series, error in zip(
                ("given_target_error", "given_target_first"), together.mean(0), strict=True
            ):
                facts.scalars[series] = number(torch.where(known, error, none))
        if columns:
            # Another one at each loss of a step is none.
            found = torch.stack(columns)
            same = (found == found[0]).all()
            facts.scalars["target_column"] = number(
                torch.where(same, found[0], torch.full_like(found[0], -1)).double()
            )

    def _hold_against_sequences(
        self, name: str, scores: torch.Tensor, target: torch.Tensor, valid: torch.Tensor
    ) -> None:
        alike = [
            t for t in self._sequences if t.numel() == target.numel() and t.device == target.device
        ]
        if not alike or scores.numel() > _SCORES:
            return
        rows, length = alike[0].shape
        if scores.dim() == 2 and len(scores) == rows * length:
            scores = scores.view(rows, length, -1)
        elif scores.dim() == 3 and target.shape == (rows, length):
            scores = scores.transpose(1, 2)
        else:
            return
        wanted, valid = target.reshape(rows, length), valid.reshape(rows, length)
        alike = [t for t in alike if t.shape == wanted.shape]
        there = torch.stack([((t == wanted) | ~valid).all() for t in alike]).any()
        shifted = torch.stack(
            [((t[:, 1:] == wanted[:, :-1]) | ~valid[:, :-1]).all() for t in alike]
        ).any()
        # One and the same token everywhere is the target of any place; of a few, it is chance.
        varied = ((wanted != wanted[:, :1]) & valid).any() & (valid.sum() >= _FEWEST)
        logs = scores.float()
        logs = logs if name == "nll_loss" else logs.log_softmax(2)
        wrong = -logs.gather(2, wanted.clamp_min(0).unsqueeze(2)).squeeze(2)
        wrong, weights = wrong * valid, valid.float()
        found = torch.stack(
            (
                wrong.sum() / weights.sum().clamp_min(1),
                wrong[:, 0].sum() / weights[:, 0].sum().clamp_min(1),
            )
        )
        none = torch.full_like(found, -1.0)
        self._errors.append(torch.where(there & ~shifted & varied, found, none))

    def _hold_against_tables(self, target: torch.Tensor, classes: int) -> None:
        rows = target.shape[0] if target.dim() else 0
        found = [
            known
            for table in self._tables
            if len(table) == rows and table.device == target.device
            if (known := _held_against(target, table.reshape(rows, -1).double(), classes))
            is not None
        ]
        if found:
            self._columns.append(torch.stack(found).amax())


def _held_against(target: torch.Tensor, columns: torch.Tensor, classes: int) -> torch.Tensor | None:
    """Column of a table, float64 [N, C], that is the target; -1 for none, None for not asked."""
    most = min(_TARGETS, columns.shape[1] // 2)
    wanted = target.reshape(len(columns), -1).double()
    if not 0 < wanted.shape[1] <= most:
        return None
    affordable = _PRODUCTS // columns.numel()
    if wanted.shape[1] > max(affordable, 1):
        return None
    found = _column_of(wanted, columns)
    if 2 < classes <= min(most, affordable) and wanted.shape[1] == 1:
        each = torch.arange(classes, device=target.device)
        of_each = _column_of((wanted == each).double(), columns, some=True)
        found = torch.maximum(found, of_each)
    return found


def _column_of(wanted: torch.Tensor, columns: torch.Tensor, *, some: bool = False) -> torch.Tensor:
    """The column that is the first wanted one, where all wanted ones are among them; else -1.

    Args:
        wanted: float64 [N, K].
        columns: float64 [N, C].
        some: those that are constant, as classes that no sample has, need not be found.

    Returns:
        int64 [].
    """
    wanted, columns = wanted - wanted.mean(0), columns - columns.mean(0)
    power = (wanted * wanted).sum(0)[:, None] * (columns * columns).sum(0)
    shared = (wanted.T @ columns) ** 2
    best, at = torch.where(power > 0, shared / power, torch.zeros_like(power)).max(1)
    varied = (wanted != 0).any(0)
    alike = best > 1 - _ROUNDING
    there = ((alike | ~varied).all() & varied.any()) if some else alike.all()
    # Not by indexing with a tensor, which waits for the device.
    first = at.gather(0, varied.int().argmax().view(1)).squeeze(0)
    return torch.where(there, first, torch.full_like(first, -1))
