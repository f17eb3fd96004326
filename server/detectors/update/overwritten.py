"""Single matrices that steps write over, while the rest of the model keeps its pace."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.samples import LayerSample
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.wording import agree, count, listing, number, sentences
from rankscope.server.detectors.policy import Count, Policy, Share, Times
from rankscope.server.window import Float64, Window

_MAX_NAMES = 64


@dataclass(frozen=True, slots=True)
class OverwrittenPolicy(Policy):
    """Thresholds of `update.ratio` for single matrices that are written over.

    Attributes:
        overwriting: change of a matrix in a step over its initial size, from which on it is written
            over: twenty such steps in one direction replace what it began with.
        outpacing: its pace over that of the other matrices, from which on it has one of its own,
            both as a share of their initial sizes and element by element. Adam moves each element
            of the model by the same amount; widths of 10 and 4,000 inputs make shares of it that
            differ by 20, and never both.
        outgrown: its size over its initial one from which on that is gone.
        samples: consecutive sampled steps that a pace is the median of.
        others: share of the matrices that have to keep their pace.
    """

    overwriting: Share = 0.05
    outpacing: Times = 20.0
    outgrown: Times = 4.0
    samples: Count = 16
    others: Share = 0.25


@dataclass(slots=True)
class _Matrix:
    """What is known of a matrix.

    Attributes:
        initial: its norm before the first step, or that of a usual initialisation where it is more.
        size: its norm now.
        elements: how many it has.
        steps: the steps of the last samples, and by how much of `initial` they changed it.
    """

    initial: float
    size: float
    elements: int
    steps: deque[tuple[int, float]]


@dataclass(slots=True)
class Overwritten:
    """Attributes: matrix -> its pace, and how far it has grown; the others' pace; the rates."""

    pace: Mapping[str, float]
    grown: Mapping[str, float]
    others: float
    rates: Mapping[str, float]


