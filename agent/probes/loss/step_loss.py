"""The loss of a step out of its backward passes: which count, and whether they add up.

Pure. Micro-batches are averaged, and objectives that are minimised together add up; how the two are
distinguished is said at `Loss`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rankscope.agent.probes.loss.sources import Pass


def own_passes(passes: Sequence[Pass], before: int, single: bool) -> list[Pass]:
    """The backward passes whose gradients an optimizer has stepped with.

    Args:
        passes: all there were in the process since its last step.
        before: number of them from before the step; the others were called by its closure.
        single: the closure calls `backward` once.
    """
    own: list[Pass] = []
    moved = False  # whether those found are known to have reached its parameters
    inside = 0  # of those found, how many are the closure's
    for index, one in enumerate(passes):
        closure = index >= before
        fresh = one[2] and moved
        if closure and inside and (single or fresh):
            break  # it is called again; the first call is the step's, as in what `step` returns
        if fresh or (one[3] and not moved):
            # `zero_grad` has thrown away what those before left, or they were another model's.
            own, moved, inside = [], one[3], 0
        elif moved and not one[3]:
            continue
        own.append(one)
        inside += closure
    return own


def loss_of(passes: Sequence[Pass], divided_by: float = 0.0) -> tuple[float | torch.Tensor, float]:
    """The loss of a step out of its backward passes: what the trainer would print.

    Args:
        passes: those whose gradients the optimizer has stepped with, in order, at least one.
        divided_by: the number of micro-batches that the trainer divides losses by, as far as
            earlier steps have shown it; 0 for none.

    Returns:
        The loss, and `divided_by` as this step has shown it.
    """
    count = len(passes)
    divisor = common([p[1] for p in passes])
    if count == 1:
        # The last group of an epoch may be smaller; it is divided by the same number.
        one = passes[0][0]
        known = _same(divisor, divided_by) and divisor != 1.0
        return (one * round(divisor) if known else one), divided_by
    if divisor != 1.0:
        if _same(divisor, count):
            return sum_of(passes), float(count)
        if _same(divisor, divided_by):
            return sum_of(passes) * round(divisor) / count, divided_by
    shares: list[Any] = [p[8] for p in passes if p[8] is not None]
    if len(shares) == count:
        # Sums over elements, each divided by a number: where that is how many all of them have
        # together they add up to the mean, and where each has its own they are means of their own.
        whole = sum(shares)
        bound = math.sqrt(count)
        if isinstance(whole, torch.Tensor):
            return sum_of(passes) * torch.where(
                whole.double() < bound, 1.0, 1.0 / count
            ), divided_by
        if whole < bound:
            return sum_of(passes), divided_by
    means: Any = 0.0
    for objective in _objectives(passes):
        parts = len(objective)
        total: Any = sum(sum_of(group) for group in objective)
        own = common([p[1] for group in objective for p in group])
        more = own > parts > 1 and _same(own, round(own))
        if own != 1.0 and (_same(own, parts) or _same(own, divided_by) or more):
            total = total * round(own)
        means = means + total / parts
    return means, divided_by


def _objectives(passes: Sequence[Pass]) -> list[list[list[Pass]]]:
    """The passes by what they are about; of each, its micro-batches; of these, their passes.

    Passes from one place in the source are micro-batches of one objective, a loop over them; those
    from several places are objectives that are minimised together, like a discriminator's for what
    is real and what is made. So are those after one and the same forward pass of the model.
    """
    groups: list[list[Pass]] = []
    # Forward passes may all come first, each with a backward pass of its own. None was seen where
    # something else than the root module is called.
    several = 0 < passes[-1][7] < len(passes)
    for one in passes:
        if several and groups and groups[-1][-1][7] == one[7]:
            groups[-1].append(one)
        else:
            groups.append([one])
    if any(p[6] == 0 for p in passes):
        return [groups]
    found: dict[tuple[int, ...], list[list[Pass]]] = {}
    for group in groups:
        found.setdefault(tuple(p[6] for p in group), []).append(group)
    return list(found.values())


def common(numbers: list[float]) -> float:
    """The number that all of them are; 1 where they are not the same."""
    return numbers[0] if all(n == numbers[0] for n in numbers) else 1.0


def _same(one: float, other: float) -> bool:
    # The reciprocal of a whole number, rounded to 32 bits.
    return abs(one - other) <= 1e-6 * abs(other)


def sum_of(passes: Sequence[Pass]) -> Any:
    """The sum of what backward passes started from, in float64."""
    return sum(_double(p[0]) for p in passes)


def _double(value: float | torch.Tensor) -> float | torch.Tensor:
    return value.reshape(()).double() if isinstance(value, torch.Tensor) else value
