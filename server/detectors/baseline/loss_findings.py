"""What is said of a loss that is worse than that of earlier runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rankscope.server.comparison.courses import Course
from rankscope.server.comparison.measures import Measured
from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.baseline.curves import Curve, Interim, courses
from rankscope.server.detectors.baseline.measured import EVALUATION
from rankscope.server.detectors.baseline.texts import beside, compared_with, differences
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.wording import number, percent, sentences
from rankscope.server.window import Baselines

# What a training is given at each step: where it is another thing, that was chosen -> in words.
GIVEN = {"lr": "the learning rate", "samples": "the number of samples in a rank's batch"}
# And of what it is to learn.
DATA = {"target_deviance": "the loss of the best constant answer to a batch's targets"}
# By so much it is another one: a batch that is now and then not full stays below.
_ANOTHER = 0.05
# Wherever the bug is, what differs in what a run was given is shown by its last steps: a tenth.
_LATE = 10


@dataclass(frozen=True, slots=True)
class Worse:
    """What is known of a comparison in which a run is worse.

    Attributes:
        found: each measure that is, the loss first.
        given, data: what it is given, and has to learn, that its baselines were not: a sentence
            each.
    """

    interim: Interim
    found: tuple[Measured, ...]
    given: tuple[str, ...]
    data: tuple[str, ...]


def others(
    names: Mapping[str, str], interim: Interim, baselines: Baselines, curves: Mapping[str, Curve]
) -> tuple[str, ...]:
    """Of what runs are given that which all baselines had otherwise, in a sentence each.

    Args:
        names: series -> what it is.
        curves: of the run.
    """
    found = []
    for name, words in names.items():
        width = max(baselines.curves.get(name, {}), default=0)
        if not width or name not in curves:
            continue
        at = Interim((interim.step + 1) // width * width - 1, width, interim.final)
        own = _late(curves[name].course(at))
        theirs = [v for c in courses(baselines, name, at) if math.isfinite(v := _late(c))]
        if not theirs or not math.isfinite(own):
            continue
        low, high = min(theirs), max(theirs)
        margin = _ANOTHER * max(abs(low), abs(high))
        if own < low - margin or own > high + margin:
            found.append(f"{words} is {number(own)}, {beside(theirs)} in the baselines")
    return tuple(found)


def _late(course: Course) -> float:
    """The median over the last tenth of the buckets; NaN where there is none."""
    late = course.values[-max(1, len(course.values) // _LATE) :]
    return float(np.median(late)) if len(late) else math.nan


def finding(episode: Episode[Worse], baselines: Baselines) -> Finding:
    """What is reported of an episode."""
    facts, first = episode.facts, episode.first_step
    found = facts.found[0]
    what = _name(found)
    meant = bool(baselines.unlike or facts.given)
    unlike = [*facts.given, *facts.data]
    return Finding(
        kind="baseline.loss",
        key="loss",
        severity="info" if meant and not baselines.established else "warning",
        title=f"From about step {first} on the {what} is worse than in earlier runs: {_by(found)}",
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=first,
        cause=sentences(
            *(_sentence(one) for one in facts.found),
            f"At these steps {'; '.join(unlike)}." if unlike else "",
            differences(baselines),
        ),
        remedy=_remedy(baselines, meant=meant),
        clear_after=episode.clear_after,
        evidence={
            "metric": found.name,
            "step": facts.interim.step,
            "from_step": (found.steps or (facts.interim.step, 0))[0],
            "value": found.value,
            "expected": found.expected,
            "limit": found.bound,
            "share": _share(found),
            "baselines": dict(zip(found.runs, found.values, strict=True)),
            "differing": {s.key: [s.own, s.theirs] for s in baselines.differing},
        },
    )


def _name(found: Measured) -> str:
    return "loss of evaluations" if found.name == EVALUATION else "loss"


def _share(found: Measured) -> float:
    """By which share it is above what is expected; NaN where shares of it say nothing."""
    return found.value / found.expected - 1 if found.expected > 0 else math.nan


def _by(found: Measured) -> str:
    share = _share(found)
    if not math.isfinite(share):
        return f"{number(found.value)} in place of {number(found.expected)}"
    digits = f"{100 * share:.1f} %" if share < 0.1 else percent(share)
    return f"{digits} above expected" if share < 1 else f"{number(1 + share)} times as expected"


def _sentence(found: Measured) -> str:
    first, last = found.steps or (0, 0)
    what = "loss of the evaluations" if found.name == EVALUATION else "loss"
    return (
        f"The mean {what} of steps {first}-{last} is {number(found.value)}; that of "
        f"{compared_with(found.runs)} at the same steps is {number(found.expected)} "
        f"({beside(found.values)}), and the limit for one more such run {number(found.bound)}."
    )


def _remedy(baselines: Baselines, *, meant: bool) -> str:
    compare = f"`rankscope compare {baselines.of} {baselines.runs[0]}`"
    if meant:
        first = "Look whether the settings that differ are meant."
    else:
        first = "Look at what has changed in the data and the code since these runs."
    return (
        f"{first} {compare} shows both runs side by side. If it is to be so from now on, "
        f"`rankscope baseline {baselines.of}` makes this run a measure for later ones, and "
        "`rankscope baseline RUN --remove` takes others away."
    )
