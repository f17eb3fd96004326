"""Where losses can be seen without being asked for: loss modules, and the root of `backward`.

PyTorch has hooks for one module and for all modules, none for a class of modules, and none for the
tensor that `backward` is called on. A hook on all modules costs every module call of the user's
model 5 microseconds; so the two call paths are wrapped instead, `_Loss.__call__` and
`Tensor.backward`, once a process, while a monitor listens, and given back after the last one. They
are torch's own classes, never objects of the user.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
from torch.nn.modules.loss import _Loss


class LossListener(Protocol):
    """Is told of each loss computed in the process; must not raise."""

    def loss_computed(
        self, module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor
    ) -> None:
        """A loss module has been called."""

    def backward_called(self, root: torch.Tensor) -> None:
        """`backward` is about to run from a tensor of one element."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_original_backward = torch.Tensor.backward


def listen(listener: LossListener) -> None:
    """Tells `listener` of every loss from now on; it is held weakly."""
    _listeners.add(listener)
    if _Loss.__dict__.get("__call__") is not _loss_call:
        _Loss.__call__ = _loss_call  # type: ignore[method-assign]
    if torch.Tensor.backward is not _backward:
        torch.Tensor.backward = _backward  # type: ignore[method-assign]


def unlisten(listener: LossListener) -> None:
    """Stops telling `listener`; with the last one gone, torch is as it was."""
    _listeners.discard(listener)
    if not _listeners:
        if _Loss.__dict__.get("__call__") is _loss_call:
            del _Loss.__call__
        if torch.Tensor.backward is _backward:
            torch.Tensor.backward = _original_backward  # type: ignore[method-assign]


def _loss_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    output = torch.nn.Module.__call__(self, *args, **kwargs)
    # Inside a compiled region there is no tensor to look at, and looking would break the graph.
    if not torch.compiler.is_compiling() and isinstance(output, torch.Tensor):
        if kwargs:
            args = (*args, *(kwargs[k] for k in ("input", "target") if k in kwargs))
        for listener in tuple(_listeners):
            listener.loss_computed(self, args, output)
    return output


@functools.wraps(_original_backward)
def _backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    if self.numel() == 1:
        for listener in tuple(_listeners):
            listener.backward_called(self)
    _original_backward(self, *args, **kwargs)  # type: ignore[no-untyped-call]
