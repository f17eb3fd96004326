"""The state of an optimizer that something else than its steps has changed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.optimizer.state import state_of
from rankscope.agent.tripwires import SAMPLES

EVENT = "optimizer.state"
# Steps in a row before which the state was what the step before had left: where it is made anew at
# every step, or moved to and fro, that is how the trainer works.
_STEADY = 8
_MOST_TOLD = 8
# Changes without such steps between them, after the first report, that make a habit of it.
_AGAIN = 8
_COUNTER, _WRITTEN = "step", "written in place"


@dataclass(slots=True)
class _Seen:
    """The state of one parameter after a step.

    Attributes:
        count: steps that it says it has taken; None where it does not, or on a device.
        held: tensors and how often each had been written.
    """

    step: int
    count: float | None
    held: dict[str, tuple[torch.Tensor, int]]


class StateChanges(Probe):
    """The event `optimizer.state`: the state is not what the last step left.

    It is gone (cleared, or another optimizer steps in place of the one before), its step counter
    has gone back (an older state was loaded), or it was written in place. The state of one
    parameter stands for all. Reported where it was as it should be before the 8 steps seen last,
    eight times at most; the next 16 steps are sampled then. One of these reports says, with their
    number as `again`, that after the one before it was reset or set back at eight steps without
    being so between them. Or, with `renewed` as the first of them, that another optimizer without a
    state has stepped at each of eight steps, each in place of the one before.

    Costs 10 to 20 microseconds a step (tier `basic`), where the step before or after is sampled.
    """

    name = "state_changes"
    in_pairs = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._of: torch.Tensor | None = None
        self._seen: _Seen | None = None
        self._steady = 0
        self._told = 0
        self._again = 0  # changes since the last report, without steady steps between them
        self._owner: Callable[[], Any] = lambda: None  # the optimizer that stepped last
        self._renewed: list[int] = []  # steps in a row of optimizers that had never stepped

    def before_step(self, facts: StepFacts) -> None:
        """Whether the state is what the step seen last has left, or later steps."""
        seen, of = self._seen, self._of
        if seen is None or of is None or not _holds(self.context.optimizer, of):
            return
        own = state_of(self.context.optimizer).get(of)
        how, count = _change(seen, own, same=seen.step == facts.step - 1)
        if own or self._owner() is self.context.optimizer:
            self._renewed.clear()
        elif len(self._renewed) < _AGAIN:
            self._renewed.append(facts.step)
            if len(self._renewed) == _AGAIN:
                self._report_renewed(facts.step)
        if not how:
            self._steady += 1
            return
        steady, self._steady = self._steady, 0
        # What is written in place may be averaged over the ranks: moments stay means.
        grows_old = steady >= _STEADY or how == _WRITTEN
        self._again = 0 if grows_old else self._again + 1
        is_habit = self._again == _AGAIN and self._told > 0
        if (steady < _STEADY and not is_habit) or self._told >= _MOST_TOLD:
            return
        self._told += 1
        data: dict[str, Any] = {"how": how, "seen": seen.step}
        if is_habit:
            data["again"] = self._again
        counted = ""
        if seen.count is not None and count is not None:
            data |= {"before": seen.count, "after": count}
            counted = f": its step counter went from {seen.count:g} to {count:g}"
        text = f"the optimizer's state was {how} since step {seen.step}{counted}"
        self.context.event(facts.step, EVENT, text, data)
        self.context.schedule.ask_dense(facts.step + SAMPLES)

    def _report_renewed(self, step: int) -> None:
        since = self._renewed[0]
        data = {"how": "reset", "seen": since - 1, "again": _AGAIN, "renewed": since}
        text = f"another optimizer without a state has stepped at each step since step {since}"
        self.context.event(step, EVENT, text, data)

    def after_step(self, facts: StepFacts) -> None:
        """What the step left."""
        self._seen = None
        with contextlib.suppress(TypeError):  # one that nothing can refer to weakly
            self._owner = weakref.ref(self.context.optimizer)
        state = state_of(self.context.optimizer)
        of = self._of
        if of is None or of not in state:
            of = self._of = next((p for p in state if isinstance(p, torch.Tensor)), None)
        own = None if of is None else state.get(of)
        if own:
            held = {
                str(key): (value, value._version)
                for key, value in own.items()
                if type(value) is torch.Tensor and key != _COUNTER
            }
            self._seen = _Seen(facts.step, _count_of(own), held)


def _change(seen: _Seen, own: Any, *, same: bool) -> tuple[str, float | None]:
    """What has happened to a state, empty for nothing, and the steps it says it has taken now."""
    if not own:
        return "reset", None if seen.count is None else 0.0
    count = _count_of(own)
    if count is not None and seen.count is not None and count < seen.count:
        return ("set back" if count else "reset"), count
    if same:
        for key, (tensor, version) in seen.held.items():
            if own.get(key) is tensor and tensor._version != version:
                return _WRITTEN, count
    return "", count


def _count_of(own: Any) -> float | None:
    count = own.get(_COUNTER)
    if isinstance(count, torch.Tensor):
        # On a device it would have to be waited for.
        return float(count) if count.is_cpu and count.numel() == 1 else None
    return float(count) if isinstance(count, int) else None


def _holds(optimizer: Any, parameter: torch.Tensor) -> bool:
    """Whether an optimizer still moves a parameter: what it holds no longer needs no state."""
    groups = getattr(optimizer, "param_groups", ())
    return any(parameter is p for group in groups for p in group["params"])
