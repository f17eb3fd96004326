"""A fault, drawn: where, what is done there, to whom, when, and how much. No torch in here."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass

from tests.lab.drawn.recipe import Recipe

# Site -> what can be done there.
SITES: Mapping[str, tuple[str, ...]] = {
    "batch": ("scale", "noise", "zero", "sign", "nonfinite", "stale", "permuted", "others"),
    "labels": ("permuted", "constant", "random", "shifted"),
    "activations": ("scale", "noise", "zero", "nonfinite"),
    "loss": ("scale", "sign", "nonfinite"),
    "local_gradient": ("scale", "noise", "zero", "sign", "nonfinite", "stale"),
    "reduced_gradient": ("scale", "noise", "zero", "sign", "bit", "nonfinite", "stale", "swapped"),
    "clipped_gradient": ("scale", "noise", "bit", "stale"),
    "optimizer_state": ("scale", "noise", "zero", "stale"),
    "hyperparameters": ("scale", "zero"),
    "parameters": ("scale", "noise", "zero", "bit", "nonfinite", "stale", "permuted"),
    "buffers": ("scale", "noise", "zero"),
    "time": ("data", "compute"),
    "process": ("killed", "raises", "hangs"),
    "loop": ("no_zero_grad", "no_step", "evaluation_mode", "no_reduction"),
}
_WEIGHTS = {"parameters": 2, "reduced_gradient": 2, "local_gradient": 2, "batch": 2, "process": 0.7}
TIMINGS = ("once", "from", "every", "sometimes", "while", "start")
# What is done once at these sites stays; elsewhere it is gone with the step.
_STAYS = ("parameters", "optimizer_state", "buffers")
_WHOLE_JOB = ("hyperparameters", "loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with a training.

    Attributes:
        ranks: where.
        extent: `all` tensors, `one`, a `slice` of one, or one `element`.
        tensor: which one, as a share of their number.
        timing: one of `TIMINGS`.
        onset: first step at which it acts.
        period: of `every`; of `while` how many steps.
        size: factor of `scale` and `time`, share of the standard deviation of `noise`.
        seed: of what is drawn while it trains.
    """

    site: str
    transform: str
    ranks: tuple[int, ...]
    extent: str
    tensor: float
    timing: str
    onset: int
    period: int
    size: float
    seed: int

    @property
    def family(self) -> str:
        """By which the lab is split: what is done, and where."""
        return f"{self.site}/{self.transform}"

    def acts(self, step: int) -> bool:
        """Whether it acts at a step."""
        if step < self.onset:
            return False
        since = step - self.onset
        match self.timing:
            case "once":
                return since == 0
            case "every":
                return since % self.period == 0
            case "sometimes":
                return since == 0 or random.Random(f"{self.seed}/{step}").random() < 0.05
            case "while":
                return since < self.period
        return True


def draw_fault(number: int, recipe: Recipe) -> Fault:
    """The fault of a number, of those that its training can have."""
    drawn = random.Random(f"fault/{number}")
    sites = [site for site in SITES if _possible(site, recipe)]
    site = drawn.choices(sites, [_WEIGHTS.get(site, 1) for site in sites])[0]
    allowed = [t for t in SITES[site] if _allowed(site, t, recipe)]
    transform = drawn.choice(allowed)
    world = recipe.world
    one = (drawn.randrange(world),)
    everybody = tuple(range(world))
    some = tuple(sorted(drawn.sample(everybody, max(world // 2, 1))))
    ranks = drawn.choices((one, some, everybody), (3, 1, 2))[0]
    if site == "process" or transform == "others":
        ranks = one
    if transform == "no_reduction":
        ranks = everybody  # one that does not take part leaves the others waiting
    timing = drawn.choices(TIMINGS, (2, 3, 2, 1, 1, 1))[0]
    if site in _STAYS and transform not in ("noise", "bit"):
        timing = drawn.choice(("once", "from", "every"))
    if site in _WHOLE_JOB or transform in ("constant", "shifted"):
        timing = drawn.choice(("from", "start"))
    if site == "process":
        timing = "once"
    middle = recipe.steps * 2 // 5 + int(drawn.random() * recipe.steps / 4)
    return Fault(
        site=site,
        transform=transform,
        ranks=ranks,
        extent=drawn.choice(("all", "all", "one", "slice", "element")),
        tensor=drawn.random(),
        timing=timing,
        onset=0 if timing == "start" else middle,
        period=drawn.choice((2, 3, 4, 7, 10)) if timing == "every" else drawn.choice((3, 10, 25)),
        size=_size(site, transform, drawn),
        seed=number,
    )


def part_of(family: str) -> str:
    """`tuning` or `judging`: decided once, by hash; of a fault's family or a healthy one's."""
    return "judging" if hashlib.sha256(family.encode()).digest()[0] & 1 else "tuning"


def _possible(site: str, recipe: Recipe) -> bool:
    if site == "buffers":
        return recipe.model == "cnn"
    if site == "labels":
        return recipe.model not in ("autoencoder", "regression")
    if site == "clipped_gradient":
        return recipe.clip > 0
    if site == "reduced_gradient":
        return recipe.scheme in ("ddp", "manual", "accumulated")
    if site == "optimizer_state":
        return recipe.optimizer != "sgd"
    if site == "local_gradient":
        return recipe.scheme != "fsdp"
    return True


def _allowed(site: str, transform: str, recipe: Recipe) -> bool:
    if transform == "others":
        return recipe.world > 1
    if transform == "no_reduction":
        return recipe.scheme in ("ddp", "manual", "accumulated")
    if site == "batch" and recipe.model == "transformer":
        # Letters are no quantities.
        return transform in ("stale", "permuted", "others")
    if site == "process" and transform == "hangs":
        return recipe.world > 1
    return not (site == "batch" and transform == "permuted" and recipe.model == "autoencoder")


def _size(site: str, transform: str, drawn: random.Random) -> float:
    if site == "time":
        return drawn.choice((2.0, 4.0, 10.0))
    if transform == "noise":
        low = 1e-5 if site in ("parameters", "reduced_gradient", "clipped_gradient") else 0.1
        return float(low * (10 / low) ** drawn.random())
    factor = float(1.1 * (1000 / 1.1) ** drawn.random())
    return factor if drawn.random() < 0.7 else 1 / factor
