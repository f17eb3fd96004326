"""Where losses can be seen without being asked for: torch's loss functions and `backward`.

PyTorch has hooks for one module and for all modules, none for a function, and none for the tensor
that `backward` is called on. A hook on all modules costs every module call of the user's model 5
microseconds. So the few functions that every loss goes through (torch's loss modules call them,
too) get other code while somebody listens, once a process, and their own back afterwards.

(The autograd graph knows scores and targets, too, but asking it unpacks saved tensors, and under
activation checkpointing that runs the user's forward pass again.)
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from math import isfinite
from types import CodeType, FunctionType, GeneratorType
from typing import Any, Protocol

import torch
from torch.amp import GradScaler
from torch.nn import functional

from rankscope.agent.guard import process_wide
from rankscope.agent.probes.base import Context
from rankscope.agent.probes.loss.classification import Hits
from rankscope.agent.probes.loss.patches import (
    ALWAYS,
    OF_LOSSES,
    OF_PASSES,
    Tap,
    can_be_tapped,
    requests,
)
from rankscope.agent.probes.loss.scaling import (
    COMPOSED,
    OF_TERMS,
    Root,
    read_root,
    weighted,
)
from rankscope.agent.steps.autograd import graph_task, sequence
from rankscope.agent.steps.dynamo import leave_alone
from rankscope.agent.steps.hook_tables import pickled_by_value

_FUNCTIONS = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)

# Functions, and named as such: their annotations say no more than that they can be called.
_backward: Any = torch.autograd.backward
_grad: Any = torch.autograd.grad
_iter: Any = torch.utils.data.DataLoader.__iter__

# Modules whose frames are not the trainer's.
_INSIDE = ("torch.", "rankscope.agent.")
# Losses that a GradScaler has scaled and whose `backward` is still to come; they may never come.
_MAX_SCALED = 16


# Frames of the trainer's that show from where `backward` is called.
_SITE_FRAMES = 6

# A backward pass: what it started from (value and divisor as in `scaling.Root`), whether no
# sentinel had a gradient before, whether the gradient of one is another now, the hits that go with
# it, the step, from where `backward` was called (0 where gradients were only to be added up, which
# says that it is one of several micro-batches), forward passes of the model in the step until then,
# and of a sum the share as in `scaling.Root`.
Pass = tuple[
    float | torch.Tensor,
    float,
    bool,
    bool,
    Hits | None,
    int,
    int,
    int,
    "float | torch.Tensor | None",
]


class LossListener(Protocol):
    """Is notified of each loss of the process; its methods must not raise.

    Attributes:
        core: the module whose mode distinguishes training from evaluation.
        mode: the same module where its mode is a plain attribute, so that to ask for it runs no
            code of the user's; else None.
        sampling: has `targets`: whether losses are wanted in training mode at this step; without
            it nothing but `backward` is observed, and without `basic` nothing at all.
        sentinels: some of the parameters that the listener's optimizer moves.
        shards: the same of a sharded model, which keeps the gradients of all but the last
            micro-batch where nobody sees them; `reduced`: they had some as the last pass ended,
            `emptied`: and none as the pass under way began.
        passes: gets every backward pass.
        taken: gets the first pass of a step in which `torch.autograd.grad` was asked for the
            gradients of a sentinel: whoever does so writes them into the parameters himself.
        owed: the step that has ended in the middle of the backward pass under way, -1 for none.
        busy: wants to be asked for the hits of a backward pass.
        named: losses are of an evaluation, whatever the mode.
        forwards: of the model, with gradients, since the last sampled step.
        trained: step in progress at the newest backward pass with the model in training mode.
        wrapper: has `require_backward_grad_sync`, false while gradients are only added up; or None.
    """

    core: torch.nn.Module
    mode: torch.nn.Module | None
    sampling: Context
    sentinels: tuple[torch.Tensor, ...]
    shards: tuple[torch.Tensor, ...]
    reduced: bool
    emptied: bool
    trained: int
    passes: deque[Pass]
    taken: Pass | None
    owed: int
    busy: bool
    forwards: int
    wrapper: Any
    named: bool

    def loss_computed(self, name: str, given: dict[str, Any], output: torch.Tensor) -> None:
        """The loss function of that name has been called with `given`."""

    def iterated(self, loader: Any) -> None:
        """An iteration over a DataLoader begins."""

    def hits_of_pass(self, node: Any) -> Hits | None:
        """`backward` has run from the node of that sequence number, or from what was made of it."""

    def terms_of_pass(self, node: Any) -> None:
        """`backward` is about to run from a sum, whose terms are known as long as it has not."""

    def root_of_pass(self, node: Any) -> None:
        """`backward` has run from a node of the graph, at a step where `signals` is due."""

    def pay(self, one: Pass) -> None:
        """The backward pass is over in whose middle the step `owed` has ended."""


# A tuple, and replaced as a whole: it is walked at every call.
_listeners: tuple[weakref.ref[Any], ...] = ()
_taps: list[Tap] = []
# Sequence number of a scaled loss in the graph -> the loss before. Numbers, not nodes: a node keeps
# its whole graph alive.
_scaled: deque[tuple[int, float | torch.Tensor]] = deque(maxlen=_MAX_SCALED)
# Whose root module ran last: of several monitors, an evaluation is the one's.
_latest: weakref.ref[Any] | None = None


def listen(listener: LossListener) -> None:
    """Notifies `listener` of every loss from now on; it is held weakly."""
    global _listeners
    unlisten(listener)
    _listeners = (*_listeners, weakref.ref(listener, _forget))
    requests_changed()
    if _taps:
        return
    for name in _FUNCTIONS:
        function = getattr(functional, name, None)
        if isinstance(function, FunctionType) and can_be_tapped(function):
            _taps.append(Tap(function, _teller(name, function.__code__), when=OF_LOSSES))
    for scaler in _scalers():
        # What is scaled may be differentiated after a step of another optimizer.
        _taps.append(Tap(scaler.__dict__["scale"], _scale_called, when=ALWAYS))
    if can_be_tapped(_iter):
        _taps.append(Tap(_iter, _iterated, when=ALWAYS))
    _taps.append(Tap(_backward, _backward_ended, _backward_begins, when=OF_PASSES))
    if can_be_tapped(_grad):
        _taps.append(Tap(_grad, _gradients_taken, _gradients_asked, when=OF_PASSES))


def unlisten(listener: LossListener) -> None:
    """Stops notifying `listener`; with the last one gone, torch is as it was."""
    _keep(lambda ref: ref() is not listener)


def requests_changed() -> None:
    """To be called when a listener's `sampling.basic` or `sampling.targets` has changed."""
    passes, unless_training = False, None
    for ref in _listeners:
        listener = ref()
        if listener is not None:
            if listener.sampling.basic or listener.busy:
                passes = True
            # Of several listeners one may evaluate while another trains.
            if len(_listeners) == 1 and not (
                listener.sampling.targets or listener.busy or listener.named
            ):
                unless_training = listener.mode
    requests.passes, requests.unless_training = passes, unless_training


