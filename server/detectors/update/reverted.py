"""Parameters that are again, bit for bit, what they were after an earlier step."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.effects import BLUR, Rule
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import mean_by_step
from rankscope.server.detectors.mechanisms.wording import (
    count,
    if_several,
    number,
    ranks,
    sentences,
)
from rankscope.server.detectors.policy import Observations, Policy
from rankscope.server.window import Check, Window

_AFTER, _BETWEEN = "parameters", "outside_optimizer"
# Steps of a rank that are remembered: of what is set back, the copy is mostly a recent one.
_MEMORY = 4096
# Parameters from elsewhere that are remembered: a checkpoint, or a few of them.
_FEW = 64
# Losses before a return and since, all of which have to be higher: of 16 that are drawn alike the
# last 8 are the highest in one of 12,870 cases.
_LOSSES = 8
# Ranks that are followed: replicas agree, and what one rank alone does is a desync.
_RANKS = 8


@dataclass(frozen=True, slots=True)
class RevertedPolicy(Policy):
    """Thresholds of `update.reverted`.

    Attributes:
        recurs: returns from which on it is no single rollback, as after a spike of the loss.
    """

    recurs: Observations = 3


@dataclass(slots=True)
class Return:
    """One return: the step before which the parameters were set back, and after which they were.

    Attributes:
        before, since: losses of the last steps before it, and of the first ones since.
    """

    step: int
    earlier: int
    before: tuple[float, ...] = ()
    since: list[float] = field(default_factory=list)

    @property
    def hurts(self) -> bool:
        """Whether the loss is higher since."""
        full = len(self.before) == len(self.since) == _LOSSES
        return full and min(self.since) > max(self.before)


@dataclass(slots=True)
class Past:
    """Of one rank: the digests after its steps, with the last step that each was seen after.

    Attributes:
        elsewhere: what was written between two steps and came from none of those, with the step
            after which that was.
    """

    seen: dict[int, int] = field(default_factory=dict)
    elsewhere: dict[int, int] = field(default_factory=dict)
    order: deque[tuple[int, int]] = field(default_factory=deque)
    step: int = -2
    digest: int = 0

    def push(self, step: int, digest: int) -> None:
        """The parameters after a step."""
        self.step, self.digest = step, digest
        self.seen[digest] = step
        self.order.append((step, digest))
        if len(self.order) > _MEMORY:
            gone, old = self.order.popleft()
            if self.seen.get(old) == gone:
                del self.seen[old]


@dataclass(slots=True)
class RevertedState:
    """What is remembered: the past of each rank, and returns while they come."""

    past: dict[int, Past] = field(default_factory=dict)
    judged: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_LOSSES))
    newest: Return | None = None
    watch: Watch[list[Return]] = field(default_factory=lambda: Watch(clear_after=64))


class UpdateReverted(Detector[RevertedState]):
    """Something sets the trained parameters back to what they were after an earlier step.

    A copy that is restored by mistake (a "best model" loaded at each evaluation, a snapshot of a
    line search, a weight tied to a stale buffer): what was learned since is thrown away, on all
    ranks alike, so that comparing them shows nothing.

    Statistic:
        The digest of the parameters before a step is that after the step before, plus that of what
        was written between the two (digests are linear). It is compared with those after all
        earlier steps, of the last 4,096 that were sampled: equal, and not that of the step before,
        it is a return; so is what was written between two steps before, and is written again. 64
        bits do not agree by chance. Ranks that all return at the same step. Over after 64 steps
        without.

    Severity:
        Info for one or two (a rollback that is meant), warning from the third on, and where each of
        the 8 losses since is higher than each of the 8 before.

    Evidence:
        `returns` (their number), `steps` and `earlier_steps` (before which and to after which).

    Source:
        Each rank's own digests, compared over time.
    """

    kinds = ("update.reverted",)
    wants = ("loss",)
    effects = (
        Rule(
            root=("update.reverted",),
            consequence=("loss.", "metric.anomaly"),
            earliest=-BLUR,
            why="what was learned since the earlier step is thrown away",
        ),
    )

    policy: RevertedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Writes before sampled steps."""
        return (Reach((f"words/{_BETWEEN}",), self.policy.recurs, LASTS_SAMPLED),)

    def advance(self, window: Window, state: RevertedState) -> Outcome:
        """Goes through the digests step by step."""
        after, between = window.digests.get(_AFTER), window.digests.get(_BETWEEN)
        losses = mean_by_step(window, "loss")
        for column, step in enumerate(window.steps.tolist()):
            returns = []
            followed = range(min(len(window.ranks), _RANKS) if after is not None else 0)
            for row in followed:
                past = state.past.setdefault(int(window.ranks[row]), Past())
                if between is not None and between.present[row, column]:
                    change = int(between.values[row, column])
                    returns.append(self._returned(past, step, change))
                if after is not None and after.present[row, column]:
                    past.push(step, int(after.values[row, column]))
            if returns:
                state.judged += 1
                if len(returns) == len(followed) and min(returns) >= 0:
                    episode = state.watch.bad(step, [], first_step=step)
                    state.newest = Return(step, min(returns), tuple(state.losses))
                    episode.facts.append(state.newest)
                else:
                    state.watch.good(step)
            loss = losses.get(step, math.nan)
            if math.isfinite(loss):
                state.losses.append(loss)
                if state.newest is not None and len(state.newest.since) < _LOSSES:
                    state.newest.since.append(loss)
        findings = tuple(
            _finding(e, window, self.policy) for e in state.watch.take(window.last_step)
        )
        return Outcome({"update.reverted": self._check(state)}, findings)

    @staticmethod
    def _returned(past: Past, step: int, change: int) -> int:
        """The earlier step after which the parameters were as they are before this one, or -1."""
        if not change or past.step != step - 1:
            return -1
        written = (past.digest + change) % 2**64
        earlier = past.seen.get(written, past.elsewhere.get(written, -1))
        if earlier < 0:
            # What was before the first step that was seen, or comes from elsewhere: should the same
            # be written once more, it is known then.
            past.elsewhere[written] = step - 1
            if len(past.elsewhere) > _FEW:
                del past.elsewhere[next(iter(past.elsewhere))]
        return earlier if earlier < step - 1 else -1

    def _check(self, state: RevertedState) -> Check:
        if not state.judged:
            why = "No rank posts what is written to its parameters between two steps."
            return Check.missing(why)
        return Check.ok(
            f"Nothing set the parameters back to an earlier step, before "
            f"{count(state.judged, 'checked step')}."
        )


