"""Where losses can be seen without being asked for: loss modules and functions, and `backward`.

PyTorch has hooks for one module and for all modules, none for a class of modules, none for a
function, and none for the tensor that `backward` is called on. A hook on all modules costs every
module call of the user's model 5 microseconds; so these call paths are wrapped instead, once a
process, while a monitor listens, and given back after the last one. They are torch's own, never
objects of the user. (The autograd graph knows scores and targets, too, but asking it unpacks saved
tensors, and under activation checkpointing that runs the user's forward pass again.)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.nn.modules.loss import _Loss

from rankscope.agent.probes.classification import Hits, hits_of_function, hits_of_module


class LossListener(Protocol):
    """Is told of each loss computed in the process; must not raise."""

    def loss_computed(
        self, judge: Callable[[], Hits | None], args: tuple[Any, ...], output: torch.Tensor
    ) -> None:
        """A loss has been computed from `args`; `judge` counts its hits, at a cost."""

    def backward_called(self, root: torch.Tensor) -> None:
        """`backward` is about to run from a tensor of one element."""


_FUNCTIONS = ("cross_entropy", "nll_loss")

_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
# What was there when the first listener came: torch's own, or another library's wrapper of it.
_originals: dict[str, Any] = {}
# A loss module calls the function of its name: told once, by the module.
_inside_module = False


def listen(listener: LossListener) -> None:
    """Tells `listener` of every loss from now on; it is held weakly."""
    _listeners.add(listener)
    if _originals:
        return
    _originals["backward"] = torch.Tensor.backward
    torch.Tensor.backward = _wrapped_backward(torch.Tensor.backward)  # type: ignore[method-assign]
    _Loss.__call__ = _loss_call  # type: ignore[method-assign]
    for name in _FUNCTIONS:
        _originals[name] = getattr(functional, name)
        setattr(functional, name, _wrapped_function(_originals[name]))


def unlisten(listener: LossListener) -> None:
    """Stops telling `listener`; with the last one gone, torch is as it was.

    What another library has wrapped around ours meanwhile stays, and then does nothing of ours.
    """
    _listeners.discard(listener)
    if _listeners or not _originals:
        return
    if getattr(torch.Tensor.backward, "_rankscope", False):
        torch.Tensor.backward = _originals["backward"]  # type: ignore[method-assign]
    if _Loss.__dict__.get("__call__") is _loss_call:
        del _Loss.__call__
    for name in _FUNCTIONS:
        if getattr(getattr(functional, name), "_rankscope", False):
            setattr(functional, name, _originals[name])
    _originals.clear()


def _loss_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    global _inside_module
    # Inside a compiled region there is no tensor to look at, and looking would break the graph.
    if torch.compiler.is_compiling():
        return torch.nn.Module.__call__(self, *args, **kwargs)
    before, _inside_module = _inside_module, True
    try:
        output = torch.nn.Module.__call__(self, *args, **kwargs)
    finally:
        _inside_module = before
    if isinstance(output, torch.Tensor):
        given = _given(args, kwargs)
        _tell(lambda: hits_of_module(self, given), given, output)
    return output


def _wrapped_function(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if _listeners and not torch.compiler.is_compiling() and not _inside_module:
            given = _given(args, kwargs)
            # The fifth positional argument of both functions.
            ignore = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
            if isinstance(output, torch.Tensor):
                _tell(lambda: hits_of_function(given, ignore), given, output)
        return output

    wrapped._rankscope = True  # type: ignore[attr-defined]
    return wrapped


def _wrapped_backward(original: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self.numel() == 1:
            for listener in tuple(_listeners):
                listener.backward_called(self)
        original(self, *args, **kwargs)

    backward._rankscope = True  # type: ignore[attr-defined]
    return backward


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (*args, *(kwargs[k] for k in ("input", "target") if k in kwargs))


def _tell(judge: Callable[[], Hits | None], args: tuple[Any, ...], output: torch.Tensor) -> None:
    for listener in tuple(_listeners):
        listener.loss_computed(judge, args, output)
