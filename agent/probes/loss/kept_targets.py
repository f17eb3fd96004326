"""The best constant answer to absolute errors, which takes the targets themselves and no sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

ABSOLUTE = frozenset(("l1_loss", "smooth_l1_loss", "huber_loss"))
# Numbers that are kept, and rows of them at least: of 16 the loss of the best constant answer errs
# by a fifth at one place, and there are then 1,024 places of which the mean is taken.
_MOST, _LEAST_ROWS = 1 << 14, 16
# Numbers at one place: the mean of their distances errs by a hundredth.
_MOST_ROWS = 4096
# Answers that are tried, from the median, which is best for absolute errors, to the mean, which is
# best for squares: in between lies what is best for errors that are both.
_TRIED = 5


class KeptTargets:
    """The newest targets of one kind: as many rows as fit into 16,384 numbers.

    Args:
        name: of the loss function.
        given: what it was called with; `beta` or `delta` are where an error becomes an absolute
            one.
        places: numbers of a row.
    """

    __slots__ = ("_bend", "_count", "_name", "_rows")

    def __init__(
        self, name: str, given: Mapping[str, Any], places: int, device: torch.device
    ) -> None:
        rows = max(min(_MOST // places, _MOST_ROWS), 1)
        self._rows = torch.zeros(rows, places, dtype=torch.float64, device=device)
        self._count = 0
        self._name = name
        self._bend = float(given.get("beta", given.get("delta", 1.0)))

    @staticmethod
    def fits(places: int) -> bool:
        """Whether enough rows of so many numbers are kept."""
        return places * _LEAST_ROWS <= _MOST

    def add(self, rows: torch.Tensor) -> None:
        """Takes the targets of a batch, float64 [N, places]."""
        most = len(self._rows)
        rows = rows[-most:]
        begin = self._count % most
        fitting = min(most - begin, len(rows))
        self._rows[begin : begin + fitting] = rows[:fitting]
        self._rows[: len(rows) - fitting] = rows[fitting:]
        self._count += len(rows)

    def constant(self) -> torch.Tensor:
        """Mean loss of the best constant answer to what is kept; one element."""
        return self.least(self._rows[: min(self._count, len(self._rows))])

    def least(self, rows: torch.Tensor) -> torch.Tensor:
        """Mean loss of the best constant answer to rows; one element.

        It is chosen by the rows that it is judged by, of which N make its loss too small by about
        1 / N.
        """
        median, mean = rows.median(0).values, rows.mean(0)
        absolute = self._name == "l1_loss" or not self._bend
        tried = (0.0,) if absolute else [place / (_TRIED - 1) for place in range(_TRIED)]
        # By hand: functions of torch's are listened to.
        losses = [
            _errors(self._name, rows - torch.lerp(median, mean, share), self._bend).mean(0)
            for share in tried
        ]
        best: torch.Tensor = torch.stack(losses).amin(0).mean()
        return best * (1 + 1 / len(rows))


def _errors(name: str, differences: torch.Tensor, bend: float) -> torch.Tensor:
    """Of the loss function, by the differences."""
    size = differences.abs()
    if name == "l1_loss" or not bend:
        return size
    square = 0.5 * differences.square()
    if name == "huber_loss":
        return torch.where(size < bend, square, bend * (size - 0.5 * bend))
    return torch.where(size < bend, square / bend, size - 0.5 * bend)