@dataclass(slots=True)
class OverwrittenState(Condition[Overwritten]):
    """What is remembered of the matrices of a model, and of the rates of its parameter groups."""

    watch: Watch[Overwritten] = field(default_factory=lambda: Watch(clear_after=50))
    matrices: dict[str, _Matrix] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)

    def take_rates(self, window: Window) -> None:
        """Takes the learning rates of the groups, where they are not all the same."""
        for name, series in window.series.items():
            if name.startswith("lr/") and series.present.any():
                values = series.values[series.present]
                self.rates[name.removeprefix("lr/")] = float(values[-1])

    def push(self, sample: Mapping[str, LayerSample], step: int, policy: OverwrittenPolicy) -> None:
        """Takes what was posted of the tensors at a step, and judges it."""
        updates, weights = sample.get("update_ratio"), sample.get("weight_norm")
        if updates is None or weights is None or updates.names != weights.names:
            return
        sizes, shares = _largest(weights.values), _largest(updates.values)
        for gone in set(self.matrices) - set(weights.names):
            del self.matrices[gone]
        for name, shape, size, share in zip(
            weights.names, weights.shapes, sizes.tolist(), shares.tolist(), strict=True
        ):
            if _is_matrix(shape) and size > 0 and 0 < share < math.inf and size < math.inf:
                self._take(name, shape, size, share, step, policy)
        self._judge(step, policy)

    def _take(
        self,
        name: str,
        shape: tuple[int, ...],
        size: float,
        share: float,
        step: int,
        policy: OverwrittenPolicy,
    ) -> None:
        known = self.matrices.get(name)
        if known is None:
            known = self.matrices[name] = _Matrix(
                max(_before(size, share), _usual(shape)),
                size,
                math.prod(shape),
                deque(maxlen=policy.samples),
            )
        known.size = size
        known.steps.append((step, share * size / known.initial))

    def _judge(self, step: int, policy: OverwrittenPolicy) -> None:
        known = {n: m for n, m in self.matrices.items() if len(m.steps) == policy.samples}
        pace = {name: median([share for _, share in m.steps]) for name, m in known.items()}
        odd = {
            name: found
            for name, found in pace.items()
            if found > policy.overwriting
            and known[name].size > policy.outgrown * known[name].initial
        }
        others = [name for name in known if pace[name] <= policy.overwriting]
        if not odd or len(others) < max(1.0, policy.others * len(known)):
            self.watch.good(step)
            return
        usual = median([pace[name] for name in others])
        usual_element = median([_by_element(pace[name], known[name]) for name in others])
        odd = {
            name: found
            for name, found in odd.items()
            if found > policy.outpacing * usual
            and _by_element(found, known[name]) > policy.outpacing * usual_element
        }
        if not odd:
            self.watch.good(step)
            return
        grown = {name: known[name].size / known[name].initial for name in odd}
        facts = Overwritten(odd, grown, usual, dict(self.rates))
        first = min(s for name in odd for s, share in known[name].steps if share > usual)
        self.watch.bad(step, facts, first_step=first).facts = facts

    def finding(self, episode: Episode[Overwritten]) -> Finding:
        """What is reported of an episode."""
        facts = episode.facts
        names = sorted(facts.pace, key=lambda name: (-facts.pace[name], name))
        pace = max(facts.pace.values())
        most = listing([f"`{n}` by {number(facts.pace[n])}" for n in names], most=4)
        rates = sorted(set(facts.rates.values()))
        return episode.finding(
            kind="update.ratio",
            key="overwritten",
            severity="warning",
            title=(
                f"{count(len(names), 'matrix')} of the model {agree(len(names), 'changes')} "
                f"{number(pace / facts.others)} times as fast as the others, and "
                f"{'has' if len(names) == 1 else 'have'} outgrown the initial weights"
            ),
            tensors=tuple(names[:_MAX_NAMES]),
            stage="parameters",
            cause=sentences(
                f"A step changes {most} of the initial size, the other matrices by "
                f"{number(facts.others)}: what these began with is written over within "
                f"{number(math.ceil(1 / pace))} steps, and they are "
                f"{number(max(facts.grown.values()))} times as large by now.",
                f"The parameter groups have learning rates from {number(rates[0])} to "
                f"{number(rates[-1])}."
                if len(rates) > 1
                else "",
                "The learning rate of their parameter group is too high for them, or their "
                "gradient is multiplied by something.",
            ),
            remedy=(
                "Compare the learning rate of their parameter group with that of the others "
                "(`optimizer.param_groups`; a group that is added without one takes the "
                f"optimizer's default): at 1 / {number(pace / facts.others)} of it they would "
                "change at the pace of the rest."
            ),
            evidence={
                "pace": pace,
                "others": facts.others,
                "grown": max(facts.grown.values()),
                "matrices": {name: facts.pace[name] for name in names[:_MAX_NAMES]},
                **({"lr_of_groups": dict(facts.rates)} if len(rates) > 1 else {}),
            },
        )


def _largest(values: Float64) -> Float64:
    """Over the ranks; NaN where none has a number."""
    found: Float64 = np.where(np.isnan(values), -1.0, values).max(axis=0)
    return np.where(found < 0, np.nan, found)


def _is_matrix(shape: tuple[int, ...]) -> bool:
    """Whether it has rows and columns: biases and scales begin at 0 or 1, and so do tokens."""
    return sum(side > 1 for side in shape) > 1


def _before(size: float, share: float) -> float:
    """Norm before a step that is known to have had no direction along the weights."""
    return size * math.sqrt(max(0.0, 1 - share**2))


def _usual(shape: tuple[int, ...]) -> float:
    """Norm of weights of this shape as torch begins with them: a variance of 1 / (3 inputs)."""
    sides = [side for side in shape if side > 1]
    return math.sqrt(sides[0] / 3)


def _by_element(pace: float, matrix: _Matrix) -> float:
    return pace * matrix.initial / math.sqrt(matrix.elements)
