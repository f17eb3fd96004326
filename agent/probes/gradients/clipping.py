"""Gradient clipping: the norm before it, and the factor that it applied.

The norm is what `clip_grad_norm_` has computed anyway. The functions that do the work are looked up
in torch's module at each call, so wrapping them there is seen, too, by whoever has imported
`clip_grad_norm_` before. They are wrapped once a process while a monitor listens, and given back.
`clip_grad_value_` computes no norm: the gradients are read before it and after it where that is
due, and whoever has imported it by its name before the monitor was attached is not seen.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.utils.clip_grad

from rankscope.agent.guard import process_wide
from rankscope.agent.model.tensors import number
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.norms import gathered, stored, tensor_norms
from rankscope.agent.steps.listeners import Listeners, Replacement

# What torch adds to the norm before it divides by it.
_EPSILON = 1e-6


# One call: its step, the norm that was allowed (where values were clipped, the one that came out of
# it), the norm that was found, and of which kind it is.
_Clip = tuple[int, float | torch.Tensor, torch.Tensor, float]


class Clipping(Probe):
    """`grad_norm_preclip` and `clip_coefficient`, where torch's clipping is called.

    Costs two microseconds a call; where values are clipped, two norms at steps where the tier
    `signals` is due. The factor is how much shorter the gradient became. It is computed by hand on
    a CPU; on a device that takes three small kernels, at those steps, too.

    `grad_norm_preclip` is the L2 norm; where clipping goes by another norm there is none. Where the
    parameters are clipped in several parts it is that of all of them, and the factor the smallest.
    A norm of which each rank holds a part (FSDP) is not read: that would be a collective.
    """

    name = "clipping"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._calls: dict[int, _Clip] = {}
        self._group: Any = None
        self._own: frozenset[int] = frozenset()
        self.clipped = context.guarded(self.name, self._clipped)
        self.norm_of = context.guarded(self.name, self._norm_of)

    def start(self, facts: StepFacts) -> None:
        """From now on every clipping of the process is seen."""
        listen(self)

    def after_step(self, facts: StepFacts) -> None:
        """Reports what was clipped for this step."""
        found = self._calls
        if not found:
            return
        step, scalars = facts.step, facts.scalars
        calls = [c for c in found.values() if c[0] == step]
        found.clear()
        if len(calls) == 1 and calls[0][2].is_cpu:
            # The ordinary case.
            _, most, norm, kind = calls[0]
            value = float(number(norm))
            if kind == 2.0:
                scalars["grad_norm_preclip"] = value
            factor = float(most) / (value + _EPSILON)
            scalars["clip_coefficient"] = 1.0 if factor > 1.0 else factor
        elif calls:
            self._combined(scalars, calls)

    def _combined(self, scalars: dict[str, float | torch.Tensor], calls: list[_Clip]) -> None:
        known = all(c[3] == 2.0 for c in calls)
        norms = [c[2] for c in calls]
        if all(n.is_cpu for n in norms):
            values = [float(number(n)) for n in norms]
            if known:
                scalars["grad_norm_preclip"] = math.hypot(*values)
            factors = [float(c[1]) / (n + _EPSILON) for c, n in zip(calls, values, strict=True)]
            # Not `min` alone: what is not a number must stay.
            unknown = any(f != f for f in factors)
            scalars["clip_coefficient"] = math.nan if unknown else min(*factors, 1.0)
            return
        signals = self.context.signals
        with torch.no_grad():
            if known and len(norms) == 1:
                scalars["grad_norm_preclip"] = norms[0]
            elif known and signals:
                scalars["grad_norm_preclip"] = torch.linalg.vector_norm(torch.stack(norms))
            if signals:
                distant = [c[1] / (c[2] + _EPSILON) for c in calls]
                smallest = distant[0] if len(distant) == 1 else torch.stack(distant).amin()
                scalars["clip_coefficient"] = smallest.clamp(max=1.0)

    def close(self) -> None:
        """Listens no longer."""
        unlisten(self)

    def _clipped(
        self, parameters: Sequence[torch.Tensor], most: Any, norm: Any, kind: float
    ) -> None:
        if not isinstance(norm, torch.Tensor) or not self._are_own(parameters):
            return
        first = id(parameters[0])
        whole = norm if type(norm) is torch.Tensor else _held(norm)
        if whole is not None and whole.is_cpu and not math.isfinite(number(whole)):
            # Whoever clips often asks whether the norm is finite, and does not step if not.
            for listener in self.context.gradients_not_finite:
                listener(False)
        if whole is not None and self.context.basic:
            # Called again for the same parameters (after a skipped step, say), it counts anew.
            allowed = most.detach() if isinstance(most, torch.Tensor) else float(most)
            self._calls[first] = (self.context.step, allowed, whole.detach(), kind)

    def _are_own(self, parameters: Sequence[torch.Tensor]) -> bool:
        if not parameters:
            return False
        if self.context.parameters is not self._group:
            self._group = self.context.parameters
            self._own = frozenset(id(p) for p in self._group.tensors)
        return id(parameters[0]) in self._own or id(parameters[-1]) in self._own

    def _norm_of(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        if not self.context.signals or not self._are_own(parameters):
            return None
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients or any(type(g) is not torch.Tensor for g in gradients):
            return None  # of gradients that this rank holds a part of, the norm were one, too
        dense = [g for g in map(stored, gradients) if g is not None]
        with torch.no_grad():
            norm: torch.Tensor = torch.linalg.vector_norm(gathered(tensor_norms(dense)))
        return norm


def _held(norm: torch.Tensor) -> torch.Tensor | None:
    """A norm as this rank has it; None where it has but a part."""
    placements = getattr(norm, "placements", None)
    if placements is None:
        return norm
    if not all(p.is_replicate() for p in placements):
        return None
    local: torch.Tensor = getattr(norm, "_local_tensor", norm)
    return local


class ClipListener(Protocol):
    """Is notified of each clipping in the process; must not raise."""

    def clipped(
        self, parameters: Sequence[torch.Tensor], most: Any, norm: Any, kind: float
    ) -> None:
        """The gradients of `parameters`, whose norm was `norm`, have been clipped to `most`."""

    def norm_of(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Norm of the gradients now, where it wants that of clipping by value; else None."""


