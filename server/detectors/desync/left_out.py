"""Tensors that are left out where the others are averaged over the ranks. Pure.

Where ranks average some tensors only, the whole never becomes equal: neither the digests of the
model nor the returns to equality say anything. But what is averaged comes closer together at every
round, and what is left out only drifts further: so its distance between the ranks says it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import agree, count, listing
from rankscope.server.window import Comparison

# Rounds that show it. By chance the distance of a tensor does not shrink in any of them while the
# same other ones do so in all of them, by a quarter: that takes more than noise.
_ROUNDS = 4
# What a round leaves of the distance, at the most: one local step after it, of two between rounds,
# leaves 1 / sqrt(2) of a random walk.
_LEFT = 0.75
# How much further the ranks are from each other in what nobody averages. What is averaged may be
# as far away one step after a round as before it: where steps overshoot (a learning rate near the
# curvature's limit), distances stop growing after a step or two. Twice, a random walk reaches after
# four times as many steps.
_DRIFTED = 2.0


@dataclass(slots=True)
class _Round:
    """Parameters were written between two steps, by each rank in its own way.

    Attributes:
        quiet: steps before at which they were not.
        closer, rest: tensors that came closer together, and those that did not.
    """

    step: int
    quiet: int
    closer: frozenset[str]
    rest: frozenset[str]


@dataclass(slots=True)
class LeftOut:
    """Follows how far the ranks' tensors are from each other.

    Attributes:
        distances: tensor -> largest L2 distance of a rank's from the reference, at the newest
            comparison.
    """

    distances: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    _rounds: deque[_Round] = field(default_factory=lambda: deque(maxlen=_ROUNDS))
    _smallest: dict[str, float] = field(default_factory=dict)
    _largest: dict[str, float] = field(default_factory=dict)
    # Tensors that came closer at a round -> the largest distance up to the last one of these.
    _averaged: dict[str, float] = field(default_factory=dict)
    _quiet: int = 0
    _tensors: tuple[str, ...] = ()
    _of: int = 0
    _incident: Incident | None = None

    def take(self, comparisons: Sequence[Comparison]) -> None:
        """Takes all comparisons of one step."""
        links = {comparison.stage: comparison for comparison in comparisons}
        parameters, outside = links.get("parameters"), links.get("outside_optimizer")
        if parameters is None:
            return
        if parameters.equal:
            self.distances = {}
            self._smallest.clear()
            self._rounds.clear()
            return
        if not parameters.tensor_count:
            return  # only the whole was compared
        before = self.distances
        # Changes of single elements have no distance that shrinks.
        self.distances = {t.name: t.distance for t in parameters.tensors if t.distance > 0}
        for name, distance in self.distances.items():
            self._smallest[name] = min(distance, self._smallest.get(name, distance))
            self._largest[name] = max(distance, self._largest.get(name, distance))
        if outside is None:
            return
        if outside.equal:
            self._quiet += 1
            return
        both = self.distances.keys() & before.keys()
        closer = frozenset(n for n in both if self.distances[n] < _LEFT * before[n])
        rest = frozenset(both - closer)
        self._averaged |= {name: self._largest[name] for name in closer}
        self._rounds.append(_Round(parameters.step, self._quiet, closer, rest))
        self.ranks = tuple(int(r) for r in parameters.ranks)
        if len(self._rounds) == _ROUNDS:
            self._judge(parameters)

    def finding(self) -> Finding | None:
        """What is to be reported, once it was seen and while rounds go on."""
        incident, tensors = self._incident, self._tensors
        if incident is None:
            return None
        these = count(len(tensors), "tensor")
        return incident.finding(
            kind="desync.parameters",
            key="left out",
            severity="warning",
            title=f"{these} of {self._of} {agree(len(tensors), 'is')} left out of the averaging "
            f"since step {incident.first_step}",
            ranks=self.ranks,
            stage="parameters",
            tensors=tensors,
            cause=(
                f"The ranks come closer together now and then in {self._of - len(tensors)} of "
                f"{count(self._of, 'tensor')}, as where parameters are averaged, and never in "
                f"{listing(tensors, most=6)}: each rank trains its own."
            ),
            remedy=(
                "Average all parameters: look for a condition (`ndim`, a name, `requires_grad`) "
                "in the loop that averages them, and for modules that were made after the list. "
                "If ranks are meant to have layers of their own (personalised federated "
                "learning), leave these out of what is attached."
            ),
            evidence={"rounds": _ROUNDS},
        )

    # ------------------------------------------------------------------------------------- inside

    def _drifted(self, name: str) -> bool:
        """Whether a tensor is further from the others' than while it was averaged, or at first."""
        past = self._averaged.get(name, self._smallest.get(name, 0.0))
        return self.distances.get(name, 0.0) > _DRIFTED * past

    def _judge(self, parameters: Comparison) -> None:
        rounds = list(self._rounds)
        # Written at every step, the distances are those of single steps, which go up and down.
        if rounds[-1].quiet - rounds[0].quiet < _ROUNDS - 1:
            return
        # Some may average one part of the model after the other: then all come closer in turn.
        always = frozenset.intersection(*(r.closer for r in rounds))
        never = frozenset.intersection(*(r.rest for r in rounds))
        never = frozenset(name for name in never if self._drifted(name))
        others = frozenset.union(*(r.closer for r in rounds))
        if not always or not never or never & others or len(always) < len(others) / 2:
            return
        first, step = rounds[0].step, parameters.step
        if self._incident is None:
            self._incident = Incident(
                first_step=first, seen_step=step, last_step=step, clear_after=0
            )
        elif not never & set(self._tensors):
            return
        self._incident.last_step = step
        self._incident.clear_after = 2 * max(step - self._incident.first_step, 8)
        order = [t.name for t in parameters.tensors]
        self._tensors = tuple(name for name in order if name in never)
        self._of = len(never | others)
