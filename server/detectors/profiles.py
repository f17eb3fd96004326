"""What a loss is: how it is judged where it does not have to fall.

The loss of a classifier goes down, and where it does not something is wrong. The losses of two
players, of a policy, or of a surrogate do not have to, and a rule about descent is then a rule
about nothing. A run says which it is (`config={"profile": "adversarial"}`), or its project does;
where neither does, the names under which losses are logged may show.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import product

from rankscope.agent.wire import PROFILES as NAMES

DESCENT = "descent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How one sort of loss is judged.

    Attributes:
        what: the loss, in the words of a sentence.
        without: kinds that say nothing about such a loss -> why not.
        lenient: kinds that are information at most.
        logged: names of series, sets of which show the profile: one of each set is there.
    """

    what: str
    without: Mapping[str, str] = field(default_factory=dict)
    lenient: frozenset[str] = frozenset()
    logged: tuple[tuple[frozenset[str], ...], ...] = ()


def _losses_of(*players: str) -> frozenset[str]:
    """How the loss of one of several is called: `loss_g`, `g_loss`, `loss/g`, `g/loss`."""
    return frozenset(
        text
        for name, joint in product(players, "_/")
        for text in (f"loss{joint}{name}", f"{name}{joint}loss")
    )


_GAME = "each player's loss rises where the other one learns"
_VALUE = "its value is no measure of what was learned"
_SURROGATE = {
    "baseline.loss": _VALUE,
    "loss.diverging": _VALUE,
    "loss.plateau": _VALUE,
    "loss.oscillating": _VALUE,
    "accuracy.stalled": _VALUE,
    "accuracy.mismatch": _VALUE,
    "generalization.gap": _VALUE,
    "lr.too_low": _VALUE,
    "gradient.vanishing": _VALUE,
    "data.outlier": _VALUE,
}
_NOISY = frozenset(
    {
        *("loss.spike", "lr.too_high", "lr.batch_mismatch"),
        *("gradient.oscillating", "gradient.exploding"),
    }
)

PROFILES: Mapping[str, Profile] = {
    DESCENT: Profile(what="a loss that has to fall"),
    "adversarial": Profile(
        what="the losses of players against each other",
        without={
            "baseline.loss": _GAME,
            "loss.diverging": _GAME,
            "loss.plateau": "at the equilibrium of a game no loss falls",
            "accuracy.stalled": "a discriminator that is right half of the time is what is wanted",
            "accuracy.mismatch": _GAME,
            "generalization.gap": _GAME,
            "lr.too_low": "at the equilibrium of a game no loss falls",
            "gradient.vanishing": "at the equilibrium of a game no loss falls",
        },
        lenient=_NOISY | {"loss.oscillating"},
        logged=(
            (
                _losses_of("g", "gen", "generator"),
                _losses_of("d", "disc", "discriminator", "critic"),
            ),
        ),
    ),
    "reinforcement": Profile(
        what="the surrogate loss of a policy",
        without=_SURROGATE,
        # Returns that grow make the gradients of a value function grow with them.
        lenient=_NOISY | {"clipping.saturated"},
        # CleanRL, Stable-Baselines3, Spinning Up; `q` and `qf` are the critics of off-policy ones.
        logged=(
            (
                _losses_of("policy", "actor", "pi", "policy_gradient", "pg"),
                _losses_of("value", "critic", "v", "vf", "q", "qf", "qf1", "q1"),
            ),
        ),
    ),
    "surrogate": Profile(
        what="a loss whose gradient counts and whose value does not",
        without=_SURROGATE,
        lenient=_NOISY,
    ),
    "contrastive": Profile(
        what="a loss among the samples of a batch, whose level goes with the batch's size",
        without={
            "generalization.gap": "batches of evaluation are of another size, and so is the loss",
        },
        lenient=frozenset(
            {
                *("loss.diverging", "loss.plateau", "accuracy.stalled", "accuracy.mismatch"),
                *("lr.too_low", "gradient.vanishing"),
            }
        ),
    ),
}
assert tuple(PROFILES) == NAMES

# How the keys of findings begin that go by a goal which the user logs (a reward, a score), and not
# by the loss: whatever that is, they hold.
OWN_GOAL = "goal:"

# Kinds and keys of findings that no game makes right: each player learns by its gradients. A policy
# has none until its first reward.
OF_ANY_PLAYER = frozenset({("gradient.vanishing", "zero")})

# What ranks report where another optimizer of their process steps in turns with theirs, each on a
# backward pass of its own: players of a game, or parts of a training with goals of their own.
TURNS = "optimizers.turns"
# Then these are information at most, where no profile is declared. `loss.diverging` judges for
# itself how far the loss of a player may rise.
IN_TURNS: frozenset[str] = (
    frozenset(PROFILES["adversarial"].without) | PROFILES["adversarial"].lenient
) - {"loss.diverging"}

# What a rank says at attach of libraries of environments that its process has loaded. A trainer
# with one nearly always learns from rewards: its loss need not fall, and returns that grow make
# losses and gradients of a value function grow with them. It may have been loaded for nothing, so
# these are still reported, as information, where no profile is declared.
ENVIRONMENTS = "environments"
FROM_REWARDS: frozenset[str] = (
    frozenset(PROFILES["reinforcement"].without) | PROFILES["reinforcement"].lenient
)

# Last parts of the names of series that somebody may log, which indicate a profile.
_LOGGED: frozenset[str] = frozenset(
    name
    for profile in PROFILES.values()
    for sets in profile.logged
    for names in sets
    for name in names
)


# The series among which they are, as patterns.
LOGGED: frozenset[str] = frozenset({"*loss*", "*Loss*"})


def plain(name: str) -> str | None:
    """What a name of a series indicates, without the groups it is in; None if nothing.

    `losses/policy_loss`, `train/policy_loss` and `Policy_Loss` are one.
    """
    parts = name.lower().split("/")
    # `loss/g` has a stroke of its own: two parts before one.
    for kept in ("/".join(parts[-2:]), parts[-1]):
        if kept in _LOGGED:
            return kept
    return None


def recognised(seen: Collection[str]) -> str | None:
    """The profile that the names of a run's series indicate, if any."""
    there = {name for name in map(plain, seen) if name is not None}
    if there:
        for name, profile in PROFILES.items():
            if any(all(there & names for names in sets) for sets in profile.logged):
                return name
    return None
