"""Gradients of one step under way: summed over its micro-batches, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rankscope.agent.fingerprint import FingerprintPlan, OpenSketches, Pending
from rankscope.agent.probes.norms import lie_here, norms_of, tensor_norms
from rankscope.agent.wire import Float64


class GradientSum:
    """What was seen of one parameter during one step.

    Attributes:
        known: whether all of it could be read.
        values: sum of a small gradient.
        norm: norm of a large one, as long as there was one micro-batch, where it is known apart
            from its sketch.
    """

    __slots__ = ("_rounds", "_sketch", "_waiting", "known", "norm", "values")

    def __init__(self) -> None:
        self.known = True
        self.values: torch.Tensor | None = None
        self.norm: torch.Tensor | None = None
        self._waiting: list[Pending] = []
        self._rounds: list[tuple[Round, int]] = []
        self._sketch: Float64 | None = None

    def add_small(self, values: torch.Tensor, copy: torch.Tensor) -> None:
        """Adds a small gradient; `copy` is the memory that the first one is kept in."""
        if self.values is None:
            self.values = copy.copy_(values)
        else:
            self.values += values

    def add_large(self, values: torch.Tensor, plan: FingerprintPlan) -> None:
        """Adds a large one, of which the plan makes a sketch."""
        first = self._sketch is None and not self._waiting
        squared = first and lie_here([values])
        pending = plan.begin([values], sketches=True, digests=False, squares=squared)
        self.norm = None
        if first:
            squares = pending.squares
            self.norm = (tensor_norms([values]) if squares is None else norms_of(squares))[0]
        self._waiting.append(pending)
        if self.ready():
            self.sketch()

    def add_round(self, one: Round, row: int) -> None:
        """Adds a large one that is tensor `row` of a round."""
        self.norm = None
        self._rounds.append((one, row))

    @property
    def large(self) -> bool:
        """Whether a large gradient was added."""
        return self._sketch is not None or bool(self._waiting) or bool(self._rounds)

    def ready(self) -> bool:
        """Whether `sketch` and `squares` do not wait."""
        return all(w.ready() for w in self._waiting) and all(r.ready() for r, _ in self._rounds)

    def squares(self) -> float:
        """Sum of squares of a large gradient: of several micro-batches that of their sketch."""
        if len(self._rounds) == 1 and self._sketch is None and not self._waiting:
            one, row = self._rounds[0]
            return one.squares(row)
        return float((self.sketch() ** 2).sum())

    def sketch(self) -> Float64:
        """Sum of the sketches of a large gradient, float64 [BUCKETS]."""
        for pending in self._waiting:
            sketches = pending.result().sketches
            assert sketches is not None
            self._sketch = sketches[0] if self._sketch is None else self._sketch + sketches[0]
        self._waiting = []
        rounds = [one.sketch(row) for one, row in self._rounds]
        every = rounds if self._sketch is None else [self._sketch, *rounds]
        assert every
        total: Float64 = np.sum(every, axis=0)
        return total


class Round:
    """Large gradients of one micro-batch at most of each tensor, under way on their device."""

    def __init__(self, sketches: OpenSketches, places: dict[int, int]) -> None:
        self._open, self._places = sketches, places
        self._pending: Pending | None = None
        self._rows: set[int] = set()

    def has(self, row: int) -> bool:
        """Whether there is one of that tensor already."""
        return row in self._rows

    def add(self, row: int, values: torch.Tensor) -> None:
        """Takes one."""
        self._rows.add(row)
        self._open.add(self._places[row], values)

    def close(self) -> None:
        """No more will come: what was found travels to the host."""
        self._pending = self._open.close()

    def ready(self) -> bool:
        """Whether it is closed, and `sketch` and `squares` do not wait."""
        return self._pending is not None and self._pending.ready()

    def sketch(self, row: int) -> Float64:
        """Of one tensor, float64 [BUCKETS]; waits for the device."""
        assert self._pending is not None
        sketches = self._pending.result().sketches
        assert sketches is not None
        found: Float64 = sketches[self._places[row]]
        return found

    def squares(self, row: int) -> float:
        """Sum of squares of one tensor; waits for the device."""
        assert self._pending is not None
        squares = self._pending.result().squares
        assert squares is not None
        return float(squares[self._places[row]])


class Rounds:
    """Large gradients on a device: all of a backward pass travel to the host together.

    Args:
        names: of all tensors.
        large: row -> what this rank holds of the parameter. Taken where all are on one device that
            is not the host.
    """

    def __init__(
        self, names: Sequence[str] = (), large: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        self._names, self._of = names, large or {}
        self._places = {row: place for place, row in enumerate(self._of)}
        devices = {t.device for t in self._of.values()}
        self._taken = len(devices) == 1 and next(iter(devices)).type != "cpu"
        self._plan: FingerprintPlan | None = None
        self._open: Round | None = None

    def take(self, row: int, values: torch.Tensor) -> bool:
        """Whether a gradient is taken: one that lies where its parameter does, and like it."""
        if not self._taken:
            return False
        of = self._of[row]
        return values.dtype is of.dtype and values.device == of.device

    def add(self, row: int, values: torch.Tensor) -> Round:
        """Takes one; the round that it belongs to."""
        if self._plan is None:
            self._plan = FingerprintPlan(
                [self._names[r] for r in self._of], [t.detach() for t in self._of.values()]
            )
        if self._open is not None and self._open.has(row):
            self.close()  # another micro-batch
        if self._open is None:
            self._open = Round(self._plan.open(), self._places)
        self._open.add(row, values)
        return self._open

    def close(self) -> None:
        """What was taken so far travels to the host."""
        if self._open is not None:
            self._open.close()
        self._open = None
