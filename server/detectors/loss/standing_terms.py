"""Parts of the loss that are logged and never fall while the whole does. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.detectors.metric.score_names import OF_SOMETHING_ELSE, parts_of
from rankscope.server.detectors.metric.series import is_logged
from rankscope.server.detectors.profiles import OWN_GOAL
from rankscope.server.window import Window

# Parts of a name, one of which says that it is an error that is to become smaller ...
_LOWER = frozenset("loss mse mae rmse nll ce bce xent recon reconstruction".split())
# ... and those with which it may be one that need not: regularisation, players of a game, what
# comes of an evaluation, or a value that goes with something else.
_OTHER = OF_SOMETHING_ELSE | frozenset(
    "l2 spread kld kldiv commit commitment vq codebook reg regularization regularisation "
    "regularizer aux auxiliary balance balancing router z ent adv adversarial gan g d gen "
    "generator decay policy actor value q pi v pg surrogate val valid validation eval evaluation "
    "test dev holdout heldout ema avg max contrastive distill distillation kd consistency orth "
    "ortho smooth smoothness tv perplexity total latent quant quantizer embedding prior moe lb gp "
    "running epoch sum cum tokens token seconds samples".split()
)
# Observations before a part is judged, those that show how it began, and that are the latest.
_OBSERVED, _FIRST, _LATEST = 200, 10, 50
# Share of its beginning up to which it has gained or lost nothing, at any time, and that of the
# whole which has been lost since then: guessing among three classes costs 1.099, and the
# frequencies of their samples some hundredths less.
_GAINED, _FALLEN = 0.05, 0.5
# Accuracy up to which something is left to be learned, as in `PlateauPolicy.learned`.
_ACCURACY, _LOW = "accuracy", 0.6
# Parts of a run that are followed.
_MOST_SERIES = 32


@dataclass(frozen=True, slots=True)
class Stands:
    """Attributes: name, first and last level, of the whole `before` and `after`, and how many.

    `accuracy` is the latest median; NaN where there is none.
    """

    name: str
    first: float
    last: float
    before: float
    after: float
    observed: int
    accuracy: float


@dataclass(slots=True)
class _Part:
    """Sums of the first and of the latest observations, of a part and of the whole.

    Attributes:
        lowest, highest: of the means of `_LATEST` in a row.
        varies: it is no constant.
    """

    since: int
    first: list[tuple[float, float]] = field(default_factory=list)
    latest: list[tuple[float, float]] = field(default_factory=list)
    lowest: float = math.inf
    highest: float = -math.inf
    varies: bool = False
    observed: int = 0
    watch: Watch[Stands] = field(default_factory=lambda: Watch(clear_after=_LATEST))


@dataclass(slots=True)
class StandingTerms:
    """Holds what a user logs of the parts of the loss against the whole, block by block.

    Attributes:
        since: first step with a loss.
        accuracies: the latest ones.
    """

    parts: dict[str, _Part] = field(default_factory=dict)
    since: int = -1
    accuracies: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def take(self, window: Window) -> None:
        """Takes the steps at which the loss and a part of it are known."""
        names = [name for name in sorted(window.series) if _is_part(name)]
        if not names:
            return
        for step, row in together(window, "loss", _ACCURACY, *names):
            whole = row.get("loss", math.nan)
            if not math.isfinite(whole):
                continue
            self.since = step if self.since < 0 else self.since
            if math.isfinite(row.get(_ACCURACY, math.nan)):
                self.accuracies.append(row[_ACCURACY])
            # Who goes on with a trained model has parts that are learned already.
            for name in names if self.since <= 1 else ():
                value = row.get(name, math.nan)
                known = self.parts.get(name)
                if not math.isfinite(value) or (known is None and len(self.parts) == _MOST_SERIES):
                    continue
                if known is None:
                    known = self.parts[name] = _Part(step)
                self._push(name, known, step, value, whole)

    def _push(self, name: str, part: _Part, step: int, value: float, whole: float) -> None:
        part.observed += 1
        if len(part.first) < _FIRST:
            part.first.append((value, whole))
        part.latest.append((value, whole))
        if len(part.latest) < _LATEST:
            return
        last, after = (_mean(part.latest, at) for at in (0, 1))
        first, before = (_mean(part.first, at) for at in (0, 1))
        part.latest.clear()
        part.lowest = min(part.lowest, last)
        part.highest = max(part.highest, last)
        stands = first > 0 and before > 0
        stands = stands and (1 - _GAINED) * first <= part.lowest <= part.highest
        stands = stands and part.highest <= (1 + _GAINED) * first
        part.varies |= len({value for value, _ in part.first}) > 1
        stands = stands and part.varies
        if part.observed >= _OBSERVED and stands and after <= (1 - _FALLEN) * before:
            accuracy = median(self.accuracies)
            facts = Stands(name, first, last, before, after, part.observed, accuracy)
            part.watch.bad(step, facts, first_step=part.since).facts = facts
        else:
            part.watch.good(step)

    def findings(self, last_step: int) -> Iterator[Finding]:
        """What is reported of all parts."""
        for part in self.parts.values():
            yield from map(_finding, part.watch.take(last_step))


def _mean(values: list[tuple[float, float]], at: int) -> float:
    return sum(value[at] for value in values) / len(values)


def _is_part(name: str) -> bool:
    """Whether a series is by its name a part of the loss that is to become smaller."""
    parts = parts_of(name)
    return is_logged(name) and bool(parts & _LOWER) and not parts & _OTHER


def _finding(episode: Episode[Stands]) -> Finding:
    facts = episode.facts
    return episode.finding(
        kind="loss.plateau",
        key=f"{OWN_GOAL}{facts.name}",
        # A part that was learned before, or is at its end from the start, stays as well.
        severity="warning" if facts.accuracy <= _LOW else "info",
        title=f"`{facts.name}` stays near {number(facts.last)} while the loss falls",
        cause=(
            f"It began at {number(facts.first)}, and after {count(facts.observed, 'observation')} "
            f"it is {number(facts.last)}; the loss as a whole has come from {number(facts.before)} "
            f"to {number(facts.after)}. Unless it was learned before, this part is not learned: it "
            "weighs too little beside the others (a weight, or targets of another scale), what it "
            "is computed from is cut off from most of the model (`detach()`, a head that alone is "
            "trained), or its targets do not belong to the inputs."
        ),
        remedy=(
            f"Compare the gradient norms that the parts of the loss have at one batch, and bring "
            f"that of `{facts.name}` near the others'. Then train with `{facts.name}` alone: if "
            "it stays all the same, look at its head and at its targets."
        ),
        evidence={
            "series": facts.name,
            "first": facts.first,
            "last": facts.last,
            "loss_before": facts.before,
            "loss_after": facts.after,
            "observed": facts.observed,
            **({"accuracy": facts.accuracy} if math.isfinite(facts.accuracy) else {}),
        },
    )
