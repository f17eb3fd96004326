"""Parameter groups whose learning rates lie far apart, and steps too large for it. Pure.

One group's rate that is a hundred times too high is none of the rate that is shown, which is the
first group's, and of the whole model's update it is a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import mean_over_ranks
from rankscope.server.detectors.mechanisms.wording import listing, number, sentences
from rankscope.server.window import Window

SERIES = "lr/*"
_PREFIX = "lr/"
# From the lowest rate that is not 0 to the highest. Rates that fall layer by layer do so within
# groups that hardly move; a new head on pretrained layers has 10 times theirs.
_APART = 30.0
# Parameters that grow from nothing at a steady pace have an update of 1 over the steps so far;
# where the answers are far worse than a constant one, less than that is too much.
_GROWTH, _WORSE, _EXPLAINED = 1.3, 0.6, -0.1
# Times the limit, above which steps are too large even if the loss falls all the same.
_TWICE = 2.0
_MAX_NAMES = 64


@dataclass(frozen=True, slots=True)
class Apart:
    """What was seen.

    Attributes:
        rates: group -> its rate; update: of the whole model, median.
        tensors: those that change most, and by what share of themselves.
        teaches: the answers become better all the same.
    """

    rates: Mapping[int, float]
    update: float
    tensors: Mapping[str, float]
    teaches: bool

    @property
    def fast(self) -> int:
        """The group with the highest rate."""
        return max(self.rates, key=lambda group: self.rates[group])


@dataclass(slots=True)
class Groups:
    """Follows the rates of all groups.

    Attributes:
        rates: newest one of each group.
        since: first step at which they lie apart; -1 while they do not.
    """

    rates: dict[int, float] = field(default_factory=dict)
    since: int = -1
    watch: Watch[Apart] = field(default_factory=lambda: Watch(clear_after=50))
    _coming: dict[int, dict[int, float]] = field(default_factory=dict)

    def begin(self, window: Window) -> None:
        """Takes the rates of a window; `pass_to` goes through them."""
        self._coming.clear()
        for name in sorted(window.series):
            index = name.removeprefix(_PREFIX)
            if name.startswith(_PREFIX) and index.isdigit():
                steps, rates = mean_over_ranks(window, name)
                for step, rate in zip(steps.tolist(), rates.tolist(), strict=True):
                    if math.isfinite(rate):
                        self._coming.setdefault(step, {})[int(index)] = rate

    def pass_to(self, step: int) -> None:
        """What holds at a step, which comes after those before."""
        self.rates |= self._coming.get(step, {})
        used = [rate for rate in self.rates.values() if rate > 0]
        if len(used) < 2 or max(used) < _APART * min(used):
            self.since = -1
        elif self.since < 0:
            self.since = step

    def judge(
        self,
        step: int,
        *,
        update: float,
        middle: int,
        high: float,
        tensors: Mapping[str, float],
        learns: bool,
        explained: float,
        named: bool,
    ) -> None:
        """Takes the median update of the whole model.

        Args:
            middle: number of steps up to the middle one of those that the median is of.
            high: update from which on it is too large.
            tensors: matrix -> its own median update.
            learns: the answers are good, or become better.
            explained: share of the deviance that they explain; NaN where it is not known.
            named: what is written over is reported already.
        """
        known = self.watch.open(step)
        lasts = known is not None and known.holding
        growth = _WORSE if explained < _EXPLAINED else _GROWTH
        if named or self.since < 0 or not (lasts or update > max(high, growth / middle)):
            self.watch.good(step)
            return
        if known is not None and lasts:
            # Steps become smaller beside parameters that have grown by them: the rate is as it was.
            worst = max(known.facts.update, update)
            teaches = known.facts.teaches and worst <= _TWICE * high
            facts = Apart(dict(self.rates), worst, known.facts.tensors, teaches)
        else:
            most = sorted(tensors, key=lambda name: (-tensors[name], name))[:_MAX_NAMES]
            teaches = learns and update <= _TWICE * high
            facts = Apart(
                dict(self.rates),
                update,
                {n: tensors[n] for n in most if tensors[n] > high},
                teaches,
            )
        self.watch.bad(step, facts, first_step=self.since).facts = facts


def _times(facts: Apart) -> float:
    return facts.rates[facts.fast] / min(rate for rate in facts.rates.values() if rate > 0)


def finding(episode: Episode[Apart]) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    rates = listing(
        [f"{number(facts.rates[group])} (group {group})" for group in facts.rates], most=6
    )
    names = list(facts.tensors)
    most = listing([f"`{n}` ({number(facts.tensors[n])})" for n in names], most=4)
    return episode.finding(
        kind="update.ratio",
        key="groups",
        severity="info" if facts.teaches else "warning",
        title=(
            f"Parameter group {facts.fast} has a learning rate of "
            f"{number(facts.rates[facts.fast])}, {number(_times(facts))} times the lowest one, and "
            "steps are too large"
        ),
        tensors=tuple(names),
        stage="parameters",
        cause=sentences(
            f"The groups' learning rates are {rates}. A step changed the parameters by "
            f"{number(facts.update)} of their size, {number(facts.update / 1e-3)} times the usual "
            "0.001: the fast group's weights are written over, and the layers behind and before "
            "them learn for weights that are gone.",
            f"Most of it in {most}." if most else "",
            "The rate that is logged is mostly the first group's.",
        ),
        remedy=(
            f"Lower the rate of group {facts.fast} to within 10 times the others' (a new head on "
            "pretrained layers), and print `optimizer.param_groups` with names and rates: a rate "
            "that is set for one group, or for one that was added later, is not scaled with the "
            "others'."
        ),
        evidence={
            "update_ratio": facts.update,
            "rates": {str(group): rate for group, rate in facts.rates.items()},
            "times": _times(facts),
            **({"matrices": dict(facts.tensors)} if names else {}),
        },
    )