def mode_of(core: torch.nn.Module) -> torch.nn.Module | None:
    """What `LossListener.mode` is for a module."""
    kind = type(core)
    own = hasattr(kind, "training") or kind.__getattribute__ is not object.__getattribute__
    return core if "training" in vars(core) and not own else None


def ran_forward(listener: LossListener) -> None:
    """The root module that belongs to `listener` is about to run, in evaluation mode."""
    global _latest
    if len(_listeners) > 1:
        _latest = weakref.ref(listener)


def _forget(gone: weakref.ref[Any]) -> None:
    _keep(lambda ref: ref is not gone)


def _keep(wanted: Callable[[weakref.ref[Any]], bool]) -> None:
    global _listeners, _latest
    _listeners = tuple(ref for ref in _listeners if wanted(ref))
    requests_changed()
    if not _listeners:
        while _taps:
            _taps.pop().remove()
        _scaled.clear()
        _latest = None


def _scalers() -> list[type]:
    """GradScaler, and what overrides its `scale` (that of FSDP does)."""
    found: list[Any] = [GradScaler]
    for kind in found:
        found += [s for s in kind.__subclasses__() if s not in found and not pickled_by_value(s)]
    methods = [(kind, kind.__dict__.get("scale")) for kind in found]
    return [k for k, m in methods if isinstance(m, FunctionType) and can_be_tapped(m)]


def _teller(name: str, code: CodeType) -> Callable[..., None]:
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @process_wide("loss")
    def after(output: Any, *values: Any) -> None:
        for ref in _listeners:
            listener = ref()
            # The ordinary case, and it is to cost nothing: `backward` will show.
            if listener is None or (
                listener.core.training and not (listener.sampling.targets or listener.named)
            ):
                continue
            if type(output) is not torch.Tensor or not _is_real(output):
                return
            if not listener.core.training and _latest is not None:
                latest = _latest()
                if latest is not None and latest is not listener:
                    continue
            listener.loss_computed(name, dict(zip(names, values, strict=True)), output)
            if listener.busy:
                requests.passes = True

    return after