# The last norm that torch computed and of which kind it was: who clips by it does not say so.
_last: tuple[weakref.ref[torch.Tensor], float] | None = None


def listen(listener: ClipListener) -> None:
    """Notifies `listener` of every clipping from now on; it is held weakly."""
    _listeners.add(listener)


def unlisten(listener: ClipListener) -> None:
    """Stops notifying `listener`; with the last one gone, torch is as it was."""
    _listeners.remove(listener)


def _replacements() -> tuple[Replacement, ...]:
    home = sys.modules["torch.nn.utils.clip_grad"]
    by_value = (
        Replacement(home, "clip_grad_value_", _notifying_of_values),
        Replacement(torch.nn.utils, "clip_grad_value_", _notifying_of_values),
    )
    if hasattr(home, "_clip_grads_with_norm_"):
        return (
            Replacement(home, "_get_total_norm", _noting_kind),
            Replacement(home, "_clip_grads_with_norm_", _notifying),
            # The name under which people call it by themselves.
            Replacement(torch.nn.utils, "clip_grads_with_norm_", _notifying),
            Replacement(torch.nn.utils, "get_total_norm", _noting_kind),
            *by_value,
        )
    # Before torch 2.6 one function did it all; imported before, it is not seen.
    return (
        Replacement(home, "clip_grad_norm_", _notifying_all),
        Replacement(torch.nn.utils, "clip_grad_norm_", _notifying_all),
        *by_value,
    )


def _noting_kind(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def total_norm(tensors: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any) -> Any:
        norm = original(tensors, norm_type, *args, **kwargs)
        if not torch.compiler.is_compiling():
            _note(norm, norm_type)
        return norm

    return total_norm


def _notifying(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, max_norm, total_norm, *args, **kwargs)
        parameters = _listed(parameters)
        result = original(parameters, max_norm, total_norm, *args, **kwargs)
        _notify(parameters, max_norm, total_norm)
        return result

    return clip


def _notifying_all(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kw: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, max_norm, norm_type, *args, **kw)
        parameters = _listed(parameters)
        norm = original(parameters, max_norm, norm_type, *args, **kw)
        _note(norm, norm_type)
        _notify(parameters, max_norm, norm)
        return norm

    return clip


def _notifying_of_values(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, clip_value: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, clip_value, *args, **kwargs)
        parameters = _listed(parameters)
        before = _norms(parameters)
        result = original(parameters, clip_value, *args, **kwargs)
        _notify_of_values(parameters, before or [])
        return result

    return clip


def _listed(parameters: Any) -> Sequence[torch.Tensor]:
    # A generator can be gone through only once.
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    return parameters if isinstance(parameters, list | tuple) else list(parameters)


@process_wide(Clipping.name)
def _note(norm: Any, kind: Any) -> None:
    global _last
    _last = weakref.ref(norm), float(kind)


@process_wide(Clipping.name)
def _notify(parameters: Sequence[torch.Tensor], most: Any, norm: Any) -> None:
    kind = _last[1] if _last is not None and _last[0]() is norm else 2.0
    for listener in _listeners:
        listener.clipped(parameters, most, norm, kind)


# A listener and the norm that it was given before values were clipped.
_Before = list[tuple[ClipListener, torch.Tensor]]


@process_wide(Clipping.name)
def _norms(parameters: Sequence[torch.Tensor]) -> _Before:
    found = [(listener, listener.norm_of(parameters)) for listener in _listeners]
    return [(listener, norm) for listener, norm in found if norm is not None]


@process_wide(Clipping.name)
def _notify_of_values(parameters: Sequence[torch.Tensor], before: _Before) -> None:
    for listener, norm in before:
        after = listener.norm_of(parameters)
        if after is not None:
            # By what `after_step` divides, so that nothing cut off is a factor of 1.
            most = torch.where(norm > 0, after * ((norm + _EPSILON) / norm), norm + _EPSILON)
            listener.clipped(parameters, float(number(most)) if most.is_cpu else most, norm, 2.0)


_listeners: Listeners[ClipListener] = Listeners(_replacements)
