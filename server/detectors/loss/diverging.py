"""A loss that leaves what it had reached."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import LASTS, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.desync.averaging_rounds import MARK
from rankscope.server.detectors.loss import answers_kept, bad_start, bottomless
from rankscope.server.detectors.loss.answers_kept import AnswersKept
from rankscope.server.detectors.loss.bad_start import ThrownUp
from rankscope.server.detectors.loss.bottomless import Bottomless
from rankscope.server.detectors.loss.diverging_findings import Diverging, explained
from rankscope.server.detectors.loss.sign import LossSign
from rankscope.server.detectors.mechanisms.disjoint_steps import Turns
from rankscope.server.detectors.mechanisms.history import Companions, Phases
from rankscope.server.detectors.mechanisms.leaps import Leaps
from rankscope.server.detectors.mechanisms.series_by_step import mean_by_step
from rankscope.server.detectors.mechanisms.statistics import (
    BLOCK,
    Progress,
    Unmeasured,
    median_error,
    robust_sigma,
)
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import number, percent
from rankscope.server.detectors.metric.score_names import OF_REWARDS, is_reward
from rankscope.server.detectors.policy import Blocks, RisePolicy, Share, Sigmas, Times
from rankscope.server.detectors.profiles import TURNS
from rankscope.server.window import Check, Window

_WORTH = "explained_deviance"
# Blocks that are remembered.
_BLOCKS = 24
# Steps before a rise in which parameters are not written otherwise.
_SELDOM = 4 * BLOCK
# Shares of the deviance explained that are remembered, and averaged on either side of a rise.
_SHARES, _AROUND = 12 * BLOCK, 2 * BLOCK
# Times `begun` by which the block before a rise of the rate may be worse than the best.
_HARDLY = 2.0


@dataclass(frozen=True, slots=True)
class DivergingPolicy(RisePolicy):
    """Thresholds of `loss.diverging`; a block is 10 observations.

    Attributes:
        min_lost: share of the progress that has to be lost.
        min_factor_lost: that share on the logarithm, where at least `held` of the progress is lost:
            what fell from 17 to 0.8 and rises to 5 is back where it was after a third of its way
            down.
        min_noise: how far the loss has to lie above its best, as a multiple of the noise of the
            block medians; its start, too, where there is progress.
        blocks: consecutive blocks that open an incident.
        evidence: blocks that are needed before anything is judged.
        held: share of lost progress, down to which an incident goes on.
        begun: share of lost progress at which the rise is taken to have begun.
        calm: blocks below `held` after which it is over.
        game: multiple of its start up to which the loss of one of two players may rise, or that of
            a training which learns from rewards.
        small_start: progress, as a share of the start, below which losses are measured against the
            start instead.
        blown_up: multiple of its start above which a loss is too high however much it scatters: up
            there it has no course that noise could be measured by. Medians of 10 single samples
            stay below.
        runaway: blocks that open an incident where the last is so many times the one before, and
            too high as well: what grows by factors like that does not come back.
    """

    min_lost: Times = 0.35
    min_factor_lost: Times = 0.5
    min_noise: Sigmas = 4.0
    blocks: Blocks = 3
    evidence: Blocks = 4
    held: Times = 0.15
    begun: Times = 0.1
    calm: Blocks = 9
    small_start: Share = 0.1
    game: Times = 20.0
    blown_up: Times = 10.0
    runaway: Blocks = 2


@dataclass(slots=True)
class _Block:
    first_step: int
    last_step: int
    median: float
    lost: float


@dataclass(slots=True)
class DivergingState:
    """What `loss.diverging` remembers."""

    progress: Progress = field(default_factory=Progress)
    companions: Companions = field(default_factory=Companions)
    phases: Phases = field(default_factory=Phases)
    turns: Turns = field(default_factory=Turns)
    leaps: Leaps = field(default_factory=Leaps)
    blocks: deque[_Block] = field(default_factory=lambda: deque(maxlen=_BLOCKS))
    values: deque[float] = field(default_factory=lambda: deque(maxlen=_BLOCKS * BLOCK))
    above: int = 0
    signed: bool = False
    sign: LossSign = field(default_factory=LossSign)
    game_since: int | None = None
    rewarded_since: float = math.inf  # first step at which a reward was logged
    unmeasured: Unmeasured = field(default_factory=Unmeasured)
    incident: Diverging | None = None
    bottomless: Bottomless = field(default_factory=Bottomless)
    thrown: ThrownUp = field(default_factory=ThrownUp)
    written: deque[int] = field(default_factory=lambda: deque(maxlen=_BLOCKS))
    explained: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SHARES))
    answers: AnswersKept = field(default_factory=AnswersKept)


class LossDiverging(Detector[DivergingState]):
    """The mean loss over the ranks moves away from the best it has reached, and stays away.

    Or it falls below zero faster and faster, and was never to be that low.

    Statistic:
        Medians of blocks of 10 observations. Lost progress is how far the block lies above the best
        block, over the progress made (start minus best). An incident opens where it was above 35 %
        (or above 15 %, and above 50 % of the progress on the logarithm) for 3 blocks in a row, each
        above the best by more than 4 times the noise of the block medians: that of their
        differences, and that which the scatter of single values gives them, on the logarithm. Where
        the loss never made progress (less than 10 % of its start, or than 4 times that noise), half
        the start takes the place of the progress, and the median of the last 24 blocks that of the
        best. Above 10 times its start no noise is asked for. It is dated back to where the rise
        left 10 % behind, and is over after 9 blocks below 15 %.
        At the start: three of the first 20 losses are above 1.5 times the very first one, and by 6
        standard deviations of single losses above the mean of the last 30, of which after 100
        losses four in five are still above the first one; until they no longer are.
        Below: the block lies further below 0 than 30 times the median size of the first 20 losses,
        and between half, three quarters and all of the steps, 100 or more, it fell with more than
        the power 1.25 of their number each time, while the norm of the parameters has come to more
        than twice the first one; or it lies below 10^8 times that size (or 1, if that is more),
        which no likelihood comes to. It lasts as long as the loss is that far below.

    Severity:
        Warning; critical where all progress is lost, that is where the loss is above its start.
        Never more than info for losses that change their sign, and where another optimizer of the
        process steps in turns with this one, each on a backward pass of its own, as the players of
        a game do, or where rewards are logged: up to 20 times the start. Info, too, where the data
        became others as the rise began (as in `loss.spike`), as long as the loss has lost a quarter
        of the rise again, and where the accuracy is what it was (20 observations before and more
        since, within 2 standard errors).

    Cause:
        The learning rate, where it had been raised; data, targets or the loss itself, where it rose
        from one step to the next by 3 times what the step before can have changed it by: its length
        (`update_norm`) times the gradient's, before it or after.

    Evidence:
        `best`, `best_step`, `start`, `worst` (highest block median), `lost` (share of the progress
        lost, at worst), and where it applies `lr_before`, `lr_after`, `lr_step`, or `reach`. Below:
        `first` (size of the first losses), `last`, `power`, `grown` (of the parameters).

    Source:
        runmedic's share of lost progress, with a noise floor. On 64 healthy runs it never fired;
        it found too large a step after at most 60 steps.
    """

    kinds = ("loss.diverging",)
    of_one_task = True
    needs = ("loss",)
    wants = (
        "lr",
        "weight_norm",
        answers_kept.SERIES,
        *Leaps.SERIES,
        *Phases.SERIES,
        _WORTH,
        *OF_REWARDS,
    )

    policy: DivergingPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Blocks in a row, of a loss that stays away."""
        return (Reach(self.needs, BLOCK * self.policy.blocks, LASTS, moves="at all"),)

    def advance(self, window: Window, state: DivergingState) -> Outcome:
        """Takes the window's losses block by block."""
        findings: list[Finding] = []
        state.companions.take(window)
        state.phases.take(window)
        state.leaps.take(window)
        if (marks := window.series.get(MARK)) is not None:
            state.written.extend(window.steps[marks.present.any(axis=0)].tolist())
        played = [event.step for event in window.events if event.kind == TURNS]
        rewards = [s.present.any(axis=0) for n, s in window.series.items() if is_reward(n)]
        given = [int(window.steps[there][0]) for there in rewards if there.any()]
        state.rewarded_since = min([*given, state.rewarded_since])
        if played and state.game_since is None:
            state.game_since = min(played)
        steps, means = state.turns.means(window, "loss")
        norms, shares = mean_by_step(window, "weight_norm"), mean_by_step(window, _WORTH)
        state.answers.lay(window)
        for step, value in zip(steps.tolist(), means.tolist(), strict=True):
            state.bottomless.norm(norms.get(step, math.nan))
            state.unmeasured.push(step, finite=math.isfinite(value))
            if not math.isfinite(value):
                self._ends(state, step)
                continue
            state.bottomless.push(step, value)
            state.companions.pass_to(step)
            state.leaps.pass_to(step)
            if math.isfinite(shares.get(step, math.nan)):
                state.explained.append((step, shares[step]))
            state.answers.pass_to(step)
            state.sign.push(value)
            if state.sign.negated:
                continue  # `loss.spike` says so, and its level means nothing meanwhile
            state.signed = state.sign.natural
            if state.incident is not None and state.incident.over(step):
                self._hold_against_answers(state, state.incident, step)
                findings.append(self._finding(state.incident))
                state.incident = None
            state.thrown.push(step, value, known=state.incident is not None)
            state.values.append(value)
            completed = state.progress.push(step, value)
            if completed is not None:
                self._take(state, *completed)
        # What comes without a loss, or with none that is finite, waits for none.
        state.companions.pass_to(window.last_step)
        state.leaps.pass_to(window.last_step)
        if state.incident is not None:
            self._hold_against_answers(state, state.incident, window.last_step)
            findings.append(self._finding(state.incident))
        findings += [
            bottomless.finding(e, game=state.game_since is not None)
            for e in state.bottomless.watch.take(window.last_step)
        ]
        findings += [
            bad_start.finding(e, game=state.game_since is not None)
            for e in state.thrown.watch.take(window.last_step)
        ]
        return Outcome({"loss.diverging": self._check(state)}, tuple(findings))

    def _hold_against_answers(self, state: DivergingState, incident: Diverging, step: int) -> None:
        """Whether as many answers are right as before, as far as is known at a step."""
        state.answers.pass_to(step)
        kept = state.answers.since(incident.first_step)
        incident.kept = incident.kept if kept is None else kept

    def _take(self, state: DivergingState, first_step: int, last_step: int, median: float) -> None:
        policy, progress = self.policy, state.progress
        # On the logarithm: losses err by factors. What changes its sign has none.
        error = 0.0 if state.signed else median_error(np.array(state.values), BLOCK)
        # The lowest of many blocks lies below the start of a loss that is noise and nothing else.
        moved = progress.scale > policy.small_start * abs(progress.start) and self._clear(
            progress.start, progress.best, error
        )
        lost = self._lost(progress, median, moved=moved)
        state.blocks.append(_Block(first_step, last_step, median, lost))
        if len(state.blocks) < policy.evidence:
            return
        medians = np.array([b.median for b in state.blocks])
        noise = robust_sigma(np.diff(medians)) / math.sqrt(2)
        # Without progress the best is but the luckiest block: what is usual takes its place.
        before = progress.best if moved else float(np.median(medians))
        above = (
            self._much(progress, median, lost, moved=moved)
            and median - progress.best > policy.min_noise * noise
            and self._clear(median, before, error)
        ) or (not state.signed and median > policy.blown_up * progress.start > 0)
        state.above = state.above + 1 if above else 0
        incident = state.incident
        if incident is not None:
            incident.latest = median
            if lost >= policy.held:
                incident.last_step = last_step
                incident.worst = max(incident.worst, median)
                incident.lost = max(incident.lost, lost)
        elif state.above >= policy.blocks or (
            state.above >= policy.runaway and self._runs_away(state)
        ):
            self._open(state)

    def _runs_away(self, state: DivergingState) -> bool:
        """Whether the loss grows by factors, far above its start."""
        before, now = state.blocks[-2].median, state.blocks[-1].median
        limit = self.policy.blown_up
        return not state.signed and now > limit * max(before, state.progress.start) > 0

    def _ends(self, state: DivergingState, step: int) -> None:
        """The loss is not finite any more: whether it had risen above its start before."""
        rose = state.above and not state.signed and state.values[-1] > state.progress.start
        if rose and state.incident is None:
            self._open(state)
        if state.incident is not None:
            state.incident.last_step = step  # it has not come back

    def _lost(self, progress: Progress, median: float, *, moved: bool) -> float:
        if moved:
            return (median - progress.best) / progress.scale
        start = progress.start
        return (median - start) / (0.5 * abs(start)) if start else 0.0

    def _much(self, progress: Progress, median: float, lost: float, *, moved: bool) -> bool:
        """Whether enough is lost: as a difference, or where the loss fell by factors, as one."""
        if lost > self.policy.min_lost:
            return True
        if not moved or lost < self.policy.held or progress.best <= 0:
            return False
        back = math.log(median / progress.best) / math.log(progress.start / progress.best)
        return back > self.policy.min_factor_lost

    def _clear(self, high: float, low: float, error: float) -> bool:
        """Whether one level is above another one by more than their noise."""
        if not (high > 0 and low > 0):
            return high > low
        return math.log(high) - math.log(low) > self.policy.min_noise * error

    def _open(self, state: DivergingState) -> None:
        policy, progress = self.policy, state.progress
        blocks = list(state.blocks)
        begin = len(blocks) - 1
        while begin > 0 and blocks[begin - 1].lost > policy.begun:
            begin -= 1
        # The rate may have been raised in the midst of the block with which it began, or of the
        # next one, where that one is hardly worse than the best: no step before that is part of it.
        near = blocks[begin].lost < _HARDLY * policy.begun
        for onset in blocks[begin : begin + 1 + near]:
            rise = state.companions.raised_rate(
                onset.last_step - 1,
                before=progress.spacing.steps(policy.rise_before),
                factor=policy.rise,
            )
            if rise is not None:
                break
        else:
            onset = blocks[begin]
        first = onset.first_step if rise is None else max(onset.first_step, int(rise["lr_step"]))
        leap = state.leaps.near(onset.first_step)
        if leap is not None:
            rise, first = None, leap.step
        state.incident = Diverging(
            first_step=first,
            seen_step=blocks[-1].last_step,
            last_step=blocks[-1].last_step,
            clear_after=progress.spacing.steps(10 * policy.calm),
            best=progress.best,
            best_step=progress.best_step,
            start=progress.start,
            worst=max(b.median for b in blocks[begin:]),
            lost=max(b.lost for b in blocks[begin:]),
            rise=rise,
            signed=state.signed,
            game=state.game_since is not None and state.game_since <= blocks[-1].last_step,
            rewarded=state.rewarded_since <= blocks[-1].last_step,
            # Who goes on with what was trained before has learned something.
            begun=blocks[begin].first_step <= progress.spacing.first <= 1,
            lr=state.companions.highest_rate(first),
            phase=state.phases.began(first, blocks[-1].last_step) if rise is None else "",
            latest=blocks[-1].median,
            written=self._written(state, first, onset.last_step),
            leap=leap,
            worth=_worth(state.explained, first),
        )
        self._hold_against_answers(state, state.incident, blocks[-1].last_step)

    def _written(self, state: DivergingState, first: int, last: int) -> int:
        """The step of the rise before which parameters were written, which is done seldom; or -1.

        Ranks that average their parameters write them again and again.
        """
        near = [step for step in state.written if first - _SELDOM <= step <= last]
        return near[0] if len(near) == 1 and near[0] >= first - 1 else -1

    def _check(self, state: DivergingState) -> Check:
        if state.unmeasured.lasting:
            since = state.unmeasured.since
            why = f"The loss is not finite since step {since}: from then on it shows nothing."
            return Check.insufficient(why)
        progress = state.progress
        if len(state.blocks) < self.policy.evidence:
            need = 10 * self.policy.evidence
            return too_few(progress.count, "finite loss value", need)
        return Check.ok(
            f"The loss came from {number(progress.start)} to {number(progress.best)} at best "
            f"(step {progress.best_step}) and is at {number(state.blocks[-1].median)}."
        )

    def _played(self, incident: Diverging) -> bool:
        """Whether it need not fall, as that of a player, and has not run away."""
        start = abs(incident.start)
        free = incident.game or incident.rewarded
        return free and abs(incident.worst) <= self.policy.game * start

    def _finding(self, incident: Diverging) -> Finding:
        if incident.lost >= 1:
            title = (
                f"The loss has risen from {number(incident.best)} to {number(incident.worst)}, "
                f"above its start, since step {incident.first_step}"
            )
        else:
            title = (
                f"The loss has lost {percent(incident.lost)} of its progress since step "
                f"{incident.first_step} ({number(incident.best)} to {number(incident.worst)})"
            )
        cause, remedy = explained(incident, played=self._played(incident))
        return incident.finding(
            kind="loss.diverging",
            severity=(
                "info"
                if incident.signed
                or self._played(incident)
                or (incident.phase and incident.learns)
                or incident.kept
                else "critical"
                if incident.lost >= 1
                else "warning"
            ),
            title=title,
            cause=cause,
            remedy=remedy,
            evidence={
                "best": incident.best,
                "best_step": incident.best_step,
                "start": incident.start,
                "worst": incident.worst,
                "lost": incident.lost,
                **(incident.rise or {}),
                **({} if incident.leap is None else {"reach": incident.leap.reach}),
            },
        )


def _worth(explained: Sequence[tuple[int, float]], first: int) -> tuple[float, float]:
    """Mean share of the deviance explained before a step and from it on; NaN where not known."""
    before = [share for step, share in explained if step < first][-_AROUND:]
    since = [share for step, share in explained if step >= first][-_AROUND:]
    known = len(before) >= BLOCK <= len(since)
    return (float(np.mean(before)), float(np.mean(since))) if known else (math.nan, math.nan)
