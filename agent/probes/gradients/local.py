"""Gradients of this rank alone, before any wrapper has reduced them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from rankscope.agent.fingerprint import FingerprintPlan, FingerprintValues
from rankscope.agent.model.facts import are_held_whole, held
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import LONGEST_PIECE, Context, Probe, StepFacts, processor_time
from rankscope.agent.probes.gradients.applied import Fingerprints, GradientRows
from rankscope.agent.probes.gradients.sums import GradientSum, Rounds
from rankscope.agent.probes.gradients.tensor_hooks import TensorHooks
from rankscope.agent.probes.norms import (
    gathered,
    length_of,
    lie_here,
    norms_of,
    small_enough,
    tensor_norms,
    written_out,
)
from rankscope.agent.probes.numbers_in_transit import Arrival, Together
from rankscope.agent.tripwires import SAMPLES, TOKENS, Tokens

# The event of a pass with which no optimizer has stepped.
SKIPPED = "gradient.skipped"
_MOST_NAMES = 20
# Passes whose answers may be under way on a device.
_MOST_GIVEN_UP = 16
_HALF = frozenset((torch.bfloat16, torch.float16))
# Wrappers whose tensor hooks do not fire, or fire on something else than the parameter.
_SHARDING = frozenset(("FSDPModule", "FullyShardedDataParallel"))


class LocalGradients(Probe):
    """`grad_norm_local`, and sketches of the local gradient (stage `local_gradient`).

    Tier `full`. Costs about 6 microseconds a parameter and micro-batch, another 12 a parameter for
    the hooks and what is said in the end, and a pass over the gradients (on devices, two). At other
    steps nothing is hooked. Small gradients are copied into memory that is kept (up to 16 MiB); of
    those of more than 65,536 elements only sketches are kept.

    Tensor hooks on the parameters see each micro-batch before it is reduced, with `no_sync` and
    without. A step's local gradient is their sum, so that the mean of all ranks' sketches is the
    sketch of the reduced gradient, up to rounding (and to clipping). The digests are 0: the bits of
    a sum of our own mean nothing. A parameter that got no gradient has a sketch of zeros; one whose
    gradient cannot be read (placed otherwise than its parameter) one of NaN, and there is no norm;
    one whose gradient no optimizer applies one of NaN, too. What another optimizer has applied, on
    a backward pass of its own, has no part in the norm.

    On a device the large ones of a backward pass are launched one by one, and travel together.
    Where several micro-batches make a step, the large ones enter the norm by the norm of their
    sketch, each with a standard error of 9 %.

    Under a `GradScaler` what is seen is scaled: to be divided by `amp_scale`. Under FSDP no hook
    sees the local gradient: the probe says so and does nothing.

    Passes that no optimizer steps with are none of the step's: a loss scaler skipped it, or
    gradients were set to None before another pass. Where what they gave was not finite, on this
    rank or after the reduction, the event `gradient.skipped` names the tensors of this rank that
    held such values (none: not this rank's) and whether a loss scaler skips, and the next 16 steps
    are sampled; at most 8 times at once, and once more every 1,024 steps.

    Leaves `local_gradient`: something under way whose `result()` are the fingerprints.
    """

    name = "local_gradients"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._group: TensorGroup | None = None
        self._rows: GradientRows | None = None
        self._hooks = TensorHooks()
        self._plain = False  # whether this rank holds the parameters themselves
        self._sums: list[GradientSum | None] = []
        # Of parameters whose optimizer has stepped before: what it has applied, by position.
        self._before: dict[int, GradientSum | None] = {}
        self._elsewhere: list[bool] = []
        self._plans: dict[int, FingerprintPlan] = {}
        self._rounds = Rounds()
        self._small: set[int] = set()
        self._copies: dict[int, torch.Tensor] = {}
        self._available = True
        self._seconds = 0.0
        self._tokens = Tokens(TOKENS, context.step)
        self._bad = False  # whether the gradients of the last pass are known not to be finite
        self._scaler = False  # whether there is a loss scaler that skips steps
        self._given_up: list[_GivenUp] = []
        context.gradients_not_finite.append(context.guarded(self.name, self._not_finite))

    def prepare(self, facts: StepFacts) -> None:
        """Puts the hooks in place."""
        if not self.context.full:
            return
        with facts.charged("full"):
            group = self.context.parameters
            if group is not self._group:
                self._make_hooks(group)
            if not self._available:
                return
            self._seconds = 0.0
            self._rounds.close()
            self._sums = [None] * len(group.tensors)
            self._before = {}
            self._plain = are_held_whole(group.tensors)
            self._hooks.put_on()

    def other_step(self, facts: StepFacts, rows: frozenset[int]) -> None:
        """Keeps what was seen of them apart from what comes after."""
        if not self._hooks or self._group is not self.context.parameters:
            return
        with facts.charged("full"):
            self._rounds.close()
            for row in rows:
                self._before[row], self._sums[row] = self._sums[row], None
                self._copies.pop(row, None)  # its memory is that of the sum

    def after_step(self, facts: StepFacts) -> None:
        """Takes the hooks off and says what they have seen."""
        if not self._hooks:
            return
        facts.charge("full", self._seconds)
        self._bad = False
        with facts.charged("full"):
            self.close()
            self._report()
            sums, self._sums = self._sums, []
            before, self._before = self._before, {}
            odd = self.context.not_applied
            for row, found in before.items():
                if row in odd or sums[row] is None:
                    sums[row] = found
            # Some of the hooks were on parameters that are no longer trained.
            same = self._group is self.context.parameters
            if same and any(found is not None for found in sums):
                self._say(facts, sums, odd, odd.difference(before))

    def close(self) -> None:
        """Takes the hooks off."""
        self._hooks.take_off()

    def _make_hooks(self, group: TensorGroup) -> None:
        self._group = group
        self._rows = GradientRows(group)
        self._plans = {}
        self._copies = {}
        there = [held(p) for p in group.tensors]
        self._small = set(small_enough(there))
        large = {row: t for row, t in enumerate(there) if row not in self._small}
        self._rounds = Rounds(group.names, large)
        # Where a framework adds gradients up in memory of its own, `grad` holds nothing.
        self._elsewhere = [hasattr(p, "main_grad") for p in group.tensors]
        guarded = self.context.guarded
        self._hooks = TensorHooks(
            (p, guarded(self.name, _Hook(self, row))) for row, p in enumerate(group.tensors)
        )
        was, self._available = self._available, not is_sharded(self.context.model)
        if was and not self._available:
            self.context.note(
                "local gradients are not available: the model is sharded (FSDP), and what a rank "
                "computes before the reduction is seen by no hook on its parameters"
            )

    def seen(self, row: int, gradient: torch.Tensor) -> None:
        """One micro-batch's gradient of one parameter."""
        # Only of passes whose gradients are differentiated themselves.
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._add(row, gradient)
        else:
            self._add(row, gradient)

    def _add(self, row: int, gradient: torch.Tensor) -> None:
        is_small = row in self._small
        clock = time.perf_counter if is_small else processor_time
        began = clock()
        group = self._group
        assert group is not None
        parameter = group.tensors[row]
        found = self._sums[row]
        # Where nothing has been accumulated, what was seen before belongs to a pass that was given
        # up: skipped by a loss scaler, or an earlier evaluation of a closure.
        if found is not None and parameter.grad is None and not self._elsewhere[row]:
            self._give_up(whole=False)
            found = None
        if found is None:
            found = self._sums[row] = GradientSum()
        of = parameter if self._plain else held(parameter)
        is_dense = type(gradient) is torch.Tensor and gradient.layout is torch.strided
        values = gradient if is_dense else written_out(gradient)
        if values is None or values.shape != of.shape or not (is_dense or _placed(gradient)):
            found.known = False
        elif is_small:
            found.add_small(values, self._copy(row, values))
        elif self._rounds.take(row, values):
            found.add_round(self._rounds.add(row, values), row)
        else:
            plan = self._plans.get(row)
            if plan is None or not plan.fits([values]):
                plan = self._plans[row] = FingerprintPlan((group.names[row],), (values,))
            found.add_large(values, plan)
        spent = clock() - began
        self._seconds += min(spent, LONGEST_PIECE) if is_small else spent

    def _copy(self, row: int, values: torch.Tensor) -> torch.Tensor:
        """Memory for a copy; kept, since to ask for it anew costs four times the copying."""
        dtype = torch.float32 if values.dtype in _HALF else values.dtype
        copy = self._copies.get(row)
        if copy is None or copy.dtype != dtype or copy.device != values.device:
            copy = self._copies[row] = torch.empty(values.shape, dtype=dtype, device=values.device)
        return copy

    def _not_finite(self, certain: bool) -> None:
        """Gradients are not finite; `certain`: no optimizer will step with them (a loss scaler)."""
        self._bad = True
        self._scaler = self._scaler or certain
        context, step = self.context, self.context.step
        if self._hooks and certain:
            self._give_up(whole=True)
        self._report()
        if self._tokens.has(step):
            self._tokens.take()
            context.schedule.ask_dense(step + SAMPLES)
            # Where nothing was due until much later.
            context.count.until = min(context.count.until, step + 1)
        if not self._hooks:
            # At once: it may be that no step ends any more.
            group = context.parameters
            if group is not self._group:
                self._make_hooks(group)
            if self._available:
                self._sums = [None] * len(group.tensors)
                self._plain = are_held_whole(group.tensors)
                self._hooks.put_on()

    @torch.no_grad()
    def _give_up(self, *, whole: bool) -> None:
        """No optimizer has stepped with what was seen so far.

        Args:
            whole: of all tensors; else of those whose gradient was set to None since.
        """
        group = self._group
        assert group is not None
        rows = [
            row
            for row, found in enumerate(self._sums)
            if found is not None and (whole or group.tensors[row].grad is None)
        ]
        sums = {row: s for row in rows if (s := self._sums[row]) is not None}
        for row in rows:
            self._sums[row] = None
        small = {row: s.values for row, s in sums.items() if s.values is not None}
        # Copies are written over by the next pass: now, by the largest element, which is finite
        # where all of them are.
        largest = torch._foreach_norm(list(small.values()), torch.inf) if small else ()
        arrival = Arrival(gathered(list(largest))) if small else None
        large = [(row, s) for row, s in sums.items() if s.large]
        if large:
            self._rounds.close()
        bad, self._bad = self._bad, False
        self._given_up.append(_GivenUp(self.context.step, group, list(small), arrival, large, bad))
        del self._given_up[:-_MOST_GIVEN_UP]
        self._report()

    def _report(self) -> None:
        """Tells of passes that were given up, as soon as it is known what they gave."""
        waiting, self._given_up = self._given_up, []
        for one in waiting:
            if not one.ready():
                self._given_up.append(one)
            elif ((names := one.names()) or one.bad) and self.context.may_tell_skip():
                text = f"no optimizer has stepped; not finite on this rank: {', '.join(names[:5])}"
                text = text if names else "no optimizer has stepped; this rank's own are finite"
                data = {"tensors": names[:_MOST_NAMES], "count": len(names), "whole": True}
                data |= {"scaler": True} if self._scaler else {}
                self.context.event(one.step, SKIPPED, text, data)

    @torch.no_grad()
    def _say(
        self,
        facts: StepFacts,
        sums: list[GradientSum | None],
        odd: frozenset[int],
        unknown: frozenset[int],
    ) -> None:
        group, rows = self._group, self._rows
        assert group is not None
        assert rows is not None
        self._rounds.close()
        # What this step does not apply has no part in its norm.
        there = [s for row, s in enumerate(sums) if s is not None and row not in odd]
        small = [None if s is None else s.values for s in sums]
        squared = lie_here(small)
        pending = rows.begin(small, digests=False, squares=squared)
        taken = _Taken(pending, sums, unknown)
        facts.shared["local_gradient"] = taken

        def deliver() -> None:
            facts.fingerprints.append(
                group.fingerprints(facts.step, "local_gradient", taken.result())
            )

        facts.when_ready(taken, deliver)
        if not all(s.known for s in there):
            return
        squares = pending.squares
        if squares is None:
            exact = tensor_norms(
                [v for row, v in enumerate(small) if v is not None and row not in odd]
            )
        else:
            squares = np.delete(squares, sorted(odd)) if odd else squares
            exact = list(norms_of(squares))
        exact += [s.norm for s in there if s.norm is not None]
        rough = [s for s in there if s.values is None and s.norm is None]
        if not rough:
            facts.scalars["grad_norm_local"] = torch.linalg.vector_norm(gathered(exact))
            return
        arrival = Arrival(gathered(exact)) if exact else None

        def combine() -> None:
            total = 0.0 if arrival is None else float((arrival.result() ** 2).sum())
            total += sum(s.squares() for s in rough)
            facts.scalars["grad_norm_local"] = length_of(np.array([total]))

        facts.when_ready(Together(taken, arrival), combine)


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """What was seen of a pass with which no optimizer has stepped.

    Attributes:
        rows, largest: of small gradients, and the absolute value of their largest elements.
        large: rows and sketches of the others.
        bad: whether the gradients are known not to be finite after the reduction.
    """

    step: int
    group: TensorGroup
    rows: list[int]
    largest: Arrival | None
    large: list[tuple[int, GradientSum]]
    bad: bool

    def ready(self) -> bool:
        """Whether `names` does not wait."""
        there = self.largest is None or self.largest.ready()
        return there and all(found.ready() for _, found in self.large)

    def names(self) -> list[str]:
        """Tensors that are not finite, in the order in which a backward pass comes to them."""
        rows = [row for row, found in self.large if not np.isfinite(found.sketch()).all()]
        if self.largest is not None:
            finite = np.isfinite(self.largest.result())
            rows += [row for row, good in zip(self.rows, finite, strict=True) if not good]
        return [self.group.names[row] for row in sorted(rows, reverse=True)]


class _Hook:
    """Tensor hook of one parameter."""

    __slots__ = ("_owner", "_row")

    def __init__(self, owner: LocalGradients, row: int) -> None:
        self._owner = owner
        self._row = row

    def __call__(self, gradient: torch.Tensor) -> None:
        self._owner.seen(self._row, gradient)


class _Taken:
    """Fingerprints of a local gradient under way."""

    def __init__(
        self, small: Fingerprints, sums: list[GradientSum | None], left: frozenset[int]
    ) -> None:
        self._small = small
        self._large = [(row, s) for row, s in enumerate(sums) if s is not None and s.large]
        unknown = [row for row, s in enumerate(sums) if s is not None and not s.known]
        self._unknown = sorted(left.union(unknown))

    def ready(self) -> bool:
        """Whether `result` does not wait."""
        return self._small.ready() and all(s.ready() for _, s in self._large)

    def result(self) -> FingerprintValues:
        """The fingerprints; waits for the device where they have not arrived."""
        sketches = self._small.result().sketches
        assert sketches is not None
        for row, found in self._large:
            sketches[row] = found.sketch()
        sketches[self._unknown] = np.nan
        return FingerprintValues(np.zeros(len(sketches), dtype=np.uint64), sketches)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether no hook on a parameter sees the gradient that this rank alone has computed."""
    return any(
        not _SHARDING.isdisjoint([c.__name__ for c in type(m).__mro__]) for m in model.modules()
    )


def _placed(gradient: torch.Tensor) -> bool:
    """Whether a gradient is whole: a distributed one may be a part of a sum still to be made."""
    placements = getattr(gradient, "placements", ())
    return not any(placement.is_partial() for placement in placements)
