"""A loss that jumps off its own recent course."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome, Reach
from rankscope.server.detectors.loss import few_answers
from rankscope.server.detectors.loss.answers_kept import AnswersKept
from rankscope.server.detectors.loss.few_answers import FewAnswers
from rankscope.server.detectors.loss.relapse import Relapse
from rankscope.server.detectors.loss.sign import LossSign
from rankscope.server.detectors.loss.spike_findings import Spike, spike_finding
from rankscope.server.detectors.mechanisms.batch_sizes import SERIES, BatchSizes, effective_sizes
from rankscope.server.detectors.mechanisms.history import Companions, Phases, RankHistory
from rankscope.server.detectors.mechanisms.leaps import Leaps
from rankscope.server.detectors.mechanisms.odd_targets import OddTargets
from rankscope.server.detectors.mechanisms.statistics import (
    BLOCK,
    Baseline,
    Progress,
    mean_over_ranks,
    rank_rows,
)
from rankscope.server.detectors.mechanisms.wording import count
from rankscope.server.detectors.policy import (
    Count,
    Observations,
    Policy,
    RisePolicy,
    Share,
    Sigmas,
    Times,
)
from rankscope.server.window import Check, Float64, Int64, Status, Window


@dataclass(frozen=True, slots=True)
class SpikePolicy(RisePolicy):
    """Thresholds of `loss.spike`; counts are observations.

    Attributes:
        min_z: robust z on the logarithm from which a value is a spike.
        min_ratio: smallest ratio to the window's median.
        min_progress: smallest rise over the median, as a share of the progress made.
        recent_z: as `min_z`, over the values of the last 64 steps, where steps are left out.
        recent: smallest number of these values.
        evidence: accepted values that are needed before anything is judged.
        early: as `evidence`, of what lies beyond doubt above all that has been: the course of so
            few values is hardly known, and first steps overshoot.
        early_z, early_ratio: smallest z then, and ratio to the largest value of all.
        calm: normal values after which it is over.
        return_within: values within which a spike has to come back, or it is critical.
        settle_after: values after which the new level is accepted as the usual one.
        recurrent: number of spikes within `recurrent_within` that is critical.
        recurrent_within: number of most recent values in which spikes are counted.
        carried: share of all ranks' rises that one rank has to have to be the carrier of the jump.
        carried_progress: as `min_progress`, for a passing jump that one rank carries: from here on
            it is more than an odd batch.
        lasting: number of high values from which on it is more than an odd batch: the first is that
            batch, the next what its update did.
        learning: share of its rise that the loss loses within `return_within`, from the first 10
            values to the last 10, where the model learns what a new phase brings.
    """

    min_z: Sigmas = 8.0
    min_ratio: Times = 1.5
    min_progress: Share = 0.05
    recent_z: Sigmas = 4.0
    recent: Observations = 8
    evidence: Observations = 32
    early: Observations = 16
    early_z: Sigmas = 16.0
    early_ratio: Times = 1.5
    calm: Observations = 16
    return_within: Observations = 50
    settle_after: Observations = 200
    recurrent: Count = 3
    recurrent_within: Observations = 1000
    carried: Share = 0.8
    carried_progress: Share = 0.2
    lasting: Observations = 3
    learning: Share = 0.25
    # A jump follows a rise of the rate more closely than a slow drift does.
    rise_before: Observations = 30


# Values among which one has to stand out where most are 0: as many as a run's first ones are of.
_INTERMITTENT = 1000


@dataclass(slots=True)
class SpikeState:
    """What `loss.spike` remembers."""

    progress: Progress = field(default_factory=Progress)
    baseline: Baseline = field(default_factory=Baseline)
    history: RankHistory = field(default_factory=lambda: RankHistory(64))
    companions: Companions = field(default_factory=Companions)
    leaps: Leaps = field(default_factory=Leaps)
    phases: Phases = field(default_factory=Phases)
    sizes: BatchSizes = field(default_factory=BatchSizes)
    onsets: deque[int] = field(default_factory=deque)
    sign: LossSign = field(default_factory=LossSign)
    targets: OddTargets = field(default_factory=OddTargets)
    # Steps of the spikes that their targets explain, who carried each, and the number of others.
    odd: list[int] = field(default_factory=list)
    carriers: list[tuple[int, ...]] = field(default_factory=list)
    others: int = 0
    judged: int = 0
    relapse: Relapse = field(default_factory=Relapse)
    answers: AnswersKept = field(default_factory=AnswersKept)
    few: FewAnswers = field(default_factory=FewAnswers)
    # Of a loss that is 0 at most steps, as of a margin that most samples keep, few of 64 are not.
    before: deque[float] = field(default_factory=lambda: deque(maxlen=_INTERMITTENT))
    incident: Spike | None = None


# The spikes that targets explain over those that they do not, from which on the rest is chance.
_FEW_OTHERS = 3
# Probability below which it is no chance that one of two ranks has them all.
_CHANCE = 0.01


class LossSpike(Detector[SpikeState]):
    """The mean loss over the ranks jumps far above its own recent course.

    One bad batch, a new data source or too large a step. Where one rank alone carries the jump, it
    is named.

    Statistic:
        Robust z of the logarithm of the loss around the trend of the last 64 accepted values
        (median and median absolute deviation). A spike has z > 8, is above all 64 values, above 1.5
        times their median, and above it by more than 5 % of the progress made since the start; from
        the 16th value on one with z > 16 that is above 1.5 times all before. Of a loss that is
        logged at some steps only the 64 reach far back, and z > 4 is asked for over those of the
        last 64 steps (8 at least), too: what has risen, or scatters more, since the others is no
        jump. A step of fewer samples than usual scatters more: z is divided by the root of how many
        times fewer. Where most of the 64 are exactly 0, as of a margin that is kept, it has to be
        above 1.5 times the last 1,000. It is over after 16 normal values. What was alarmed about
        does not enter the 64. A loss that was positive at 32 steps and more and is negative at the
        next, by a move of more than 4 times the largest of the last 64, was negated: a spike, too.
        And (key `relapse`) a loss that is thrown back: 8 values above all of the 16 before, whose
        median is 1.5 times as high, by a tenth of the progress made, of which rise the first of
        them has 0.6 on the logarithm, and twice the largest move between the 16.

    Severity:
        Info for a jump of all ranks that is over after one or two values: an odd batch, of which
        healthy trainings have some. Warning from the third value on, and at once where one rank
        carries it and the mean rises by more than a fifth of the progress made, or the learning
        rate was raised before. Critical where the loss has not come back below the upper quartile
        of the 64 values within 50 observations, or from the third spike within 1,000 observations
        on. Info where the data became others at that step (a mark, or targets or sizes of samples
        beyond all of the 64 before by a tenth) and the loss, within 50 observations, loses a
        quarter of the rise again: the next phase of a curriculum. Warning where it does not. Info
        where the jumps are those of the targets' own scatter (`target_deviance` rises by half as
        much or more), which have come so since the training began, each over after two steps. Info
        where a jump of all ranks leaves the accuracy as it was (20 observations before and more
        since, within 2 standard errors), and where at all high values that it is known of one or
        two answers more than usual were wrong (as many as the accuracy lacks of its median, of the
        samples of all ranks), at a cost of 30 each at the most. Never more than info for losses
        that change their sign in their ordinary course.

    Evidence:
        `z`, `value`, `usual` (median of the 64), `highest_before`, `progress`, `peak`, `peak_step`,
        `spikes`, and where they apply `batch`, `batch_usual` (samples of a rank), `rank_value`,
        `lr_before`, `lr_after`, `lr_step`, `grad_norm`, `grad_norm_usual`, `grad_norm_step`.

    Source:
        OLMo-core's 6-sigma rule and its spike score, with the logarithm in place of the raw scale.
        On 49,200 steps of healthy training in 64 runs it never fired; it found a single bad batch
        at its very step.
    """

    kinds: ClassVar[tuple[str, ...]] = ("loss.spike",)
    of_one_task: ClassVar[bool] = True
    reports_open: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    wants: ClassVar[tuple[str, ...]] = (
        *("lr", *few_answers.SERIES),
        *SERIES,
        *Leaps.SERIES,
        *Phases.SERIES,
    )

    policies: ClassVar[type[Policy]] = SpikePolicy
    policy: SpikePolicy

    def reaches(self) -> tuple[Reach, ...]:
        """One odd batch is one step."""
        return (Reach(("loss",), 1),)

    def start(self) -> SpikeState:
        """Nothing seen yet."""
        return SpikeState()

    def advance(self, window: Window, state: SpikeState) -> Outcome:
        """Holds every new mean loss against those before it."""
        findings: list[Finding] = []
        state.companions.take(window)
        state.leaps.take(window)
        state.phases.take(window)
        state.targets.take(window)
        state.relapse.take(window)
        state.answers.lay(window)
        state.few.lay(window)
        steps, means = mean_over_ranks(window, "loss")
        rows = rank_rows(window, "loss")[1]
        sizes = effective_sizes(window, "loss").tolist()
        for step, value, row, size in zip(steps.tolist(), means.tolist(), rows, sizes, strict=True):
            if not math.isfinite(value):
                continue
            state.sizes.push(size)
            state.companions.pass_to(step)
            state.leaps.pass_to(step)
            state.answers.pass_to(step)
            state.few.pass_to(step)
            negated = state.sign.push(value)
            if not state.sign.negated:
                state.progress.push(step, value)
            incident = state.incident
            # What stands out from all that was lately is a spike already.
            if incident is None:
                state.relapse.push(step, value, row.copy(), state.progress, state.phases)
            else:
                state.relapse.forget()
            if incident is not None:
                if incident.over(step) or incident.observations >= self.policy.settle_after:
                    self._hold_against_answers(state, incident, step)
                    findings.append(self._finding(incident))
                    self._settle(state, incident)
                    incident = state.incident = None
                else:
                    self._follow(state, incident, step, value, window.ranks, row)
            if incident is None:
                state.judged += len(state.baseline) >= self.policy.evidence
                z = self._judge(state, value, size)
                state.before.append(value)
                if negated and len(state.baseline) >= self.policy.evidence:
                    state.incident = self._open(state, window, step, value, 0.0, row)
                    state.incident.negated = state.incident.positive = True
                    state.incident.batch = (size, state.sizes.usual)
                elif z is None:
                    state.baseline.accept(value)
                    state.history.push(step, window.ranks, row.copy())
                else:
                    state.incident = self._open(state, window, step, value, z, row)
                    state.incident.batch = (size, state.sizes.usual)
                    rise = value - state.incident.usual
                    state.incident.count_answers(state.few.explain(step, rise))
                    self._hold_against_targets(
                        state, state.incident, step, value, state.incident.ranks
                    )
                    self._hold_against_answers(state, state.incident, step)
        # What comes without a loss waits for none.
        state.companions.pass_to(window.last_step)
        state.leaps.pass_to(window.last_step)
        if state.incident is not None:
            self._hold_against_answers(state, state.incident, window.last_step)
            findings.append(self._finding(state.incident))
        findings += state.relapse.findings(window)
        return Outcome({"loss.spike": self._check(window, state)}, tuple(findings))

    def _hold_against_answers(self, state: SpikeState, incident: Spike, step: int) -> None:
        """Whether as many answers are right as before, as far as is known at a step."""
        state.answers.pass_to(step)
        kept = state.answers.since(incident.first_step)
        incident.kept = incident.kept if kept is None else kept

    def _judge(self, state: SpikeState, value: float, size: float) -> float | None:
        """The z of a value that is a spike, None for one that is none.

        Args:
            size: samples of a rank that are behind it; NaN where that is not known.
        """
        policy, baseline = self.policy, state.baseline
        # The maximum first: it is cheap, and nearly every value stops here.
        if len(baseline) < policy.early or value <= baseline.highest:
            return None
        early = len(baseline) < policy.evidence
        if early and not (baseline.positive and value > policy.early_ratio * baseline.highest):
            return None
        usual = float(np.median(baseline.values))
        if baseline.positive and value <= policy.min_ratio * usual:
            return None
        if usual == 0 and value <= policy.min_ratio * max(state.before):
            return None
        if value - usual <= policy.min_progress * state.progress.scale:
            return None
        z = baseline.z(value) / state.sizes.widening(size)
        least = policy.early_z if early else policy.min_z
        return z if z > least and self._leaps(state, value) else None

    def _leaps(self, state: SpikeState, value: float) -> bool:
        """Whether a value stands out from the last 64 steps, and not from older ones alone."""
        baseline = state.baseline
        there = int(len(baseline) / state.progress.spacing.interval)
        if 2 * there > len(baseline):
            return True
        recent = max(there, self.policy.recent)
        return baseline.z_of_newest(value, recent) > self.policy.recent_z

    def _open(
        self, state: SpikeState, window: Window, step: int, value: float, z: float, row: Float64
    ) -> Spike:
        policy, spacing = self.policy, state.progress.spacing
        usual, quartile = np.quantile(np.array(state.baseline.values), [0.5, 0.75])
        who, rank_value = self._carrier(state, window.ranks, row)
        state.onsets.append(state.progress.count)
        while state.onsets[0] <= state.progress.count - policy.recurrent_within:
            state.onsets.popleft()
        spikes = len(state.onsets)
        # One that keeps coming back is one alert and not one each time.
        calm = policy.calm if spikes < policy.recurrent else 20 * policy.calm
        before = spacing.steps(policy.rise_before)
        leap = state.leaps.at(step)
        rise = state.companions.raised_rate(step, before=before, factor=policy.rise)
        rise = rise if leap is None else None
        return Spike(
            first_step=step,
            seen_step=step,
            last_step=step,
            clear_after=spacing.steps(calm),
            value=value,
            z=z,
            usual=float(usual),
            highest=state.baseline.highest,
            quartile=float(quartile),
            progress=state.progress.scale,
            positive=state.baseline.positive and value > 0,
            ranks=who,
            rank_value=rank_value,
            rise=rise,
            restarted=state.companions.restarted(rise, before=before),
            gradient=state.companions.gradient_rose_first(step) if leap is None else None,
            leap=leap,
            optimizer=str(window.config.get("optimizer", "")),
            peak=value,
            peak_step=step,
            recent=deque([value], maxlen=64),
            spikes=spikes,
        )

    def _carrier(
        self, state: SpikeState, known: Int64, row: Float64
    ) -> tuple[tuple[int, ...], float]:
        """The one rank whose own rise makes up the mean's, if there is one."""
        before = state.history.matrix(known)
        usable = ~np.isnan(row) & ~np.isnan(before).all(axis=0)
        if usable.sum() < 2:
            return (), math.nan
        rises = row[usable] - np.nanmedian(before[:, usable], axis=0)
        highest = int(np.argmax(rises))
        if rises[highest] < self.policy.carried * np.maximum(rises, 0.0).sum():
            return (), math.nan
        return (int(known[usable][highest]),), float(row[usable][highest])

    def _follow(
        self,
        state: SpikeState,
        incident: Spike,
        step: int,
        value: float,
        known: Int64,
        row: Float64,
    ) -> None:
        policy = self.policy
        incident.observations += 1
        incident.recent.append(value)
        abnormal = (
            (value < 0)
            if incident.negated
            else (
                value > incident.highest
                and (not incident.positive or value > policy.min_ratio * incident.usual)
                and value - incident.usual > policy.min_progress * state.progress.scale
            )
        )
        if abnormal:
            if incident.calm:
                # The loss had come back: this is a further jump.
                incident.in_a_row = 0
            if incident.calm >= policy.calm:
                incident.spikes += 1
                state.onsets.append(state.progress.count)
            incident.in_a_row += 1
            incident.longest = max(incident.longest, incident.in_a_row)
            if incident.calm:
                who = self._carrier(state, known, row)[0]
                self._hold_against_targets(state, incident, step, value, who)
            incident.calm = 0
            incident.high += 1
            incident.count_answers(state.few.explain(step, value - incident.usual))
            incident.last_step = step
            if value > incident.peak:
                incident.peak, incident.peak_step = value, step
        else:
            incident.calm += 1
            state.baseline.accept(value)
        incident.returned |= value >= 0 if incident.negated else value <= incident.quartile
        incident.stayed |= not incident.returned and incident.observations >= policy.return_within
        if not incident.phase and incident.observations <= policy.return_within:
            incident.phase = state.phases.began(incident.first_step, step)
        if incident.observations == policy.return_within:
            values = list(incident.recent)
            early, late = float(np.median(values[:BLOCK])), float(np.median(values[-BLOCK:]))
            incident.learns = early - late > policy.learning * (early - incident.usual)

    def _hold_against_targets(
        self, state: SpikeState, incident: Spike, step: int, value: float, who: tuple[int, ...]
    ) -> None:
        """Whether a jump is that of its targets, which are odd as often as the data have such."""
        explained = state.targets.explain(step, value - incident.usual)
        if explained:
            state.odd.append(step)
            state.carriers.append(who)
        elif explained is not None:
            state.others += 1
        carriers = Counter(state.carriers).most_common(1)
        alone = carriers[0][1] if carriers and carriers[0][0] else 0
        # All of them on one of two ranks is chance, with few.
        one = 2.0 ** (1 - alone) < _CHANCE and alone == len(state.odd)
        # Of what was not sampled nothing is known: it is like the rest.
        most = len(state.odd) > _FEW_OTHERS * state.others
        incident.odd_targets = (
            most and not one and bool(state.odd) and state.targets.of_data(state.odd, step)
        )

    def _settle(self, state: SpikeState, incident: Spike) -> None:
        """Where the loss has stayed above, its new level is the measure from now on."""
        if incident.observations >= self.policy.settle_after:
            state.baseline = Baseline()
            state.history = RankHistory(64)
            for value in incident.recent:
                state.baseline.accept(value)

    def _finding(self, incident: Spike) -> Finding:
        policy = self.policy
        return spike_finding(
            incident,
            recurrent=policy.recurrent,
            lasting=policy.lasting,
            carried_progress=policy.carried_progress,
        )

    def _check(self, window: Window, state: SpikeState) -> Check:
        if state.incident is not None:
            return Check(Status.OPEN, f"{self._finding(state.incident).title}.")
        if thrown_back := state.relapse.title(window.last_step):
            return Check(Status.OPEN, f"{thrown_back}.")
        if not state.judged:
            have, need = len(state.baseline), self.policy.evidence
            return Check(
                Status.INSUFFICIENT_DATA, f"{count(have, 'finite loss value')} of {need} needed."
            )
        past = len(state.onsets)
        before = f"; {count(past, 'spike')} before" if past else ""
        return Check(
            Status.OK, f"{count(state.judged, 'step')} judged against the 64 before each{before}."
        )