def _is_real(output: torch.Tensor) -> bool:
    """Whether a tensor holds a number: not while something is traced or transformed."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._functorch.is_functorch_wrapped_tensor(output)
    )


@process_wide("loss")
def _iterated(iterator: Any, loader: Any) -> None:
    for ref in _listeners:
        listener = ref()
        if listener is not None:
            listener.iterated(loader)


@process_wide("loss")
def _scale_called(scaled: Any, scaler: Any, plain: Any) -> None:
    if (
        type(scaled) is torch.Tensor
        and scaled is not plain
        and scaled.grad_fn is not None
        and scaled.numel() == 1
        and _is_real(scaled)
    ):
        value = plain.item() if plain.is_cpu else plain.detach().clone()
        _scaled.append((sequence(scaled.grad_fn), value))


@process_wide("loss")
def _backward_begins(tensors: Any, *others: Any) -> Any:
    for ref in _listeners:
        listener = ref()
        if listener is not None and (listener.sampling.basic or listener.busy):
            break
    else:
        return None
    # A backward pass inside a backward pass (reentrant checkpointing) starts from no loss.
    if graph_task() != -1:
        return None
    root: Root | None = None
    if type(tensors) is torch.Tensor and tensors.is_cpu and tensors.numel() == 1:
        # The ordinary case, by itself: every access to a tensor counts here.
        made_by = tensors.grad_fn
        if made_by is not None and type(made_by) not in COMPOSED:
            root = (tensors.item(), 1.0, made_by, None)
    if root is None:
        root = read_root(tensors, _scaled)
    if root is None:
        return None
    if others and others[0] is not None:
        root = weighted(root, others[0])
    value = root[0]
    if type(value) is float and not isfinite(value):
        for ref in _listeners:
            listener = ref()
            if listener is not None:
                listener.sampling.loss_not_finite()
    states = None
    for ref in _listeners:
        listener = ref()
        if listener is not None:
            if listener.busy and type(root[2]) in OF_TERMS:
                listener.terms_of_pass(root[2])
            if listener.shards:
                listener.emptied = listener.reduced and not _have_gradients(listener.shards)
            for parameter in listener.sentinels:
                if parameter.grad is not None:
                    # Not the ordinary case, where `zero_grad` has left nothing.
                    states = states or {}
                    states[listener] = _state(listener.sentinels)
                    break
    return root, states


@process_wide("loss")
def _backward_ended(seen: Any) -> None:
    (value, divisor, node, share), states = seen
    site = _site()
    for ref in _listeners:
        listener = ref()
        if listener is None:
            continue
        found = listener.hits_of_pass(node) if listener.busy else None
        if listener.sampling.signals:
            listener.root_of_pass(node)
        state = None if states is None else states.get(listener)
        if state is None:
            moved = False
            for parameter in listener.sentinels:
                if parameter.grad is not None:
                    moved = True
                    break
        else:
            moved = _state(listener.sentinels) != state
        fresh = state is None
        if listener.shards:
            fresh, moved = listener.emptied, True
            listener.reduced = _have_gradients(listener.shards)
        if listener.mode is None or listener.mode.training:
            listener.trained = listener.sampling.step
        wrapper = listener.wrapper
        only_added = wrapper is not None and not wrapper.require_backward_grad_sync
        one = (
            value,
            divisor,
            fresh,
            moved,
            found,
            listener.sampling.step,
            0 if only_added else site,
            listener.forwards,
            share,
        )
        if listener.owed < 0:
            listener.passes.append(one)
        else:
            listener.pay(one)


@process_wide("loss")
def _gradients_asked(outputs: Any, inputs: Any, *others: Any) -> Any:
    if graph_task() != -1:
        return None
    ends: Any = (inputs,)
    if isinstance(inputs, list | tuple):
        ends = (*inputs[:1], *inputs[-1:])
    # `model.parameters()` can be gone through once only, and not by us.
    unknown = isinstance(inputs, GeneratorType)
    askers = []
    for ref in _listeners:
        listener = ref()
        if listener is not None and listener.sampling.basic and listener.taken is None:
            if unknown or any(one is known for one in ends for known in listener.sentinels):
                askers.append(listener)
    root = read_root(outputs, _scaled) if askers else None
    return None if root is None else (root, askers)


@process_wide("loss")
def _gradients_taken(seen: Any) -> None:
    (value, divisor, node, share), askers = seen
    for listener in askers:
        found = listener.hits_of_pass(node) if listener.busy else None
        step, forwards = listener.sampling.step, listener.forwards
        listener.taken = (value, divisor, True, True, found, step, 0, forwards, share)


# All that `process_wide` makes: what is put into torch is called below compiled functions, too.
leave_alone(_backward_begins)


def _have_gradients(parameters: tuple[torch.Tensor, ...]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


def _state(sentinels: tuple[torch.Tensor, ...]) -> list[tuple[int, int]]:
    """What shows whether gradients were written to."""
    gradients = [p.grad for p in sentinels]
    return [(0, 0) if g is None else (id(g), g._version) for g in gradients]


def _site() -> int:
    """Distinguishes the places in the trainer's source that `backward` is called from."""
    frame = sys._getframe(1)
    site, left = 1, _SITE_FRAMES
    while left and frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_INSIDE):
            site = hash((site, id(frame.f_code), frame.f_lasti))
            left -= 1
        frame = frame.f_back  # type: ignore[assignment]
    return site or 1
