"""Ranks that step by far less than the others do: a stage of a pipeline that hardly trains."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.by_rank import ByRank
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.wording import agree, number, ranks
from rankscope.server.window import Float64, Int64, Series, Window

_UPDATE, _RATE = "update_ratio", "lr"
# Of the other ranks' rate and update, below which a rank hardly trains beside them. Rates that are
# graded layer by layer (0.75 from one to the next) come to a thirtieth over twelve, and pretrained
# layers have a hundredth of what the rest has.
_RATE_SHARE, _UPDATE_SHARE = 1 / 300, 1 / 50
# Sampled updates in a row at which it is so: what lasts for so many is no warm-up of a part.
_IN_A_ROW = 64


@dataclass(frozen=True, slots=True)
class Hardly:
    """Ranks that hardly train, with the largest of their rates and updates, and the others'."""

    ranks: tuple[int, ...]
    rate: float
    usual_rate: float
    update: float
    usual_update: float


@dataclass(slots=True)
class SlowRanks(Condition[Hardly]):
    """Follows the rates and updates of ranks, whatever parts of a model they hold.

    Attributes:
        ranks: the latest `rate` and `update` of each, and how many sampled updates in a row were
            far below the others' (`low`), the first of them at `since`.
    """

    ranks: ByRank = field(
        default_factory=lambda: ByRank({"rate": np.nan, "update": np.nan, "low": 0, "since": 0})
    )
    watch: Watch[Hardly] = field(default_factory=lambda: Watch(clear_after=_IN_A_ROW))

    def take(self, window: Window) -> None:
        """Goes through the sampled updates of a window."""
        nothing = np.zeros((len(window.ranks), len(window.steps)))
        updates, rates = (
            window.series.get(name, Series(nothing, nothing > 0)) for name in (_UPDATE, _RATE)
        )
        known = self.ranks
        rows = known.rows(window.ranks)
        for column in np.flatnonzero((updates.present | rates.present).any(axis=0)).tolist():
            changed, sampled = rates.present[:, column], updates.present[:, column]
            known["rate"][rows[changed]] = rates.values[changed, column]
            known["update"][rows[sampled]] = updates.values[sampled, column]
            if sampled.any():
                self._judge(int(window.steps[column]), rows[sampled])

    def _judge(self, step: int, sampled: Int64) -> None:
        known = self.ranks
        known.sampled[sampled] = step
        there = known.there(step)
        # Of two, the larger is the usual one.
        usual_rate = _upper_median(known["rate"][there])
        usual_update = _upper_median(known["update"][there])
        updates, now = known["update"], np.isin(np.arange(len(there)), sampled)
        low = now & (updates > 0) & (updates < _UPDATE_SHARE * usual_update)
        low &= known["rate"] < _RATE_SHARE * usual_rate
        known["since"][low & (known["low"] == 0)] = step
        known["low"][low] += 1
        known["low"][now & ~low] = 0
        found = there & (known["low"] >= _IN_A_ROW)
        if not found.any():
            self.watch.good(step)
            return
        facts = Hardly(
            tuple(known.ranks[found].tolist()),
            float(known["rate"][found].max()),
            usual_rate,
            float(updates[found].max()),
            usual_update,
        )
        self.watch.bad(step, facts, first_step=int(known["since"][found].min())).facts = facts

    def finding(self, episode: Episode[Hardly]) -> Finding:
        """What is reported of an episode."""
        facts, several = episode.facts, len(episode.facts.ranks)
        who = ranks(facts.ranks)
        return episode.finding(
            kind="lr.too_low",
            key="ranks",
            severity="warning",
            title=f"{who.capitalize()} hardly {agree(several, 'trains')}: the learning rate is "
            f"{number(facts.rate)} there, and {number(facts.usual_rate)} on other ranks",
            ranks=facts.ranks,
            stage="hyperparameters",
            cause=(
                f"Since step {episode.first_step} a step has changed the parameters of {who} by "
                f"{number(facts.update)} of their size at most, where it is "
                f"{number(facts.usual_update)} on other ranks. What {who} "
                f"{agree(several, 'holds')} (a stage of a pipeline, a part of the model) stays "
                "almost as it was, and the others learn around it."
            ),
            remedy=(
                f"Print the parameter groups of {who} and of another rank: a factor that was "
                "applied twice, a unit or a default of another script, a schedule that is called "
                f"at other steps there. Where {who} {agree(several, 'is')} to be kept almost as "
                "it is (pretrained layers), silence this alert."
            ),
            evidence={
                "lr": facts.rate,
                "lr_of_others": facts.usual_rate,
                "update_ratio": facts.update,
                "update_ratio_of_others": facts.usual_update,
            },
        )


def _upper_median(values: Float64) -> float:
    known = np.sort(values[np.isfinite(values)])
    return float(known[len(known) // 2]) if len(known) else float("nan")
