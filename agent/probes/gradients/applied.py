"""Gradients as they were applied: norms and fingerprints."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rankscope.agent.fingerprint import FingerprintValues, Pending
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import Context, Probe, SharedPass, StepFacts, processor_time
from rankscope.agent.probes.norms import (
    gathered,
    length_of,
    lie_here,
    norms_of,
    stored,
    tensor_norms,
    written_out,
)
from rankscope.agent.wire import Float64

# Sets of parameters with a gradient that are numbered: experts that are chosen at random have more.
_MOST_TASKS = 64


class Gradients(Probe):
    """`grad_norm`, `task`, and fingerprints of the reduced gradient (stage `reduced_gradient`).

    Costs one pass over the gradients (tier `signals`); at sampled steps (tier `full`), and at the
    step after one, that pass is also one for digests and sketches and takes twice as long. On
    devices these are passes of their own, and norms cost 6 microseconds a parameter.

    The applied gradient is read after the optimizer has stepped: that is after the reduction, after
    unscaling and clipping, and right under closures too. A parameter without a gradient has the
    digest 0 and a sketch of zeros, as one with a gradient of zeros. One whose gradient no optimizer
    applies has a sketch of NaN, and no part in the norm; one that another optimizer has applied, on
    a backward pass of its own, has the fingerprint of then. A sparse gradient is written
    out for its fingerprint; where it is too large for that its sketch is NaN.

    `task` is the number of the set of parameters that had a gradient, in the order in which they
    were first seen (tier `signals`, from the second set on): tasks that are trained in turn, each
    with a head of its own, have each their own.

    Leaves `gradient_norms` (`GradientNorms`) and, where fingerprints were taken,
    `reduced_gradient` (their `Fingerprints`).
    """

    name = "gradients"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._rows: GradientRows | None = None
        self._following = -1  # the step after a full one
        # Of parameters whose optimizer has stepped before, what it has applied.
        self._rows_before: GradientRows | None = None
        self._before: list[_Before] = []
        self._pass = SharedPass("signals", "full")
        self._reported = False
        # Which parameters had no gradient, one byte each -> number of the task.
        self._tasks: dict[bytes, int] = {}

    def other_step(self, facts: StepFacts, rows: frozenset[int]) -> None:
        """Fingerprints of what another optimizer has applied."""
        context = self.context
        if not (context.full or facts.step == self._following):
            return
        with facts.charged("full"):
            group = context.parameters
            if self._rows_before is None or self._rows_before.of is not group:
                self._rows_before = GradientRows(group)
            there = [p.grad if row in rows else None for row, p in enumerate(group.tensors)]
            taken = self._rows_before.begin(there, digests=context.full)
            self._before.append(_Before(facts.step, group, rows, taken))

    def after_step(self, facts: StepFacts) -> None:
        """Norms and fingerprints of what was applied."""
        context = self.context
        full = context.full
        is_sampled = full or facts.step == self._following
        if not (is_sampled or context.signals):
            return
        began = processor_time()
        group = context.parameters
        if self._rows is None or self._rows.of is not group:
            self._rows = GradientRows(group)
        gradients = [p.grad for p in group.tensors]
        squared = context.signals and lie_here(gradients)
        taken = None
        odd = context.not_applied
        if (is_sampled or squared) and any(g is not None for g in gradients):
            taken = self._rows.begin(
                gradients, digests=full, fingerprints=is_sampled, squares=squared, unknown=odd
            )
            taken.replaced = [
                (before.rows & odd, before.taken)
                for before in self._before
                if before.step == facts.step and before.group is group
            ]
            self._before.clear()
        passed = processor_time() - began
        if taken is not None and is_sampled:
            self._publish(facts, group, taken, posted=full)
        if full:
            self._following = facts.step + 1
        if is_sampled and not squared:
            facts.charge("full", passed)
        else:
            self._pass.charge(facts, passed, both=is_sampled)
        if context.signals:
            with facts.charged("signals"):
                self._measure(facts, gradients, taken if squared else None)

    def _measure(
        self, facts: StepFacts, gradients: list[torch.Tensor | None], taken: Fingerprints | None
    ) -> None:
        odd = self.context.not_applied
        without = bytes(gradient is None for gradient in gradients)
        task = self._tasks.get(without)
        if task is None and len(self._tasks) < _MOST_TASKS:
            task = self._tasks[without] = len(self._tasks)
        if task is not None and len(self._tasks) > 1:
            facts.scalars["task"] = task
        squares = None if taken is None else taken.squares
        if squares is not None:
            # They are plain tensors on the host: nothing has to be asked of each of them.
            rows = [row for row, gradient in enumerate(gradients) if gradient is not None]
            if len(rows) < len(squares):
                squares = squares[rows]
            applied = [at for at, row in enumerate(rows) if row not in odd] if odd else slice(None)
            facts.scalars["grad_norm"] = length_of(squares[applied])
            there = [gradient for gradient in gradients if gradient is not None]
            facts.shared["gradient_norms"] = GradientNorms(rows, there, squares=squares)
            return
        rows = []
        tensors: list[torch.Tensor] = []
        for row, gradient in enumerate(gradients):
            if gradient is None:
                continue
            values = stored(gradient)
            if values is None:
                if not self._reported:
                    self._reported = True
                    self.context.note(
                        "grad_norm is not recorded: a sparse gradient is too large to be added up "
                        "without waiting for the device"
                    )
                return
            rows.append(row)
            tensors.append(values)
        if tensors:
            norms = gathered(tensor_norms(tensors))
            # Of tensors that are dealt out a rank may hold nothing: that is no gradient of zero.
            if any(t.numel() for t in tensors):
                # One by one: a list of positions would be sent to the device, and waited for.
                own = [norms[at] for at, row in enumerate(rows) if row not in odd] if odd else ()
                own_norms = torch.stack(own) if own else norms
                facts.scalars["grad_norm"] = torch.linalg.vector_norm(own_norms)
            facts.shared["gradient_norms"] = GradientNorms(rows, tensors, norms=norms)

    def _publish(
        self, facts: StepFacts, group: TensorGroup, taken: Fingerprints, *, posted: bool
    ) -> None:
        facts.shared["reduced_gradient"] = taken
        if posted:

            def deliver() -> None:
                facts.fingerprints.append(
                    group.fingerprints(facts.step, "reduced_gradient", taken.result())
                )

            facts.when_ready(taken, deliver)


class GradientNorms:
    """Norms of the gradients that there are, made of sums of squares where these are known.

    Attributes:
        rows: positions of their parameters in the group, [n].
        tensors: what this rank holds of them (of sparse ones: the stored values), [n].
    """

    __slots__ = ("_norms", "_squares", "rows", "tensors")

    def __init__(
        self,
        rows: list[int],
        tensors: list[torch.Tensor],
        *,
        norms: torch.Tensor | None = None,
        squares: Float64 | None = None,
    ) -> None:
        self.rows = rows
        self.tensors = tensors
        self._norms = norms
        self._squares = squares

    @property
    def norms(self) -> torch.Tensor:
        """[n], where the gradients are."""
        if self._norms is None:
            assert self._squares is not None
            self._norms = norms_of(self._squares)
        return self._norms

    def nonzero(self) -> int | torch.Tensor:
        """How many of them are not zero; NaN counts as one that is not."""
        if self._squares is None:
            return torch.count_nonzero(self.norms)
        return int(np.count_nonzero(self._squares))


class Fingerprints:
    """Fingerprints under way, some rows of which cannot be known.

    Attributes:
        squares: as of `Pending`.
        replaced: rows that are to be of other fingerprints of the same tensors, and these.
    """

    def __init__(self, pending: Pending, unknown: list[int]) -> None:
        self.squares = pending.squares
        self.replaced: Sequence[tuple[Collection[int], Fingerprints]] = ()
        self._pending = pending
        self._unknown = unknown

    def ready(self) -> bool:
        """Whether `result` does not wait."""
        return all(others.ready() for _, others in self.replaced) and self._pending.ready()

    def result(self) -> FingerprintValues:
        """The fingerprints; NaN sketches where a row is unknown."""
        fingerprints = self._pending.result()
        sketches = fingerprints.sketches
        if self._unknown and sketches is not None:
            sketches[self._unknown] = np.nan
            fingerprints.digests[self._unknown] = 0
        for which, taken in self.replaced if sketches is not None else ():
            rows, others = sorted(which), taken.result()
            assert sketches is not None
            assert others.sketches is not None
            sketches[rows] = others.sketches[rows]
            fingerprints.digests[rows] = others.digests[rows]
        return fingerprints


@dataclass(frozen=True, slots=True)
class _Before:
    """Fingerprints of the gradients of some rows, that were taken earlier in a step."""

    step: int
    group: TensorGroup
    rows: frozenset[int]
    taken: Fingerprints


class GradientRows:
    """Fingerprints of gradients as rows of the table of their parameters.

    Attributes:
        of: the group of parameters.
    """

    def __init__(self, of: TensorGroup) -> None:
        self.of = of
        # A plan of its own: a gradient may have another dtype than its parameter.
        self._plans = TensorGroup(of.table, of.names, ())
        self._none = torch.empty(0)

    def begin(
        self,
        gradients: Sequence[torch.Tensor | None],
        *,
        digests: bool = True,
        fingerprints: bool = True,
        squares: bool = False,
        unknown: Collection[int] = (),
    ) -> Fingerprints:
        """Fingerprints of the gradients as they are now; a missing one counts as zeros.

        Args:
            gradients: one a parameter of the group.
            unknown: rows of which nothing is said.
            digests: whether digests are wanted, where fingerprints are.
            fingerprints: whether anything but sums of squares is.
            squares: whether these are. Only of gradients that lie here (`lie_here`).
        """
        unread = list(unknown)
        if squares:
            tensors = [self._none if gradient is None else gradient for gradient in gradients]
        else:
            tensors = self._written_out(gradients, unread)
        pending = self._plans.plan(tensors).begin(
            tensors, sketches=fingerprints, digests=fingerprints and digests, squares=squares
        )
        return Fingerprints(pending, unread)

    @torch.no_grad()
    def _written_out(
        self, gradients: Sequence[torch.Tensor | None], unknown: list[int]
    ) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for row, gradient in enumerate(gradients):
            values = self._none if gradient is None else written_out(gradient)
            if values is None:
                unknown.append(row)
                values = self._none
            tensors.append(values)
        return tensors
