"""Gradients computed on weights that are too old."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.effects import BLUR, Rule
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.wording import count, number, sentences
from rankscope.server.detectors.policy import Observations, Policy, Steps, Times
from rankscope.server.detectors.push.applied import SERIES, Push, pushes
from rankscope.server.window import Check, Window


@dataclass(frozen=True, slots=True)
class StalePolicy(Policy):
    """Thresholds of `push.stale`.

    Attributes:
        least: age in versions that a gradient may always have.
        times: age that is allowed, as a multiple of what is usual for the worker, or for all of
            them at equal pace.
        memory: number of a worker's pushes that show what is usual for it.
        pushes: consecutive stale pushes before it is reported: where workers share a machine that
            has too much to do, one of them loses its processor for two or three of its pushes.
        repeats: the same where they were all computed on one version: that is no matter of pace.
        clear_after: versions, for each worker, without a stale push after which it is over.
    """

    least: Steps = 8
    times: Times = 4.0
    memory: Observations = 64
    pushes: Observations = 4
    repeats: Observations = 2
    clear_after: Steps = 16


@dataclass(slots=True)
class Old:
    """What is known of a worker whose gradients are old.

    Attributes:
        usual: its staleness at three of four pushes before.
        most: the largest since.
        repeated: whether it goes on computing on one version, which it had pushed before.
    """

    worker: int
    version: int
    usual: float
    most: int
    repeated: bool


@dataclass(slots=True)
class Pace:
    """What is remembered of a worker.

    Attributes:
        usual: staleness of its pushes that were not too old.
        version: that its last push was computed on.
        since: version made by the first of the consecutive pushes that was computed on that one
            again; -1 where the last one was not.
        old: consecutive pushes that were too old, and the version made by the first of them.
    """

    watch: Watch[Old]
    usual: deque[int]
    version: int = -1
    since: int = -1
    old: int = 0
    old_since: int = -1


@dataclass(slots=True)
class StaleState:
    """Attributes: judged pushes; what is remembered of each worker."""

    judged: int = 0
    most: int = 0
    paces: dict[int, Pace] = field(default_factory=dict)


class PushStale(Detector[StaleState]):
    """A worker of a parameter server pushes gradients that were computed on old weights.

    A worker that no longer pulls, or pulls what a cache holds, or is far slower than the others
    moves the model in directions that were right many versions ago. At the learning rate of fresh
    gradients, this diverges.

    Statistic:
        Staleness: the versions that the server made from the pull to the push. Among N workers of
        one pace it is N - 1. Too old is what exceeds 8, four times N - 1, and four times what three
        of four of the last 64 pushes of this worker kept within; four consecutive pushes, or two
        that were computed on one version: it is dated back to the first one that was so again. Over
        after 16 versions without, times the number of workers.

    Severity:
        Warning; critical for a worker that goes on computing on one version.

    Evidence:
        `version` (that the first was computed on), `staleness` (the largest), `usual`, `repeated`,
        `observed` (pushes).

    Source:
        Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server"
        (NIPS 2013); Zhang et al., "Staleness-aware async-SGD" (IJCAI 2016), which finds N workers'
        staleness around N.
    """

    kinds = ("push.stale",)
    lasting = "every push is reported with its version"
    wants = SERIES
    min_ranks = 2
    effects = (
        Rule(
            root=("push.stale",),
            consequence=("rank.loss_outlier", "rank.gradient_outlier"),
            earliest=-BLUR,
            why="a worker on old weights has the losses and gradients of an older model",
        ),
        Rule(
            root=("push.stale",),
            consequence=("loss.diverging", "loss.oscillating", "gradient.exploding"),
            why="gradients of old weights move the model in directions that were right before",
        ),
    )
    policy: StalePolicy

    def advance(self, window: Window, state: StaleState) -> Outcome:
        """Goes through the pushes as they were applied."""
        for push in pushes(window):
            self._push(push, state)
        findings = [
            _finding(episode)
            for _, pace in sorted(state.paces.items())
            for episode in pace.watch.take(window.last_step)
        ]
        return Outcome({"push.stale": _check(state)}, tuple(findings))

    def _push(self, push: Push, state: StaleState) -> None:
        policy = self.policy
        pace = state.paces.get(push.worker)
        if pace is None:
            pace = state.paces[push.worker] = Pace(Watch(), deque(maxlen=policy.memory))
        state.judged += 1
        state.most = max(state.most, push.staleness)
        if push.computed_on != pace.version:
            pace.version, pace.since = push.computed_on, -1
        elif pace.since < 0:
            pace.since = push.version
        usual = float(np.quantile(pace.usual, 0.75)) if pace.usual else 0.0
        others = len(state.paces) - 1
        if push.staleness <= max(policy.least, policy.times * max(others, usual)):
            pace.old = 0
            pace.usual.append(push.staleness)
            pace.watch.good(push.version)
            return
        pace.old += 1
        if pace.old == 1:
            pace.old_since = push.version
        repeated = pace.since >= 0
        if pace.old < (policy.repeats if repeated else policy.pushes):
            return
        pace.watch.clear_after = policy.clear_after * (others + 1)
        old = Old(push.worker, push.computed_on, usual, 0, repeated)
        first = pace.since if repeated else pace.old_since
        facts = pace.watch.bad(push.version, old, first_step=first).facts
        facts.most = max(facts.most, push.staleness)
        facts.repeated |= repeated


def _finding(episode: Episode[Old]) -> Finding:
    old, step = episode.facts, episode.first_step
    does = (
        f"has pushed gradients of version {old.version:,} again and again since version {step:,}"
        if old.repeated
        else f"pushes gradients that are up to {old.most:,} versions old since version {step:,}"
    )
    return episode.finding(
        kind="push.stale",
        key=f"rank:{old.worker}",
        severity="critical" if old.repeated else "warning",
        title=f"Rank {old.worker} {does}",
        ranks=(old.worker,),
        stage="local_gradient",
        cause=sentences(
            f"Rank {old.worker} works on weights up to {old.most:,} versions old; "
            f"{number(old.usual)} is usual for it.",
            "It no longer pulls, or pulls from what is not the newest (a cache, another server)."
            if old.repeated
            else "It is far slower than the others, or its pulls or pushes wait somewhere.",
        ),
        remedy=(
            "Pull before every batch, and look at whether the pull fails in silence; bound the "
            "staleness (the server lets nobody run ahead by more than N versions), drop "
            "gradients that are older, or divide their learning rate by their staleness."
        ),
        evidence={
            "version": old.version,
            "staleness": old.most,
            "usual": old.usual,
            "repeated": old.repeated,
            "observed": episode.seen,
        },
    )


def _check(state: StaleState) -> Check:
    if not state.judged:
        return Check.not_applicable("No parameter server has reported a push.")
    return Check.ok(
        f"{count(state.judged, 'gradient')} of {count(len(state.paces), 'worker')} came, the "
        f"oldest {count(state.most, 'version')} old."
    )
