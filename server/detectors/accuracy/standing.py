"""Low scores of answers that do not move from evaluation to evaluation. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.server.detectors.accuracy.sinking import Evaluated, SinkingPolicy
from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.detectors.policy import Observations, Share, Steps
from rankscope.server.detectors.profiles import OWN_GOAL

# Times the lowest of some scores, above which the highest has moved.
_MOVED = 1.15


@dataclass(frozen=True, slots=True)
class StandingPolicy(SinkingPolicy):
    """Thresholds of `accuracy.stalled` for evaluations that stand; `begun` of its parent.

    Attributes:
        standing: evaluations after which a score that has not moved is reported.
        standing_steps: steps that they extend over, at the least.
        standing_loss: share of its start that the loss has lost by then.
        within: by how much such a score differs at the most.
        standing_low: and how high it may be: answers of four classes that are drawn by chance are
            right as often.
    """

    standing: Observations = 10
    standing_steps: Steps = 160
    standing_loss: Share = 0.5
    within: Share = 0.03
    standing_low: Share = 0.3


def stands(
    name: str,
    since: int,
    step: int,
    values: list[float],
    observed: int,
    learned: float,
    policy: StandingPolicy,
) -> Evaluated | None:
    """Whether a low score of answers has not moved while the loss has fallen far.

    Args:
        since, step: of the first and of the last one; observed: how many there were.
        learned: share of its start that the loss has lost.
    """
    if observed < policy.standing or since > policy.begun or learned < policy.standing_loss:
        return None
    lasts = step - since
    if lasts < max(policy.standing_steps, policy.apart_steps * (observed - 1)):
        return None
    least, most = min(values), max(values)
    if most > policy.standing_low or most - least > policy.within:
        return None
    # Where single classes are rare, a hundredth is much.
    if least <= 0 or most > _MOVED * least:
        return None
    return Evaluated(name, values[0], values[-1], observed, since)


def finding(episode: Episode[Evaluated]) -> Finding:
    """What is reported of a score that has not moved."""
    facts = episode.facts
    return episode.finding(
        kind="accuracy.stalled",
        key=f"{OWN_GOAL}{facts.name} stands",
        severity="warning",
        title=f"`{facts.name}` stays near {number(facts.last)} while the loss falls",
        cause=(
            f"By its name `{facts.name}` is to rise. It was {number(facts.first)} at first and is "
            f"{number(facts.last)} after {count(facts.observed, 'evaluation')}, and the loss has "
            "fallen by half meanwhile. What is evaluated is not what is trained (a copy or an "
            "average of the weights that hardly follows them, a model in the wrong mode, inputs "
            "that are prepared otherwise), its targets belong to other samples, or nothing that is "
            "learned holds for them."
        ),
        remedy=(
            "Compute the score of a batch of the training in the same way, with the very weights "
            "that are trained: if it is as low, look at the score; if not, compare these weights, "
            "the mode and the inputs with those of the evaluation. Of an average of weights, look "
            "at its decay: it has to forget within fewer steps than there are."
        ),
        evidence={
            "series": facts.name,
            "first": facts.first,
            "last": facts.last,
            "observed": facts.observed,
        },
    )
