"""What is said of a loss that leaves what it had reached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.server.detectors.loss import answers_kept
from rankscope.server.detectors.mechanisms import leaps
from rankscope.server.detectors.mechanisms.history import rate_sentence
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.leaps import Leap
from rankscope.server.detectors.mechanisms.wording import number, percent, sentences

# What answers explain of the deviance before, at the least, and since, at the most, where they have
# become worth nothing.
_SOME, _NOTHING = 0.15, 0.05
# Share of its rise that a loss loses again where it learns what a new phase brings.
_LEARNING = 0.25


@dataclass(slots=True, kw_only=True)
class Diverging(Incident):
    """A rise, as far as it is known."""

    best: float
    best_step: int
    start: float
    worst: float
    lost: float
    rise: Mapping[str, float] | None
    signed: bool
    game: bool
    rewarded: bool
    begun: bool  # it has risen since the first steps
    lr: float  # when it began; NaN where it is not known
    phase: str = ""
    latest: float = math.nan
    written: int = -1  # step before which parameters were written outside the optimizer
    kept: bool = False  # the accuracy is what it was
    leap: Leap | None = None  # no step can have made it
    worth: tuple[float, float] = (math.nan, math.nan)  # deviance explained before, and since

    @property
    def learns(self) -> bool:
        """Whether the loss falls from where the data became others."""
        return self.worst - self.latest > _LEARNING * (self.worst - self.best)


def explained(incident: Diverging, *, played: bool) -> tuple[str, str]:
    """Cause and remedy; `played`: it is one that need not fall, and has not run away."""
    if played and not incident.game:
        cause = (
            "Rewards are logged: what is learned from them need not make the loss fall. The errors "
            "of a value function grow with the returns that it is to foresee, and the loss of a "
            "policy means nothing by its value."
        )
        remedy = "Look at the rewards: nothing has to be done while they rise."
    elif played:
        cause = (
            "Another optimizer steps in turns with this one, each on a loss of its own, as the "
            "players of a game do (a generator and a discriminator): the loss of one rises "
            "where the other one learns."
        )
        remedy = (
            "Nothing, while both losses stay within bounds. If this is no game, look at what "
            f"changed around step {incident.first_step}: data, schedule, resume."
        )
    elif incident.phase:
        cause = (
            f"{incident.phase} The data have been different since then, as in the next phase "
            "of a curriculum or with a second data set, and the loss is that of another task"
            + (", which the model learns." if incident.learns else "; it does not fall.")
        )
        remedy = (
            "Nothing, if the change is meant and the loss falls. Else look at the data from "
            f"step {incident.first_step} on."
        )
    elif incident.kept:
        cause, remedy = answers_kept.CAUSE, answers_kept.REMEDY
    elif incident.leap is not None:
        cause, remedy = leaps.sentence(incident.leap), leaps.REMEDY
    elif incident.rise is not None:
        cause = sentences(
            rate_sentence(incident.rise), "Steps of that size lead away from the minimum."
        )
        remedy = (
            f"Restart from a checkpoint before step {incident.first_step} and keep the "
            f"learning rate near {number(incident.rise['lr_before'])}."
        )
    elif incident.written >= 0:
        cause = (
            f"Right before step {incident.written} the parameters were written outside the "
            "optimizer, and they are not usually: weights of an earlier step, averaged ones or "
            "new random ones were put in their place, and what had been learned is lost."
        )
        remedy = (
            f"Look at what the loop does at step {incident.written} and not at others: an "
            "initialisation that is called again, a checkpoint that is loaded, weights that "
            "an evaluation swaps in and does not swap out."
        )
    elif incident.begun:
        rate = f" (of {number(incident.lr)})" if math.isfinite(incident.lr) else ""
        cause = (
            "It has risen since the first steps: nothing was learned in this run. The learning "
            f"rate{rate} is far too high for this model and these inputs; or the loss has the "
            "wrong sign, so that steps make it larger (it is to be maximised, or the gradient is "
            "added instead of subtracted)."
        )
        remedy = (
            "Train anew with a hundredth of the learning rate. If the loss rises all the same, and "
            "more slowly, its sign is wrong, or that of the gradient: take one batch and a tiny "
            "step, after which its loss has to be lower. If it falls, raise the rate from there, "
            "and clip the gradient to limit single steps."
        )
    else:
        cause = (
            "No rise of the learning rate was seen before it. Possible causes: the "
            "learning rate is too high for this phase, the data changed (another source, "
            "other labels), the optimizer's state was lost or does not fit (resume), or "
            "the loss has the wrong sign for a part of it."
        )
        before, since = incident.worth
        if before > _SOME and since < _NOTHING:
            cause = (
                "No rise of the learning rate was seen before it. The answers explained "
                f"{percent(before)} of the targets' deviance, and are worth no more than one "
                "that is always the same since: what comes in no longer belongs to the targets "
                "(labels of other samples, an input that is cut, blanked or shuffled), or the "
                "weights were lost."
            )
        remedy = (
            f"Compare what changed around step {incident.first_step}: data, schedule, resume. "
            f"Restart from a checkpoint near step {incident.best_step}, where the loss was "
            "best, with a third of the learning rate. If this loss need not fall (a policy's, "
            "a player's, a surrogate), say so when attaching: "
            '`config={"profile": "reinforcement"}`.'
        )
    return cause, remedy
