"""The loss under what a trainer does to it before `backward`: divisions and loss scales."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from rankscope.agent.steps.autograd import sequence

# Nobody weighs a loss with more than this; loss scales of mixed precision begin there.
_LARGEST_WEIGHT = 256.0

_one = torch.ones((), requires_grad=True, device="cpu")
with torch.enable_grad():
    _QUOTIENT, _PRODUCT = type((_one / 1).grad_fn), type((_one * 1).grad_fn)
    _SUMS = frozenset((type(_one.sum().grad_fn), type(_one.sum(()).grad_fn)))
    ADDITION = type((_one + _one).grad_fn)
    SUBTRACTION, NEGATION = type((_one - _one).grad_fn), type((-_one).grad_fn)
    _HOOKS_ARE_SHOWN = hasattr((_one * 1).grad_fn._raw_saved_other, "unpack_hook")  # type: ignore[union-attr]
# By class: that is had faster than a node's name.
SCALINGS = frozenset((_QUOTIENT, _PRODUCT))
# What a loss may be made of on the way from its parts.
COMPOSED = SCALINGS | {ADDITION}
# What has several terms, or one that is taken away.
OF_TERMS = frozenset((ADDITION, SUBTRACTION, NEGATION))
_REDUCTION_SUM = 2
# Additions below which common divisors are searched.
_DEEPEST = 4


# What `backward` started from: its value without a loss scale (a detached copy where it is on a
# device), what the trainer divided the loss by, as far as that can be read, the graph's node under
# divisions and scales, and where the loss is a sum over elements, how many these are over what it
# was first divided by: 1 for a mean, less for a part of one over several micro-batches; None where
# that is not known. A plain tuple: there is one a step, and a named one takes a microsecond more.
Root = tuple[float | torch.Tensor, float, Any, "float | torch.Tensor | None"]


def read_root(
    tensors: Any, scaled: Collection[tuple[int, float | torch.Tensor]] = ()
) -> Root | None:
    """Reads the loss off what `torch.autograd.backward` was given, without waiting for a device.

    Args:
        tensors: a tensor or several; of several, the sum is what is minimised.
        scaled: sequence number of what a GradScaler returned -> what it was given.

    Returns:
        None where it is no loss: more than one element, or a part of what other ranks hold.
    """
    if type(tensors) is not torch.Tensor:
        return _read_unusual(tensors, scaled)
    if tensors.numel() != 1:
        return None
    node = tensors.grad_fn
    if node is None or tensors.is_complex():
        return None
    if type(node) in SCALINGS:
        return _unscaled(tensors, scaled)
    divisor = _common_divisor(node, _DEEPEST) if type(node) is ADDITION else 1.0
    return _value(tensors), divisor, node, None


def _read_unusual(
    tensors: Any, scaled: Collection[tuple[int, float | torch.Tensor]]
) -> Root | None:
    if isinstance(tensors, torch.Tensor):
        placements = getattr(tensors, "placements", None)
        if placements is None:
            # One that only answers functions in its own way is read; one without a number is not.
            plain = type(tensors).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
            return read_root(tensors.as_subclass(torch.Tensor), scaled) if plain else None
        # Reading a distributed tensor that is not here as a whole would be a collective.
        if tensors.numel() != 1 or not all(p.is_replicate() for p in placements):
            return None
        held: torch.Tensor = getattr(tensors, "_local_tensor")  # noqa: B009 - not known to torch
        return _value(held), 1.0, tensors.grad_fn, None
    if not isinstance(tensors, list | tuple):
        return None
    roots = [read_root(t, scaled) if isinstance(t, torch.Tensor) else None for t in tensors]
    known = [r for r in roots if r is not None]
    if not known or len(known) < len(roots):
        return None
    if len(known) == 1:
        return known[0]
    return sum(value for value, _, _, _ in known), 1.0, known[0][2], None


def _value(tensor: torch.Tensor) -> float | torch.Tensor:
    if tensor.is_cpu:
        return tensor.item()
    # Not read: that would wait. A copy, because the trainer may change it in place.
    return tensor.detach().clone()


def _unscaled(root: torch.Tensor, scaled: Collection[tuple[int, float | torch.Tensor]]) -> Root:
    """Follows products and quotients with numbers down to the loss."""
    node: Any = root.grad_fn
    value: Any = _value(root)
    before = dict(scaled) if scaled else None
    divisor = outer = 1.0
    while (kind := type(node)) in SCALINGS:
        (below, _), (beside, _) = node.next_functions
        mirrored = below is None  # a number times a loss
        if mirrored:
            below, beside = beside, below
        if below is None or beside is not None or (mirrored and kind is _QUOTIENT):
            break
        given = before.get(sequence(node)) if before else None
        if given is not None:
            # What a GradScaler was given, less what was done to the result.
            value = given / divisor
        else:
            other = _operand(node, mirrored)
            if other is None:
                break
            if not other.is_cpu:
                # Reading it would wait. Where it is a loss scale it is undone on the device.
                scale = other.detach().reciprocal() if kind is _QUOTIENT else other.detach()
                value = value / torch.where(scale > _LARGEST_WEIGHT, scale, 1.0)
            else:
                number = other.item()
                if not number or not math.isfinite(number):
                    break  # a loss that is weighted with nothing is no scaled loss
                factor = 1.0 / number if kind is _QUOTIENT else number
                if factor > _LARGEST_WEIGHT:
                    value = value / factor
                else:
                    outer, divisor = divisor, divisor / factor
        node = below
    if type(node) is ADDITION:
        divisor *= _common_divisor(node, _DEEPEST)
    elif type(node) in _SUMS or getattr(node, "_saved_reduction", 1) == _REDUCTION_SUM:
        # A sum is first divided by the number of what it is the sum of: that is a mean.
        elements = _elements(node)
        first = divisor / outer
        return value, outer, node, elements / first if elements is not None else None
    return value, divisor, node, None


def weighted(root: Root, gradients: Any) -> Root:
    """A root with the weight that `backward` was given beside it: what is minimised.

    Args:
        gradients: its `grad_tensors`. Those that are large are loss scales and are left out.
    """
    given = gradients
    if isinstance(given, list | tuple):
        given = given[0] if len(given) == 1 else None
    if type(given) is not torch.Tensor or given.numel() != 1 or given.is_complex():
        return root
    value, divisor, node, share = root
    if not given.is_cpu:
        weight = given.detach().reshape(()).double()
        return value * torch.where(weight > _LARGEST_WEIGHT, 1.0, weight), divisor, node, share
    number = given.item()
    if number == 1.0 or number > _LARGEST_WEIGHT or not number or not math.isfinite(number):
        return root
    return value * number, divisor / number if 0.0 < number < 1.0 else divisor, node, share


def _common_divisor(addition: Any, depth: int) -> float:
    """What all summands were divided by alike; 1 where that is not so."""
    divisors = set()
    for below, _ in addition.next_functions:
        if below is None:
            continue  # a constant
        kind = type(below)
        if kind is ADDITION and depth:
            divisors.add(_common_divisor(below, depth - 1))
            continue
        number = 1.0
        if kind in SCALINGS and below.next_functions[1][0] is None:
            other = _operand(below, mirrored=False)
            number = other.item() if other is not None and other.is_cpu else 1.0
            if not number or not math.isfinite(number):
                return 1.0
            number = number if kind is _QUOTIENT else 1.0 / number
        divisors.add(number)
    found = divisors.pop() if len(divisors) == 1 else 1.0
    return found if found > 0 else 1.0


def factor_of(node: Any) -> tuple[float | None, Any]:
    """The number that a product or quotient multiplies something with, and the node of that.

    None where it is no number, or one that is not known without waiting for a device.
    """
    (below, _), (beside, _) = node.next_functions
    mirrored = below is None
    if mirrored:
        below, beside = beside, below
    quotient = type(node) is _QUOTIENT
    if below is None or beside is not None or (mirrored and quotient):
        return None, below
    other = _operand(node, mirrored)
    if other is None or not other.is_cpu:
        return None, below
    number = float(other.item())
    if quotient:
        return (1.0 / number if number else None), below
    return number, below


def _elements(node: Any) -> float | torch.Tensor | None:
    """How many elements a sum is of, without those that a class index loss ignores."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is not None:
        return float(math.prod(int(size) for size in sizes))
    for name in ("_raw_saved_total_weight", "_raw_saved_self"):
        saved = getattr(node, name, None)
        if saved is not None:
            if saved.unpack_hook is not None or not isinstance(saved.data, torch.Tensor):
                return None
            if name == "_raw_saved_self":
                return float(saved.data.numel())
            total = saved.data.detach()
            return float(total.item()) if total.is_cpu else total.double()
    return None


def _operand(node: Any, mirrored: bool) -> torch.Tensor | None:
    """The number of a product or quotient, where it can be had without running anybody's code.

    Hooks on saved tensors run when one is unpacked: under activation checkpointing that is the
    user's forward pass once more. Where torch does not show whether there are any, a plain number
    is still taken (it never has any), at the risk of a tensor that a checkpointed loss is divided
    by.
    """
    if not _HOOKS_ARE_SHOWN:
        operand = node._saved_self if mirrored else node._saved_other
    else:
        saved = node._raw_saved_self if mirrored else node._raw_saved_other
        if saved.unpack_hook is not None:
            return None
        operand = saved.data
    return operand if isinstance(operand, torch.Tensor) and operand.numel() == 1 else None