def _finding(episode: Episode[list[Return]], window: Window, policy: RevertedPolicy) -> Finding:
    returns = episode.facts
    first, times = returns[0], len(returns)
    how_often = f", {times:,} times so far" if times > 1 else ""
    every = np.diff([one.step for one in returns])
    hurts = next((one for one in returns if one.hurts), None)
    rhythm = ""
    if times >= policy.recurs and len(set(every.tolist())) == 1:
        rhythm = f"It comes every {int(every[0])} steps."
    return Finding(
        kind="update.reverted",
        severity="warning" if hurts or times >= policy.recurs else "info",
        title=f"The parameters were set back to step {first.earlier} before step {first.step}"
        f"{how_often}",
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=first.step,
        ranks=tuple(int(rank) for rank in window.ranks),
        stage="outside_optimizer",
        cause=sentences(
            f"Before step {first.step} the trained parameters"
            f"{if_several(len(window.ranks), f'of {ranks(window.ranks.tolist())}')} were, bit for "
            f"bit, what they had been after step {first.earlier}: "
            f"{count(first.step - 1 - first.earlier, 'step')} of training in between "
            f"{'is' if first.step - 1 - first.earlier == 1 else 'are'} thrown away. The optimizer "
            "did not do it.",
            rhythm,
            ""
            if hurts is None
            else f"The loss went from {number(hurts.before[-1])} to {number(hurts.since[0])} at "
            f"step {hurts.step}, and has stayed above what it was.",
            "Usual causes: a checkpoint or a best model that is loaded at each evaluation, a copy "
            "of the weights that is restored and was not taken anew, averaged weights that are "
            "swapped in and not swapped out.",
        ),
        remedy=(
            f"Look for what writes the parameters between step {first.step - 1} and step "
            f"{first.step} (`load_state_dict`, `copy_`, a swap). Nothing, if it is a rollback that "
            "is meant."
        ),
        clear_after=episode.clear_after,
        evidence={
            "returns": times,
            "steps": [one.step for one in returns[:64]],
            "earlier_steps": [one.earlier for one in returns[:64]],
        },
    )
