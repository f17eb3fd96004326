"""Units that do nothing: what is known of them, and what is reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.wording import count, listing, number, percent

# Tensors or modules that a finding names.
MAX_NAMES = 64


@dataclass(slots=True)
class Idle:
    """Modules whose units do nothing: the share of each, and what class it is.

    Attributes:
        update, update_step: largest update before it, relative to the parameters, and its step.
        spread: scatter of the samples of a batch, relative to their size, the largest so far.
        learns: whether the training learns on, or may do so yet.
        explains: whether it would be for these units, if nothing were learned.
    """

    what: str
    shares: dict[str, float] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    update: float = 0.0
    update_step: int = -1
    spread: float = math.inf
    learns: bool = False
    explains: bool = True


def idle_finding(
    episode: Episode[Idle], *, nearly_all: float, alike: float, overwriting: float
) -> Finding:
    """What is reported of units that do nothing; the numbers are those of `DeadPolicy`."""
    facts, step = episode.facts, episode.first_step
    worst = sorted(facts.shares, key=lambda name: (-facts.shares[name], name))
    share = facts.shares[worst[0]]
    dead = facts.what == "dead"
    serious = "info" if facts.learns else "warning"
    if share >= nearly_all:
        serious = "critical"
    more = f" and {count(len(worst) - 1, 'module')} more" if len(worst) > 1 else ""
    each = listing([f"`{n}` {percent(facts.shares[n])}" for n in worst], most=6)
    if facts.spread < alike:
        cause = (
            f"All samples of a batch are alike (they scatter by {number(facts.spread)} of their "
            f"size), so each unit is {facts.what} for all of them or for none: {each}."
        )
        remedy = (
            "Look at what makes the inputs: a normalisation that divides by nothing, a column that "
            "is read again and again, a buffer that is never filled."
        )
    elif dead:
        large = facts.update > overwriting
        cause = (
            f"Since step {step} at the latest these units were 0 for hundreds of consecutive "
            f"samples: {each}. A ReLU that is never active passes no gradient back, and so "
            "usually stays inactive. "
            + (
                f"The step of {facts.update_step} changed the parameters by "
                f"{percent(facts.update)} of their size: it was too large (a learning rate too "
                "high, or without a warm-up, a loss that is a sum)."
                if large
                else "Usual causes are one step that was too large (a learning rate without "
                "warm-up, an odd batch) or biases far below 0."
            )
        )
        if facts.learns:
            cause += " The loss is no worse for it: the rest of the network learns without them."
        first = "Nothing, if the loss is as low as it should be; else restart"
        remedy = (
            f"{first if facts.learns else 'Restart'} from before it with a lower learning rate or "
            "a warm-up, and clip gradients; begin with biases of 0 and He's weights; or put "
            "LeakyReLU or GELU, or a normalisation before, in the place of ReLU."
        )
    else:
        cause = (
            f"Since step {step} at the latest these units stood within 1 % of the ends of their "
            f"range for hundreds of consecutive samples: {each}. There the slope is "
            "negligible, and so is the gradient that they pass back."
        )
        remedy = (
            "Normalise what goes into them (layer or batch normalisation, inputs of unit "
            "variance), begin with smaller weights, or lower the learning rate. Nothing, where "
            "they are gates that are to be open or shut."
        )
    return episode.finding(
        kind="layer.dead",
        key=f"units:{facts.what}",
        severity=serious if dead else "info",
        title=f"{percent(share)} of the units of `{worst[0]}`{more} are {facts.what}",
        tensors=tuple(worst[:MAX_NAMES]),
        cause=cause,
        remedy=remedy,
        evidence={
            "shares": _plain(facts.shares, worst),
            "largest_update": facts.update,
            **({} if facts.explains else {"enough_left": True}),
            **({"input_spread": facts.spread} if math.isfinite(facts.spread) else {}),
        },
    )


def _plain(shares: Mapping[str, float], order: list[str]) -> dict[str, float]:
    return {name: shares[name] for name in order[:MAX_NAMES]}
