"""One set of scores under several targets, as where samples are mixed with each other.

`share * loss(scores, one) + (1 - share) * loss(scores, other)` (mixup, CutMix) is one loss, of
targets that count by their shares. What single terms say of the answers, alike, would be wrong: a
target of a share of 0.01 is not what the answer was to be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rankscope.agent.probes.loss.classification import Hits
from rankscope.agent.probes.loss.scaling import (
    ADDITION,
    NEGATION,
    SCALINGS,
    SUBTRACTION,
    factor_of,
)
from rankscope.agent.steps.autograd import sequence

# Functions followed from a sum down to its terms.
_MOST_NODES = 32


class Computed(NamedTuple):
    """A loss computed at a sampled step, until `backward` shows which one counts.

    Attributes:
        name: of the function that computed it.
        node, scores: sequence numbers of the graph's nodes that made it, and what it is of.
        summed: over the samples, not averaged.
        explained: share of the deviance, as `Deviance` has it.
        place: where the function was called, as `passes.place_now` has it.
    """

    name: str
    node: int
    scores: int
    summed: bool
    hits: Hits | None
    explained: float | torch.Tensor | None
    place: Any


def made_by(scores: Any) -> int:
    """Sequence number of the node that made them; -1 for what is no part of a graph."""
    node = scores.grad_fn if isinstance(scores, torch.Tensor) else None
    return -1 if node is None else sequence(node)


def shares_in(node: Any, computed: Iterable[Computed]) -> dict[int, float]:
    """What losses of the same scores count in a sum: sequence number of the loss -> share.

    Args:
        node: of the graph, where the sum was made.
    """
    found: dict[int, float] = {}
    for same in _by_scores(computed).values():
        if len(same) > 1 and same[0].scores != -1:
            found |= shares_of(node, {one.node for one in same}) or {}
    return found


def mixed(computed: Sequence[Computed], shares: Mapping[int, float]) -> tuple[Computed, ...]:
    """Losses with one in the place of all that are of the same scores and whose shares are known.

    It has the hits of the one that counts most, and the deviance that all of them explain.
    """
    found = []
    for same in _by_scores(computed).values():
        if len(same) == 1 or any(one.node not in shares for one in same):
            found += same
            continue
        most = max(same, key=lambda one: shares[one.node])
        known = [(shares[o.node], o.explained) for o in same if o.explained is not None]
        explained = None
        if len(known) == len(same):
            total = sum(share for share, _ in known)
            parts = [value * (share / total) for share, value in known]
            explained = sum(parts[1:], parts[0])
        found.append(most._replace(explained=explained))
    return tuple(found)


def _by_scores(computed: Iterable[Computed]) -> dict[tuple[str, int, int], list[Computed]]:
    groups: dict[tuple[str, int, int], list[Computed]] = {}
    for one in computed:
        # Scores that no graph has made are nobody else's.
        alone = one.node if one.scores == -1 else -1
        groups.setdefault((one.name, one.scores, alone), []).append(one)
    return groups


def shares_of(node: Any, terms: Collection[int]) -> dict[int, float] | None:
    """What terms count in a sum, as far as the graph shows it without waiting for a device.

    Args:
        node: of the graph, where the sum was made.
        terms: sequence numbers of their nodes.

    Returns:
        Sequence number -> factor; None where one is below 0 or not known, or is not reached by
        sums and by products with numbers alone.
    """
    found: dict[int, float] = {}
    waiting: list[tuple[Any, float]] = [(node, 1.0)]
    for _ in range(_MOST_NODES):
        if not waiting:
            break
        below, factor = waiting.pop()
        number, kind = sequence(below), type(below)
        if number in terms:
            found[number] = found.get(number, 0.0) + factor
        elif kind is ADDITION:
            waiting += [(one, factor) for one, _ in below.next_functions if one is not None]
        elif kind in SCALINGS:
            times, scaled = factor_of(below)
            if times is not None:
                waiting.append((scaled, factor * times))
    factors = found.values()
    if len(found) < len(terms) or not all(f >= 0 for f in factors) or not sum(factors) > 0:
        return None
    return found


def signs_in(node: Any, computed: Iterable[Computed]) -> set[int]:
    """The signs, 1 or -1, with which losses that have targets of their own count in a sum.

    Of those that are reached by sums, differences and products with numbers that are known without
    waiting for a device; empty for a single loss, which is no sum.

    Args:
        node: of the graph, where the sum was made.
    """
    terms = {one.node for one in computed if one.explained is not None}
    if not terms:
        return set()
    found: set[int] = set()
    waiting: list[tuple[Any, int]] = [(node, 1)]
    several = False
    for _ in range(_MOST_NODES):
        if not waiting:
            break
        below, sign = waiting.pop()
        kind = type(below)
        if sequence(below) in terms:
            found.add(sign)
        elif kind is ADDITION or kind is SUBTRACTION:
            signs = (sign, sign if kind is ADDITION else -sign)
            parts = list(zip((one for one, _ in below.next_functions), signs, strict=False))
            waiting += [(one, each) for one, each in parts if one is not None]
            several |= sum(one is not None for one, _ in parts) > 1
        elif kind is NEGATION:
            waiting.append((below.next_functions[0][0], -sign))
        elif kind in SCALINGS:
            times, scaled = factor_of(below)
            if times:
                waiting.append((scaled, sign if times > 0 else -sign))
    return found if several else set()
