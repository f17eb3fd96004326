"""Steps: those really executed, their backward passes, the loss scale and what it has skipped.

`GradScaler.step` decides whether the optimizer steps, and a skipped step calls no hook. So that
method is wrapped, once a process, while a monitor listens, and given back after the last one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.amp import GradScaler

from rankscope.agent.guard import process_wide
from rankscope.agent.model.tensors import number
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.steps.listeners import Listeners, Replacement

# Skipped steps in a row from which on it is reported at once, and again at each doubling: 16
# halvings take a GradScaler's initial scale of 65,536 down to 1, so none is searched for any more.
_IN_A_ROW = 16
_EVENT = "amp.skipping"


class Amp(Probe):
    """`amp_scale`, `steps_skipped`, `optimizer_steps`, `micro_steps`.

    Costs a microsecond a call of `GradScaler.step`, and on a device one small addition where the
    optimizer is a fused one. They are posted where the tier `signals` is due.

    `amp_scale` is the scale of this step, `steps_skipped` the number of steps since attach that a
    GradScaler has skipped, `optimizer_steps` that of the steps which changed the parameters, those
    before attach included, `micro_steps` the number of backward passes of this step.

    A fused optimizer decides on the device: its hooks are called for a skipped step, too, and that
    step has a number of its own here; any other skipped step has none (the next one that is not
    skipped takes it). While no step has a number nothing is posted: so 16 skipped ones in a row are
    an event, `amp.skipping`. Without a scaler of torch's own the first two are not posted.
    """

    name = "amp"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._own: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._scale: torch.Tensor | None = None
        # Skipped steps that have no number, that have one, and that have one and are counted on
        # the device.
        self._unnumbered = 0
        self._numbered = 0
        self._on_device: torch.Tensor | None = None
        self._stepping: Any = None  # the optimizer, while the scaler is at it
        self._begun = -1
        # How many were skipped in a row, and before which step.
        self._row, self._row_at = 0, -1
        self.scaler_begins = context.guarded(self.name, self._scaler_begins)
        self.scaler_ended = context.guarded(self.name, self._scaler_ended)

    def start(self, facts: StepFacts) -> None:
        """From now on every `GradScaler.step` of the process is seen."""
        listen(self)

    def after_step(self, facts: StepFacts) -> None:
        """Posts the numbers."""
        if not self.context.signals:
            return
        scalars, scale = facts.scalars, self._scale
        numbered: float | torch.Tensor = self._numbered
        if scale is not None:
            # On a device it is copied before `update` changes it in place: both wait in line.
            scalars["amp_scale"] = number(scale)
            # A fused optimizer has this step's answer; it is counted once the scaler is done.
            now = getattr(self._stepping, "found_inf", None)
            for found in (self._on_device, now):
                if found is not None:
                    numbered = numbered + number(found)
            scalars["steps_skipped"] = numbered + self._unnumbered
        scalars["optimizer_steps"] = facts.step + 1 - numbered
        if "micro_steps" in facts.shared:
            scalars["micro_steps"] = facts.shared["micro_steps"]

    def close(self) -> None:
        """Listens no longer."""
        unlisten(self)

    def _scaler_begins(self, scaler: GradScaler, optimizer: Any) -> None:
        self._stepping = None
        if scaler.is_enabled() and self._is_own(optimizer):
            self._stepping = optimizer
            self._begun = self.context.step
            self._scale = scaler._scale

    def _scaler_ended(self, scaler: GradScaler, optimizer: Any) -> None:
        if self._stepping is None:
            return
        self._stepping = None
        if self.context.step == self._begun:
            self._unnumbered += 1
            self._tell_others()
            self._skipped_again(self._begun)
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            states: Any = scaler._per_optimizer_states
            found = list(states[id(optimizer)]["found_inf_per_device"].values())
            if all(f.is_cpu for f in found):
                skipped = any(bool(number(f)) for f in found)
                self._numbered += skipped
                if skipped:
                    self._tell_others()
            elif found:
                # Without waiting: the sum stays where it is. It is a new tensor each time, since
                # the one before may be on its way to the host.
                before = self._on_device
                self._on_device = found[0].clone() if before is None else before + found[0]

    def _tell_others(self) -> None:
        for listener in self.context.gradients_not_finite:
            listener(True)

    def _skipped_again(self, step: int) -> None:
        self._row = self._row + 1 if step == self._row_at else 1
        self._row_at = step
        if self._row >= _IN_A_ROW and self._row.bit_count() == 1:
            text = (
                f"GradScaler has skipped {self._row} steps in a row: the optimizer does not step "
                "any more."
            )
            self.context.event(step, _EVENT, text, {"skipped": self._row})

    def _is_own(self, optimizer: Any) -> bool:
        known = self._own.get(optimizer)
        if known is None:
            mine = {id(p) for group in self.context.optimizer.param_groups for p in group["params"]}
            known = self._own[optimizer] = optimizer is self.context.optimizer or any(
                id(p) in mine for group in optimizer.param_groups for p in group["params"]
            )
        return known


class ScalerListener(Protocol):
    """Is notified of each `GradScaler.step` of the process; must not raise."""

    def scaler_begins(self, scaler: GradScaler, optimizer: Any) -> None:
        """The scaler is about to step with the optimizer, or to skip that."""

    def scaler_ended(self, scaler: GradScaler, optimizer: Any) -> None:
        """It has done so; `update` is still to come."""


def listen(listener: ScalerListener) -> None:
    """Notifies `listener` of every scaled step from now on; it is held weakly."""
    _listeners.add(listener)


def unlisten(listener: ScalerListener) -> None:
    """Stops notifying `listener`; with the last one gone, torch is as it was."""
    _listeners.remove(listener)


def _replacements() -> tuple[Replacement, ...]:
    return (Replacement(GradScaler, "step", _wrapped),)


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        listeners = _listening() or ()
        for listener in listeners:
            listener.scaler_begins(self, optimizer)
        result = original(self, optimizer, *args, **kwargs)
        for listener in listeners:
            listener.scaler_ended(self, optimizer)
        return result

    return step


@process_wide(Amp.name)
def _listening() -> tuple[ScalerListener, ...]:
    return tuple(_listeners)


_listeners: Listeners[ScalerListener] = Listeners(_replacements)
