"""What is reported of batches that are like none of the other ranks'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.wording import listing, number, ranks, sentences


@dataclass(frozen=True, slots=True)
class Odd:
    """An outlier: the rank's loss beside the others', its z, and what was in its batch."""

    step: int
    rank: int
    value: float
    others: float
    z: float
    digest: int | None
    rows: frozenset[int]


@dataclass(slots=True)
class Batches:
    """What is known of the outliers together.

    Attributes:
        odd: the newest ones.
        pattern: how they belong together, empty for a single one: `batch` (the same batch each
            time), `sample` (a sample that is in each of them), `cycle` (the same number of steps
            from one to the next), `rank` (all of them on one rank).
        period: steps from one to the next, for `cycle`.
    """

    odd: tuple[Odd, ...]
    pattern: str = ""
    period: int = 0


def finding(episode: Episode[Batches]) -> Finding:
    """What is reported of them."""
    facts = episode.facts
    odd, newest = facts.odd, facts.odd[-1]
    who = tuple(sorted({o.rank for o in odd}))
    steps = listing([str(o.step) for o in odd], most=6)
    times = number(newest.value / newest.others) if newest.others else "infinitely many"
    cause = (
        f"At step {newest.step} the loss of rank {newest.rank} is {number(newest.value)}, that of "
        f"the others {number(newest.others)} (z = {number(newest.z)}), and a step later all is as "
        "before: its batch is unlike the others."
    )
    if facts.pattern:
        title = f"Batches of {ranks(who)} stand out again and again: steps {steps}"
        cause = sentences(cause, _WHY[facts.pattern].format(steps=steps, period=facts.period))
        remedy = (
            f"Look at what {ranks(who)} read at these steps, and take it out or repair it: until "
            "then clip gradients, so that each of these batches moves the model no more than any "
            "other."
        )
    else:
        title = (
            f"The batch of rank {newest.rank} at step {newest.step} has {times} times the loss of "
            "the others"
        )
        remedy = (
            f"Look at the samples of rank {newest.rank} at step {newest.step}: labels, length, "
            "values out of range. One such batch does no harm where gradients are clipped."
        )
    return episode.finding(
        kind="data.outlier",
        severity="warning" if facts.pattern else "info",
        title=title,
        ranks=who,
        stage="batch",
        cause=cause,
        remedy=remedy,
        evidence=_evidence(facts),
    )


_WHY: Mapping[str, str] = {
    "batch": "It is one and the same batch, bit for bit, at steps {steps}.",
    "sample": "One sample is in all of these batches (steps {steps}), and in no other.",
    "cycle": "They come every {period} steps: with the data's own cycle.",
    "rank": "All outliers so far (steps {steps}) are of this rank: they come with its data.",
}


def _evidence(facts: Batches) -> dict[str, object]:
    newest = facts.odd[-1]
    return {
        "steps": [o.step for o in facts.odd],
        "losses": [o.value for o in facts.odd],
        "others": newest.others,
        "z": newest.z,
        "pattern": facts.pattern,
        "period": facts.period,
    }
