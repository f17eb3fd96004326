"""Parameters that a decay holds down: gradients ask for the same again and again, in vain. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.statistics import BLOCK, mann_kendall
from rankscope.server.detectors.mechanisms.wording import number, percent
from rankscope.server.detectors.policy import Number, Observations, Policy, Share, Sigmas, Times

_DECAY = "hyperparameters/0/weight_decay"
# Adam divides a decay that is part of the gradient by the gradient's size: only of the other sort
# a step takes the learning rate times as much off.
_ADAM, _DECOUPLED = "hyperparameters/0/betas.0", "hyperparameters/0/decoupled_weight_decay"
# A setting that no optimizer has but SGD, whose steps are the gradient with its decay, undivided.
_SGD = "hyperparameters/0/nesterov"
SERIES = (
    *("weight_norm", "loss", "grad_cosine", "grad_norm", "lr", "update_ratio"),
    *(_DECAY, _ADAM, _DECOUPLED, _SGD),
)
# Observations whose median is the size of gradients at the start, and that of the parameters.
_FIRST, _AROUND = 10, 5
# Steps within which a decay has to take something off, for it to be what holds parameters down: as
# many as there are losses that do not fall. A tenth would take ten times as long as they show.
_WITHIN, _SOMETHING = 100, 0.1
# What a step takes off from which on nothing is remembered for 200 steps: rates times decays that
# are in use come to 1e-5 to 1e-3 (0.1 times 5e-4 of SGD, 1e-3 times 0.1 of AdamW).
_FORGETS, _IN_USE = 5e-3, 1e-3
# Median update, relative to what is left of the parameters, from which on the loss suffers from it:
# healthy medians reach 7e-3.
_LARGE = 1e-2
# At 1 a decay takes back all that gradients add, and parameters stand still: what is twice that is
# no decay that all of them have.
_NOT_ALL = 2.0


@dataclass(frozen=True, slots=True)
class HeldPolicy(Policy):
    """Thresholds of `update.drift` for parameters that are held down.

    Attributes:
        shrunk: norm of the parameters over the largest so far, below which something takes more off
            them than gradients do.
        agree: median cosine of the gradients of consecutive samples from which on they ask for the
            same. At a minimum it is 0: there they are noise.
        cosines: number of them among the losses that are judged: at a minimum the median of so many
            estimates, each with an error of up to 0.125, comes to 0.3 at 5 standard errors.
        asks: their size over that at the start, from which on it matters: a usual decay balances
            gradients of some hundredths of it.
        flat: losses that do not fall, and the gradients beside them.
        falling: Mann-Kendall Z below 0 from which on they may still fall.
        falls: the same from which on they do: one of 160 flat courses reaches it, and that ends it.
        drowned: the same of Adam, which divides both by their size, from which on its steps follow
            the decay and not the gradients, whatever is left of the parameters: three quarters of
            what it divides is the decay.
        takes: what a decay takes off beside what gradients agree on, from which on it holds the
            parameters down while the loss still falls.
        looks: examinations in a row, one every 10 observations.
    """

    shrunk: Share = 0.5
    agree: Number = 0.3
    cosines: Observations = 8
    asks: Share = 0.1
    flat: Observations = 100
    falling: Sigmas = 1.0
    falls: Sigmas = 2.5
    drowned: Times = 3.0
    takes: Share = 0.5
    looks: Observations = 3


@dataclass(slots=True)
class Held:
    """What was seen: norms at most and now, gradients and their agreement, the loss, the rate.

    Attributes:
        decay: learning rate times weight decay, what a step takes off; NaN where not known.
        takes: weight decay times norm, over what gradients agree on; NaN where it does not explain
            what holds the parameters down, or is not known, as with Adam.
        drowns: weight decay times norm, over the size of the gradient, where Adam divides their sum
            by its size, and so follows the decay; NaN where it does not.
        forgets: whether the decay alone takes so much off that nothing is kept for long.
    """

    most: float
    now: float
    asks: float
    cosine: float
    loss: float
    decay: float
    takes: float
    drowns: float = math.nan
    forgets: bool = False


@dataclass(slots=True)
class HeldState:
    """What is remembered of the last observations.

    Attributes:
        plain: the optimizer is SGD.
        coupled: the decay is part of the gradient, for all that is known; `joined`: it is known.
    """

    policy: HeldPolicy
    watch: Watch[Held] = field(default_factory=lambda: Watch(clear_after=50))
    first: list[float] = field(default_factory=list)
    most: float = 0.0
    counted: int = 0
    in_a_row: int = 0
    rate: float = math.nan
    decay: float = math.nan
    coupled: bool = False
    adam: bool = False
    plain: bool = False
    joined: bool = False
    _losses: deque[tuple[int, float]] = field(init=False)
    _cosines: deque[tuple[int, float]] = field(init=False)
    _norms: deque[float] = field(init=False)
    _decays: deque[float] = field(init=False)
    _updates: deque[float] = field(init=False)
    _sizes: deque[float] = field(default_factory=lambda: deque(maxlen=_AROUND))

    def __post_init__(self) -> None:
        half = self.policy.flat // 2
        self._losses = deque(maxlen=self.policy.flat)
        self._decays = deque(maxlen=self.policy.flat)
        self._cosines, self._norms = deque(maxlen=half), deque(maxlen=half)
        self._updates = deque(maxlen=half)

    def push(self, step: int, row: dict[str, float]) -> None:
        """Takes what was posted of a step, by series."""
        self.rate, self.decay = row.get("lr", self.rate), row.get(_DECAY, self.decay)
        if _ADAM in row or _DECOUPLED in row:
            self.coupled = not row.get(_DECOUPLED, 0.0)
            self.joined = row.get(_DECOUPLED, 1.0) == 0.0
        self.adam |= _ADAM in row
        self.plain |= _SGD in row
        for name, kept in (
            ("weight_norm", self._sizes),
            ("grad_norm", self._norms),
            ("update_ratio", self._updates),
        ):
            if math.isfinite(row.get(name, math.nan)):
                kept.append(row[name])
        if math.isfinite(row.get("grad_cosine", math.nan)):
            self._cosines.append((step, row["grad_cosine"]))
        if len(self._sizes) == _AROUND:
            self.most = max(self.most, median(self._sizes))
        if len(self.first) < _FIRST and math.isfinite(row.get("grad_norm", math.nan)):
            self.first.append(row["grad_norm"])
        if not math.isfinite(row.get("loss", math.nan)):
            return
        self._losses.append((step, row["loss"]))
        taken = self.plain or (self.adam and not self.coupled)
        self._decays.append(self.rate * self.decay if taken else math.nan)
        self.counted += 1
        if len(self._losses) == self.policy.flat and self.counted % BLOCK == 0:
            self._judge(step)

    def _judge(self, step: int) -> None:
        policy, now = self.policy, median(self._sizes)
        cosines = [cosine for at, cosine in self._cosines if at >= self._losses[0][0]]
        cosine = median(cosines)
        size, first = median(self._norms), median(self.first)
        asks = size / first if first > 0 else math.nan
        drowns = self.decay * now / size if self.adam and self.joined and size > 0 else math.nan
        drowned = drowns >= policy.drowned and now < self.most
        held = (
            len(cosines) >= policy.cosines
            and (now < policy.shrunk * self.most or drowned)
            and cosine >= policy.agree
            and asks >= policy.asks
        )
        losses = [loss for _, loss in self._losses]
        # Once it is open, a rate that decays to what others have ends it, and no half of it.
        episode = self.watch.open(step)
        begins = episode is None or not episode.facts.forgets
        forgets = median(self._decays) >= (_FORGETS if begins else _IN_USE)
        forgets &= now < policy.shrunk * self.most
        forgets &= not begins or median(self._updates) >= _LARGE
        takes = math.nan
        if held and not self.adam:
            # What gradients share of their direction is the root of their cosine of their size.
            takes = self.decay * now / (size * math.sqrt(cosine))
        strong = policy.takes <= takes <= _NOT_ALL
        if held and not strong:
            blocks = [median(losses[at : at + BLOCK]) for at in range(0, len(losses), BLOCK)]
            known = self.watch.open(step) is not None
            held = mann_kendall(blocks) > -(policy.falls if known else policy.falling)
        if not (held or forgets):
            self.in_a_row = 0
            self.watch.good(step)
            return
        self.in_a_row += 1
        if self.in_a_row < policy.looks:
            return
        decay = math.nan if self.coupled else self.rate * self.decay
        if not held:
            decay = max(median(self._decays), episode.facts.decay if episode is not None else 0.0)
        takes = takes if strong else math.nan
        facts = Held(self.most, now, asks, cosine, median(losses[-BLOCK:]), decay, takes)
        facts.drowns = drowns if held and drowned else math.nan
        facts.forgets = not held
        since = self._losses[0][0]
        self.watch.bad(step, facts, first_step=since).facts = facts


def finding(episode: Episode[Held]) -> Finding:
    """What is reported of it."""
    facts = episode.facts
    strong = math.isfinite(facts.takes)
    if facts.forgets:
        return _forgets(episode)
    known = math.isfinite(facts.decay) and facts.decay > 0
    drowns = math.isfinite(facts.drowns)
    if drowns:
        takes = (
            "The weight decay is part of the gradient that Adam divides by its size, and "
            f"{number(facts.drowns)} times as large as the rest: the steps shrink the parameters, "
            "and what the loss asks for drowns in it."
        )
    elif known and facts.decay * _WITHIN < _SOMETHING:
        takes = (
            f"It is not the weight decay: with the learning rate that takes {number(facts.decay)} "
            "off a step. Parameters are clamped, projected, scaled or averaged with others again "
            "and again."
        )
    elif known:
        takes = (
            f"The learning rate times the weight decay is {number(facts.decay)}: a step takes that "
            f"share off every parameter, and what was learned {number(1 / facts.decay)} steps ago "
            "has faded to a third."
        )
    else:
        takes = (
            "The weight decay is stronger than what the gradients add, or parameters are clamped, "
            "projected or averaged with older ones at every step."
        )
    return episode.finding(
        kind="update.drift",
        key="held",
        severity="warning",
        title=(
            f"The parameters have shrunk from {number(facts.most)} to {number(facts.now)}, and "
            + (
                "the weight decay takes back most of what gradients add"
                if strong
                else "gradients no longer lower the loss"
            )
        ),
        stage="parameters",
        cause=(
            f"Gradients of consecutive batches still agree (cosine {number(facts.cosine)}), with "
            f"{number(facts.asks)} of their size at the start: there is something to be learned. "
            + (
                f"The weight decay takes {percent(facts.takes)} of it back at each step, and the "
                f"loss, now {number(facts.loss)}, falls by what is left alone"
                if strong
                else f"The loss stays at {number(facts.loss)} all the same: each step takes back "
                "what gradients add"
            )
            + f". {takes}"
        ),
        remedy=(
            "Divide the weight decay by 10 or more (AdamW takes it times the learning rate off "
            "every parameter: 0.01 to 0.1 is usual), leave it out for biases and normalisations, "
            "and look for what else writes the parameters at every step."
        ),
        evidence={
            "most": facts.most,
            "now": facts.now,
            "gradient": facts.asks,
            "cosine": facts.cosine,
            "loss": facts.loss,
            **({"decay": facts.decay} if known else {}),
            **({"takes": facts.takes} if strong else {}),
            **({"drowns": facts.drowns} if drowns else {}),
        },
    )


def _forgets(episode: Episode[Held]) -> Finding:
    facts = episode.facts
    return episode.finding(
        kind="update.drift",
        key="held",
        severity="warning",
        title=(
            f"The parameters have shrunk from {number(facts.most)} to {number(facts.now)}: the "
            f"weight decay takes {percent(facts.decay)} off at each step"
        ),
        stage="parameters",
        cause=(
            f"The learning rate times the weight decay is {number(facts.decay)}, where 1e-5 to "
            f"1e-3 is usual: what was learned {number(1 / facts.decay)} steps ago has faded to a "
            "third. The model holds only what the latest batches say, and steps are large beside "
            "what is left of the parameters."
        ),
        remedy=(
            "Divide the weight decay by 100 or more (SGD: 1e-4 to 5e-4; AdamW: 0.01 to 0.1), and "
            "leave it out for biases and normalisations."
        ),
        evidence={"most": facts.most, "now": facts.now, "decay": facts.decay},
    )
