"""Ranks that step by far less than the others do: a stage of a pipeline that hardly trains."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.wording import agree, number, ranks
from rankscope.server.window import Bool, Float64, Int64, Series, Window

_UPDATE, _RATE = "update_ratio", "lr"
# Of the other ranks' rate and update, below which a rank hardly trains beside them. Rates that are
# graded layer by layer (0.75 from one to the next) come to a thirtieth over twelve, and pretrained
# layers have a hundredth of what the rest has.
_RATE_SHARE, _UPDATE_SHARE = 1 / 300, 1 / 50
# Steps after its last sample for which a rank counts as there: agents sample one in 4,096 at least.
_LEFT = 8192
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
        known: ranks, ascending, int64 [R]; `rates`, `updates`: their latest, float64 [R].
        low: sampled updates in a row at which one was far below the others', int64 [R]; the first
            of these was at `since`; `latest`: the newest sample.
    """

    known: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    rates: Float64 = field(default_factory=lambda: np.empty(0))
    updates: Float64 = field(default_factory=lambda: np.empty(0))
    low: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    since: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    latest: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    watch: Watch[Hardly] = field(default_factory=lambda: Watch(clear_after=_IN_A_ROW))

    def take(self, window: Window) -> None:
        """Goes through the sampled updates of a window."""
        nothing = np.zeros((len(window.ranks), len(window.steps)))
        updates, rates = (
            window.series.get(name, Series(nothing, nothing > 0)) for name in (_UPDATE, _RATE)
        )
        if not np.array_equal(self.known, window.ranks):
            self._meet(window.ranks)
        for column in np.flatnonzero((updates.present | rates.present).any(axis=0)).tolist():
            changed, sampled = rates.present[:, column], updates.present[:, column]
            self.rates[changed] = rates.values[changed, column]
            self.updates[sampled] = updates.values[sampled, column]
            if sampled.any():
                self._judge(int(window.steps[column]), sampled)

    def _judge(self, step: int, sampled: Bool) -> None:
        # Of two, the larger is the usual one.
        self.latest[sampled] = step
        there = step - self.latest <= _LEFT
        usual_rate = _upper_median(self.rates[there])
        usual_update = _upper_median(self.updates[there])
        low = sampled & (self.updates > 0) & (self.updates < _UPDATE_SHARE * usual_update)
        low &= self.rates < _RATE_SHARE * usual_rate
        self.since[low & (self.low == 0)] = step
        self.low[low] += 1
        self.low[sampled & ~low] = 0
        found = there & (self.low >= _IN_A_ROW)
        if not found.any():
            self.watch.good(step)
            return
        facts = Hardly(
            tuple(self.known[found].tolist()),
            float(self.rates[found].max()),
            usual_rate,
            float(self.updates[found].max()),
            usual_update,
        )
        self.watch.bad(step, facts, first_step=int(self.since[found].min())).facts = facts

    def _meet(self, here: Int64) -> None:
        """Who is there from now on, with what is known of them."""
        places = np.searchsorted(self.known, here)
        places = np.minimum(places, max(len(self.known) - 1, 0))
        old = self.known[places] == here if len(self.known) else np.zeros(len(here), bool)
        for name, empty in (
            ("rates", np.nan),
            ("updates", np.nan),
            ("low", 0),
            ("since", 0),
            ("latest", 0),
        ):
            held = getattr(self, name)
            made = np.full(len(here), empty, held.dtype)
            made[old] = held[places[old]]
            setattr(self, name, made)
        self.known = here.copy()

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
