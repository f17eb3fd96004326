"""The mode of the modules at a training step: training or evaluation."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from rankscope.agent.model.facts import core, plain_name
from rankscope.agent.probes.base import Context, Probe, StepFacts

_EVENT = "mode.changed"
# Names that an event lists, and events of one process: a trainer may change modes at every step.
_MOST_NAMES, _MOST_EVENTS = 200, 64
# Rate of a dropout from which on a tenth of what a layer gives is left, or less.
_MOST_DROPPED = 0.9
# Momentum of a normalization below which half of its statistics are those that it was made with for
# more than 69 batches; 0.1 is usual, 0.01 what Keras has.
_SLOW = 0.01
# Functions of torch that draw what they drop, where they are told that it is training.
_DROPPING = frozenset(
    ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
)
_ROOT = "(the whole model)"
# Class -> whether its code asks for its mode.
_asking: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


class ModeDependent(NamedTuple):
    """A module that computes something else in evaluation mode.

    Attributes:
        sort: `normalization`, `dropout` (whatever draws random numbers in training mode only, also
            where a method of the user's calls `functional.dropout` by its mode), or `own`: code of
            the user's that asks for the mode, to whatever end.
    """

    name: str
    module: torch.nn.Module
    sort: str


class Mode(Probe):
    """`modules_in_eval`: the share of mode-dependent modules that a step was taken with in eval.

    Costs one attribute a step, and one a mode-dependent module (tier `signals`).

    Counted are the modules that compute something else in evaluation mode: dropout with a rate
    above 0, normalization with running statistics, and modules of the user's own classes whose code
    asks for `self.training`. 0 is a step in which all of them train, 1 one in which all evaluate.
    Posted where `signals` is due and where the mode of the whole model has changed; at each sampled
    step while the model is in evaluation mode. Nothing is posted of a model without such
    modules.

    The event `mode.changed` says which they are: at the first step and at each change, 64 times at
    most; and how many of the normalizations in eval are `new`, with statistics of no batch at all
    (`new_trained`: of these, how many have a weight that requires a gradient). It lists, too, what
    of the modules in training mode does more than is usual or nothing: `dropping`, [name, rate] of
    dropout modules with a rate of 0.9 or more, and of normalizations that began with statistics of
    no batch `still`, those with a momentum of 0, which keep them, and `slow`, [name, momentum] of
    those with one below 0.01.
    """

    name = "mode"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._core = core(context.model)
        self._group = context.parameters
        self._named: list[tuple[str, torch.nn.Module]] = []
        self._candidates: list[tuple[str, torch.nn.Module]] = []
        self._dependent: tuple[ModeDependent, ...] | None = None
        self._evaluates = False  # the whole model, at the last sample
        # Read before the first step: on a device it waits for it.
        self._new = {id(m) for m in self._core.modules() if _is_new(m)}
        self._began_new = frozenset(self._new)
        self._reported: tuple[bool, tuple[str, ...], int] | None = None
        self._events = 0

    def after_step(self, facts: StepFacts) -> None:
        """The mode in which the step was taken."""
        context = self.context
        evaluates = not self._core.training
        if not (context.signals or evaluates or evaluates is not self._evaluates):
            return
        with facts.charged("signals" if context.signals else "basic"):
            self._evaluates = evaluates
            if self._dependent is None or context.parameters is not self._group or context.full:
                self._group = context.parameters
                self._dependent = self._mode_dependent()
            dependent = self._dependent
            off = [one for one in dependent if not one.module.training]
            if self._new:
                # A step in training mode has given them statistics.
                self._new -= {id(one.module) for one in dependent if one.module.training}
            if dependent:
                facts.scalars["modules_in_eval"] = len(off) / len(dependent)
            now = evaluates, tuple(one.name for one in off), len(dependent)
            if now != self._reported and self._events < _MOST_EVENTS:
                self._reported = now
                self._events += 1
                text, data = _described(evaluates, off, dependent)
                new = [one.module for one in off if id(one.module) in self._new]
                data["new"] = len(new)
                data["new_trained"] = sum(_is_trained(module) for module in new)
                data |= self._extreme(dependent)
                context.event(facts.step, _EVENT, text, data)

    def _extreme(self, dependent: tuple[ModeDependent, ...]) -> dict[str, Any]:
        training = [one for one in dependent if one.module.training]
        dropping = [
            [one.name, float(one.module.p)]
            for one in training
            if isinstance(one.module, _DropoutNd) and one.module.p >= _MOST_DROPPED
        ]
        began_new = [one for one in training if id(one.module) in self._began_new]
        momenta = [(one.name, getattr(one.module, "momentum", None)) for one in began_new]
        still = [name for name, momentum in momenta if momentum == 0]
        slow = [[name, float(m)] for name, m in momenta if m is not None and 0 < m < _SLOW]
        lists: dict[str, list[Any]] = {"dropping": dropping, "still": still, "slow": slow}
        return {name: found[:_MOST_NAMES] for name, found in lists.items() if found}

    def _mode_dependent(self) -> tuple[ModeDependent, ...]:
        named = self.context.modules.named()
        if named is not self._named:
            self._named = named
            self._candidates = [(plain_name(n), m) for n, m in named if may_depend(m)]
        return _dependent_of(self._candidates)


def may_depend(module: torch.nn.Module) -> bool:
    """Whether a module could become mode-dependent: most are of classes that never ask."""
    kind = type(module)
    if isinstance(module, _NormBase | _DropoutNd | torch.nn.RReLU):
        return True
    if kind.__module__.startswith("torch."):
        return bool(_dropout_rates(module))
    return _asks_for_mode(kind)


def mode_dependent(model: torch.nn.Module) -> tuple[ModeDependent, ...]:
    """The modules of a model that compute something else in evaluation mode, in its order."""
    return _dependent_of((plain_name(name), m) for name, m in model.named_modules())


def _dependent_of(named: Iterable[tuple[str, torch.nn.Module]]) -> tuple[ModeDependent, ...]:
    found = ((name, m, _sort_of(m)) for name, m in named)
    return tuple(ModeDependent(name or _ROOT, m, sort) for name, m, sort in found if sort)


def _described(
    evaluates: bool, off: list[ModeDependent], dependent: tuple[ModeDependent, ...]
) -> tuple[str, dict[str, Any]]:
    names = [one.name for one in off]
    sorts = [one.sort for one in off]
    text = f"{len(off)} of {len(dependent)} mode-dependent modules are in evaluation mode"
    return text, {
        "whole": evaluates,
        "names": names[:_MOST_NAMES],
        "count": len(names),
        "of": len(dependent),
        **{sort: sorts.count(sort) for sort in ("normalization", "dropout", "own")},
    }


def _sort_of(module: torch.nn.Module) -> str:
    if isinstance(module, _NormBase):
        # Without running statistics it takes those of the batch in both modes.
        return "normalization" if module.running_mean is not None else ""
    if isinstance(module, torch.nn.RReLU):
        return "dropout"
    rates = _dropout_rates(module)
    kind = type(module)
    if isinstance(module, _DropoutNd) or kind.__module__.startswith("torch."):
        # Of torch's others (attention, recurrent layers) the rest is about speed alone.
        return "dropout" if any(rates) else ""
    if not _asks_for_mode(kind):
        return ""
    if rates:
        return "dropout" if any(rates) else ""
    return "dropout" if _drops(kind) else "own"


def _is_new(module: torch.nn.Module) -> bool:
    """Whether a normalization has running statistics that no batch went into."""
    batches = getattr(module, "num_batches_tracked", None)
    if not isinstance(module, _NormBase) or not isinstance(batches, torch.Tensor):
        return False
    if batches.device.type == "meta" or int(batches):
        return False
    # Converted checkpoints may have statistics and no count.
    mean = module.running_mean
    return mean is None or not bool(mean.any())


def _is_trained(module: torch.nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _dropout_rates(module: torch.nn.Module) -> list[float]:
    """Plain numbers that are called `p`, or dropout, drop_prob, attention_dropout and the like."""
    return [
        value
        for name, value in vars(module).items()
        if type(value) in (int, float) and (name == "p" or "drop" in name)
    ]


def _asks_for_mode(kind: type[torch.nn.Module]) -> bool:
    known = _asking.get(kind)
    if known is None:
        known = _asking[kind] = _reads_training(kind)
    return known


def _reads_training(kind: type[torch.nn.Module]) -> bool:
    """Whether a method of a class of the user's reads `training`."""
    for owner in kind.__mro__:
        if owner is torch.nn.Module:
            return False
        for name, function in vars(owner).items():
            code = getattr(function, "__code__", None)
            if code is not None and name not in ("train", "eval", "__init__"):
                if any("training" in c.co_names for c in _codes(code)):
                    return True
    return False


def _drops(kind: type[torch.nn.Module]) -> bool:
    """Whether a method of a class of the user's calls a dropout function by its mode."""
    own = (owner for owner in kind.__mro__ if owner not in torch.nn.Module.__mro__)
    functions = (f for owner in own for f in vars(owner).values())
    codes = (getattr(function, "__code__", None) for function in functions)
    return any(
        "training" in c.co_names and any(name in _DROPPING for name in c.co_names)
        for code in codes
        if code is not None
        for c in _codes(code)
    )


def _codes(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
