"""What a fault did, against the healthy training of the same number. Pure.

A fault without an effect that matters need not be found: it is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from tests.lab.drawn.fault import Fault
from tests.lab.drawn.recipe import Recipe

Seen = Sequence[Mapping[str, NDArray[np.float64]]]

# The ones that the lab is judged by: tenfold norms or losses, steps that take half as long again,
# a final loss that is worse by three of its own standard errors.
_TENFOLD = 10.0
_SLOWER = 1.5
_WORSE = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What was measured.

    Attributes:
        differ: ranks that have to agree do not.
        nonfinite: a loss or a gradient is not finite.
        tenfold: largest ratio of a norm or a loss to the twin's, either way.
        worse: final loss minus the twin's, in standard errors of the twin's.
        slower: median step time over the twin's, while it acts.
        ended: a process was gone before its time.
    """

    differ: bool
    nonfinite: bool
    tenfold: float
    worse: float
    slower: float
    ended: bool

    @property
    def matters(self) -> bool:
        """Whether it has to be found."""
        return (
            self.differ
            or self.nonfinite
            or self.ended
            or self.tenfold >= _TENFOLD
            or self.worse >= _WORSE
            or self.slower >= _SLOWER
        )

    @property
    def size(self) -> float:
        """One figure, by which power is drawn: how far it lies beyond what need be found."""
        if self.differ or self.nonfinite or self.ended:
            return 10.0
        return max(self.tenfold / _TENFOLD, self.worse / _WORSE, self.slower / _SLOWER)

    def as_json(self) -> dict[str, object]:
        """All of it, JSON-able."""
        return {**asdict(self), "matters": self.matters, "size": self.size}


ENDED = Effect(differ=False, nonfinite=False, tenfold=1.0, worse=0.0, slower=1.0, ended=True)


def effect_of(fault: Fault, recipe: Recipe, faulty: Seen, healthy: Seen) -> Effect:
    """Measures it.

    Args:
        faulty, healthy: of each rank what it saw; of one that did not get to its end nothing.
    """
    if len(faulty) < recipe.world or any(len(rank["digest"]) < recipe.steps for rank in faulty):
        return ENDED
    losses, healthy_losses = _of(faulty, "loss"), _of(healthy, "loss")
    nonfinite = not all(np.isfinite(_of(faulty, name)).all() for name in ("loss", "local", "norm"))
    return Effect(
        differ=_differ(recipe, faulty) and not _differ(recipe, healthy),
        nonfinite=nonfinite,
        tenfold=1.0 if nonfinite else _largest(fault, faulty, healthy),
        worse=0.0 if nonfinite else _worse(losses, healthy_losses),
        slower=_slower(fault, faulty, healthy),
        ended=False,
    )


def _of(seen: Seen, name: str) -> NDArray[np.float64]:
    return np.stack([rank[name] for rank in seen])


def _differ(recipe: Recipe, seen: Seen) -> bool:
    if recipe.scheme == "fsdp":
        return False  # each holds another part
    digests = _of(seen, "digest")
    if recipe.scheme == "local_sgd":
        digests = digests[:, recipe.every - 1 :: recipe.every]
    return bool((digests != digests[0]).any())


def _largest(fault: Fault, faulty: Seen, healthy: Seen) -> float:
    """The largest ratio, at a step, of a rank's norm or loss to the twin's usual one."""
    largest = 1.0
    for name in ("loss", "local", "norm"):
        values, usual = _of(faulty, name)[:, fault.onset :], _of(healthy, name)[:, fault.onset :]
        ordinary = np.abs(usual).max(), max(np.abs(usual).min(), 1e-12)
        largest = max(largest, float(np.abs(values).max() / ordinary[0]))
        if name != "loss":
            largest = max(largest, float(ordinary[1] / max(np.abs(values).min(), 1e-12)))
    return largest


def _worse(losses: NDArray[np.float64], healthy: NDArray[np.float64]) -> float:
    last = max(losses.shape[1] // 8, 8)
    ends, usual = losses[:, -last:].mean(0), healthy[:, -last:].mean(0)
    # The batches are the same: what remains is how much the difference scatters.
    error = max(float(usual.std(ddof=1)), 0.02 * float(abs(usual.mean()))) / np.sqrt(last)
    return float((ends.mean() - usual.mean()) / error)


def _slower(fault: Fault, faulty: Seen, healthy: Seen) -> float:
    if fault.site != "time":
        return 1.0  # what a machine does at the same time is no fault
    acting = [step for step in range(len(faulty[0]["seconds"])) if fault.acts(step)]
    if not acting:
        return 1.0
    slow = np.median(_of(faulty, "seconds")[:, acting])
    return float(slow / np.median(_of(healthy, "seconds")))
