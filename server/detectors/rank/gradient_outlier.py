"""A rank whose gradients are not of the others' size."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.effects import EPISODE, Rule
from rankscope.server.detectors.mechanisms.equal_distances import beat, tail
from rankscope.server.detectors.mechanisms.history import RankHistory
from rankscope.server.detectors.mechanisms.loss_weights import INPUTS, LossWeights
from rankscope.server.detectors.mechanisms.peers import Change, PeerChange
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.statistics import (
    Spacing,
    change_point,
    others_median,
    rank_rows,
)
from rankscope.server.detectors.mechanisms.wording import count
from rankscope.server.detectors.policy import Count, Observations, Share, Sigmas, Times
from rankscope.server.detectors.rank.arithmetic import Arithmetic, ArithmeticPolicy
from rankscope.server.detectors.rank.opposed import OpposedGradients
from rankscope.server.detectors.rank.outlier_findings import GradientOutlier, gradient_finding
from rankscope.server.window import Check, Float64, Int64, Window


@dataclass(frozen=True, slots=True)
class GradientOutlierPolicy(ArithmeticPolicy):
    """Thresholds of `rank.gradient_outlier`; counts are samples.

    Attributes:
        size: largest number of samples in a window.
        least: smallest number of samples in a window.
        min_factor: ratio of the rank's norm and the others', either way, from which on it is
            reported.
        min_z: mean of the logarithm over its standard error that has to be reached; with N samples,
            1 + 10 / N times that.
        min_spread: mean of the logarithm as a multiple of the range of the others' own.
        least_level: size of gradients, as a share of that in the first `size` samples, below which
            they no longer matter.
        windows: consecutive windows that open an incident.
        burst_factor: a rank's norm over its usual one, from which on a single sample is a burst.
        burst_deviations: the same in standard deviations of its own norms.
        bursts: smallest number of bursts of a rank.
        burst_chance: probability that chance gives any rank as many bursts.
        burst_memory: number of samples among which bursts are counted.
        beats: smallest number of bursts at equal distances, where these are as improbable.
        shortest_beat: smallest distance of such bursts, in samples.
        memory: number of samples that show what is usual and among which the onset is looked for.
        renewed: samples after which a rank's usual norm is measured anew.
        calm: samples without it after which it is over.
    """

    size: Observations = 30
    least: Observations = 8
    min_factor: Times = 2.0
    min_z: Sigmas = 6.0
    min_spread: Times = 3.0
    least_level: Share = 0.2
    windows: Count = 2
    burst_factor: Times = 5.0
    burst_deviations: Sigmas = 4.0
    bursts: Count = 4
    burst_chance: Share = 1e-5
    burst_memory: Observations = 1024
    beats: Count = 5
    shortest_beat: Observations = 8
    memory: Observations = 256
    renewed: Observations = 16
    calm: Observations = 30


@dataclass(slots=True)
class GradientOutlierState:
    """What is remembered.

    Attributes:
        norms: logarithms of the ranks' local norms.
        deviations: the same, minus the median of the other ranks'.
        arithmetic: laws that gradients keep, and ranks that broke one.
        first: medians over the ranks at the first samples.
        events: sample, step, rank and factor of each burst.
        usual, limit: of `deviations` by rank, as they were some samples ago; NaN for too few.
        far: number of the last sample of which any rank was further from the others than an outlier
            has to be; most runs have none, and are to cost almost nothing.
        firing: consecutive windows in which a rank stood out.
        offset: what is wrong at present at nearly every sample.
        bursting: rank -> what is wrong with it now and then.
        members: ranks that are compared: the largest class of replicas.
        weights: what their losses are multiplied by.
        opposed: where their gradients point.
    """

    norms: RankHistory
    deviations: RankHistory
    arithmetic: Arithmetic
    events: deque[tuple[int, int, int, float]] = field(default_factory=deque)
    usual: Float64 = field(default_factory=lambda: np.empty(0))
    limit: Float64 = field(default_factory=lambda: np.empty(0))
    first: list[float] = field(default_factory=list)
    spacing: Spacing = field(default_factory=Spacing)
    far: int = -(2**62)
    firing: int = 0
    judged: int = 0
    offset: GradientOutlier | None = None
    bursting: dict[int, GradientOutlier] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    peers: PeerChange | None = None
    weights: LossWeights = field(default_factory=LossWeights)
    opposed: OpposedGradients = field(default_factory=OpposedGradients)

    def present(self) -> Iterator[tuple[str, GradientOutlier]]:
        """What is wrong at present, by key."""
        if self.offset is not None:
            yield "", self.offset
        for rank, known in sorted(self.bursting.items()):
            yield f"bursts:{rank}", known

    def forget(self, policy: GradientOutlierPolicy) -> None:
        """Other ranks are replicas of each other now."""
        self.norms, self.deviations = RankHistory(policy.size), RankHistory(policy.memory)
        self.events.clear()
        self.usual = self.limit = np.empty(0)
        self.firing = 0
        self.peers = None


class RankGradientOutlier(Detector[GradientOutlierState]):
    """One rank's own gradients are several times as large as the others', always or now and then.

    Norms of local gradients differ between ranks by what their batches differ. A rank that sums
    where the others average, counts its micro-batches wrongly, reads inputs of another scale or
    computes on a faulty device differs always to the same side, or in bursts that the others do not
    have. The reduction mixes it into every copy, so that no comparison of parameters shows it.

    Statistic:
        d = logarithm of `grad_norm_local` minus the median of the other ranks' at the same step.
        Offset: over N = 8 to 30 samples, the mean of d is more than 6 (1 + 10 / N) standard errors
        from 0, a factor of more than 2, and more than 3 times the range of the norms of the ranks
        that do not stand out; at two consecutive samples. The onset is the change point of d in the
        last 256 samples. Bursts: samples at which d lies more than a factor of 5 and 4 standard
        deviations above the rank's own median; a rank has 4 or more of the last 1,024 samples'
        bursts and more than its share by chance (binomial, 1e-5), or 5 or more of its own at equal
        distances of 8 samples or more, at half of such samples or more, while what it has at other
        samples makes that as improbable. Not judged where the norms have fallen below a fifth of
        those of the first samples. Over after 30 samples without, or 3 times the longest gap, or 5
        of the equal distances.
        Smaller offsets, sooner: the logarithm of the norm over the median of all has moved by more
        than 8 standard errors and 2 standard deviations, twice as far as it ever wandered, and no
        other rank's by half as much. Norms are not compared where losses are multiplied by their
        ranks' shares of the samples: batches of other sizes scatter otherwise.
        Laws: a tensor whose local gradient sums to zero, to 1e-5 of its
        norm times the root of its size, on all ranks at 8 samples or more (that of a bias before a
        softmax does), and at a later one does not on one rank, by 30 times what any rank has left
        over at the last 64 such samples; where that rank alone looked, it counts once the law is
        seen to be kept again. Known of tensors with as many elements as a sketch has buckets, 64,
        or fewer.
        Directions: the cosine of a rank's gradient to the mean of the others', over the last third
        of the samples (12 blocks of 8 or more), is below -0.12 and 6 standard errors below 0; it
        was above -0.15 at the first 16 samples, and has fallen by 0.08 since. Its power against the
        others is at least 0.9 of what it was in the middle third, and 5 % of the gradient's at
        first, while the loss has come less than a fifth of its way down in between; at 4 blocks in
        a row. Unlike shards oppose each other at first, and less as the loss falls; data that
        contradict each other do so for good. Or it is below -0.8 from the first sample on, and the
        loss has not come down by a twentieth: the gradients cancel. Not judged where every batch
        comes twice and more.

    Severity:
        Warning; info where nothing indicates which of the ranks is wrong and it was so from the
        first sample on, and where a law was broken at fewer than 3 samples, or by several ranks.

    Evidence:
        `factor` (the rank's norm over the others'), `z`, `others` (their median norm), `looks`,
        `bursts`, and `period` (steps) of those at equal distances. Of a law: `share` (the largest
        sum, over the norm times the root of the size), `usual` (the same while all ranks kept the
        law), `looks`. Of directions: `pattern` (`opposed`), `cosine`,
        `cosine_before` (at the beginning), `loss`.

    Source:
        Paired comparison against the median of the peers, as `rank.loss_outlier` does it on the
        loss; on recorded trainings an offset of 6 was reported within 100 steps, and a gradient
        that is 50 times as large every 37th step after 180 to 340. What a device does wrong by less
        than batches differ (silent data corruption of 1e-3, arXiv 2502.12340) norms cannot show,
        and the laws can: what rounding leaves over is a ten-millionth. Yu et al. (2020), Gradient
        Surgery for Multi-Task Learning: what tasks have against each other is a negative cosine.
    """

    kinds = ("rank.gradient_outlier",)
    needs = ("grad_norm_local",)
    wants = ("loss", "samples", *INPUTS)
    min_ranks = 2
    effects = (
        Rule(
            root=("rank.gradient_outlier",),
            root_key="opposed",
            consequence=("batch.noise", "loss.plateau", "accuracy.stalled"),
            earliest=-EPISODE,
            same_ranks=False,
            why="gradients that point against each other cancel",
        ),
    )

    policy: GradientOutlierPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """A window of samples at a rank that stands out, and another one; and a beat."""
        policy, seen = self.policy, ("grad_norm_local",)
        # Bursts that lie twice the shortest distance apart; of those that lie further apart, or are
        # few, nothing shows how many samples they need.
        beats = 2 * policy.beats * policy.shortest_beat
        return (
            Reach(seen, policy.size + policy.windows - 1, LASTS_SAMPLED, moves="from zero"),
            Reach(seen, beats, LASTS_SAMPLED),
        )

    def start(self) -> GradientOutlierState:
        """Nothing seen yet."""
        policy = self.policy
        return GradientOutlierState(
            RankHistory(policy.size), RankHistory(policy.memory), Arithmetic(policy)
        )

    def advance(self, window: Window, state: GradientOutlierState) -> Outcome:
        """Looks at every step at which all ranks report their norm."""
        findings: list[Finding] = []
        for made in window.element_sums:
            state.arithmetic.observe(made)
        state.opposed.take(window)
        steps, rows = rank_rows(window, "grad_norm_local")
        state.weights.take(window)
        # Ranks that hold different tensors (pipelines, tensor parallelism) have norms of their own.
        chosen = np.flatnonzero(np.isin(window.ranks, max(window.replicas, key=len)))
        members = window.ranks[chosen]
        if not set(state.members) <= set(members.tolist()):
            state.forget(self.policy)
        state.members = tuple(members.tolist())
        norms = np.where(rows[:, chosen] > 0, rows[:, chosen], np.nan)
        there = np.isfinite(norms).sum(axis=1)
        judged = (there > 1) & (2 * there >= norms.shape[1])
        if state.weights.by_samples:
            # Their means are comparable, and what batches of other sizes scatter is not.
            judged[:] = False
        steps, norms = steps[judged], norms[judged]
        logs = np.log(norms)
        deviations = logs - others_median(logs)
        furthest = np.nan_to_num(np.abs(deviations)).max(axis=1, initial=0.0).tolist()
        for index, step in enumerate(steps.tolist()):
            if state.offset is not None and state.offset.calm >= state.offset.patience:
                findings.append(gradient_finding(state.offset, ""))
                state.offset = None
            for rank, known in sorted(state.bursting.items()):
                if known.calm >= known.patience:
                    findings.append(gradient_finding(known, f"bursts:{rank}"))
                    del state.bursting[rank]
            state.judged += 1
            state.spacing.push(step)
            state.norms.push(step, members, logs[index].copy())
            state.deviations.push(step, members, deviations[index].copy())
            if len(state.first) < self.policy.size:
                state.first.append(float(np.nanmedian(norms[index])))
            if furthest[index] > math.log(self.policy.min_factor):
                state.far = state.judged
            if state.peers is None:
                state.peers = PeerChange(members.copy())
            for change in state.peers.push(step, norms[index]):
                self._changed(state, step, norms[index], members, change)
            if state.judged >= self.policy.least:
                self._judge(state, step, members, logs[index], deviations[index])
            for _, known in state.present():
                known.observed(step)
        for key, known in state.present():
            if not known.calm:
                # Until a sample shows otherwise.
                known.last_step = max(known.last_step, window.last_step)
            findings.append(gradient_finding(known, key))
        findings += state.arithmetic.take() + state.opposed.findings(window)
        return Outcome({"rank.gradient_outlier": _check(state, self.policy)}, tuple(findings))

    def _judge(
        self,
        state: GradientOutlierState,
        step: int,
        members: Int64,
        logs: Float64,
        deviations: Float64,
    ) -> None:
        policy, near = self.policy, state.judged - state.far
        material = math.log(policy.least_level * median(state.first))
        # No mean of values that are all near is far.
        if near < policy.size:
            self._offset(state, step, members, material)
        else:
            state.firing = 0
        # Nor is one of them far from their median.
        if near < policy.memory or policy.min_factor**2 >= policy.burst_factor:
            self._burst(state, step, members, logs, deviations, material)
        else:
            state.usual = state.limit = np.empty(0)

    def _offset(
        self, state: GradientOutlierState, step: int, members: Int64, material: float
    ) -> None:
        policy, known = self.policy, members
        norms = state.norms.matrix(known)
        recent = state.deviations.matrix(known, last=policy.size)
        samples = np.isfinite(recent).sum(axis=0)
        usable = samples >= policy.least
        norms, recent, samples = norms[:, usable], recent[:, usable], samples[usable]
        known = known[usable]
        if len(known) < 2:
            return  # ranks have joined, or sample other steps
        mean = np.nanmean(recent, axis=0)
        error = np.nanstd(recent, axis=0, ddof=1) / np.sqrt(samples)
        size = np.abs(mean)
        least = policy.min_z * (1 + 10 / samples) * error
        fires = (size > math.log(policy.min_factor)) & (size > least)
        top = int(np.argmax(size))
        own = np.nanmedian(norms, axis=0)
        same = fires & (np.sign(mean) == np.sign(mean[top]))
        # Of four ranks two above and two below: nothing shows which are wrong.
        decided = len(known) > 2 and 2 * int(same.sum()) < len(known)
        sides = (own[~same],) if decided else (own[mean < 0], own[mean >= 0])
        spread = max(float(np.ptp(side)) for side in sides if len(side))
        stands = bool(fires[top]) and bool(
            size[top] > policy.min_spread * spread and own.max() > material
        )
        state.firing = state.firing + 1 if stands else 0
        if not stands or (state.offset is None and state.firing < policy.windows):
            return
        suspects = same if decided else fires
        if state.offset is None:
            state.offset = GradientOutlier(
                first_step=_onset(state.deviations, members, members.searchsorted(known[top])),
                seen_step=step,
                last_step=step,
                clear_after=0,
                ranks=(),
                decided=decided,
                factor=1.0,
                z=0.0,
                others=0.0,
                samples=0,
            )
            state.offset.from_start = state.offset.first_step == state.spacing.first
        incident = state.offset
        incident.last_step = incident.found_at = step
        incident.patience = policy.calm
        incident.clear_after = state.spacing.steps(policy.calm)
        incident.ranks = tuple(int(r) for r in known[suspects])
        incident.decided = decided
        incident.factor = float(np.exp(mean[top] if decided else size[top]))
        incident.z = float(size[top] / error[top]) if error[top] > 0 else math.inf
        incident.others = float(np.exp(np.median(own[~suspects] if not suspects.all() else own)))
        incident.samples = int(samples[top])

    def _changed(
        self,
        state: GradientOutlierState,
        step: int,
        norms: Float64,
        members: Int64,
        change: Change,
    ) -> None:
        """Takes a norm that has moved by little, and clearly."""
        others = norms[~np.isin(members, change.ranks)]
        usual = float(np.nanmedian(others if len(others) else norms))
        if change.question != "shift" or usual <= self.policy.least_level * median(state.first):
            return
        incident = state.offset
        if incident is not None and (incident.factor > 1) != (change.size > 0):
            state.peers = None  # back to where it was: from here on it is like the others again
            return
        if incident is None:
            incident = state.offset = GradientOutlier(
                first_step=change.first_step,
                seen_step=step,
                last_step=step,
                clear_after=state.spacing.steps(self.policy.calm),
                ranks=change.ranks,
                decided=len(change.ranks) < len(members),
                factor=float(np.exp(change.size)),
                z=change.z,
                others=usual,
                samples=change.count,
            )
        incident.last_step = incident.found_at = step
        incident.patience = self.policy.calm

    def _burst(
        self,
        state: GradientOutlierState,
        step: int,
        known: Int64,
        norms: Float64,
        deviations: Float64,
        material: float,
    ) -> None:
        policy = self.policy
        if len(state.limit) != len(known) or state.judged % policy.renewed == 0:
            self._renew(state, known)
        while state.events and state.events[0][0] <= state.judged - policy.burst_memory:
            state.events.popleft()
        with np.errstate(invalid="ignore"):
            burst = (deviations - state.usual > state.limit) & (norms > material)
        for index in np.flatnonzero(burst).tolist():
            rank = int(known[index])
            state.events.append((state.judged, step, rank, float(deviations[index])))
            self._recurring(state, step, rank, known, float(np.nanmedian(np.delete(norms, index))))

    def _recurring(
        self, state: GradientOutlierState, step: int, rank: int, known: Int64, others: float
    ) -> None:
        """Whether a rank's bursts are more than chance gives, by their number or their distances.

        Args:
            others: logarithm of the other ranks' norm.
        """
        policy, samples = self.policy, min(state.judged, self.policy.burst_memory)
        mine = [event for event in state.events if event[2] == rank]
        period = math.nan
        at = np.array([event[0] for event in mine])
        regular = beat(at, samples, least=policy.beats, shortest=policy.shortest_beat)
        if regular is not None and len(known) * regular.chance <= policy.burst_chance:
            mine = [event for event in mine if event[0] in regular.samples]
            gaps = (mine[-1][0] - mine[0][0]) // regular.period
            period = (mine[-1][1] - mine[0][1]) / gaps
        else:
            chance = len(known) * tail(len(state.events), len(mine), 1 / len(known))
            if len(mine) < policy.bursts or chance > policy.burst_chance:
                return
        incident = state.bursting.get(rank)
        if incident is None:
            incident = state.bursting[rank] = GradientOutlier(
                first_step=mine[0][1],
                seen_step=step,
                last_step=step,
                clear_after=0,
                ranks=(rank,),
                decided=True,
                factor=1.0,
                z=0.0,
                others=0.0,
                samples=0,
            )
        longest = max(later[0] - earlier[0] for earlier, later in pairwise(mine))
        incident.last_step = incident.found_at = step
        # A beat of which some cannot be judged is over when as many are missing as make one.
        missing = policy.beats * regular.period if regular and math.isfinite(period) else 0
        incident.patience = max(policy.calm, 3 * longest, missing)
        incident.clear_after = state.spacing.steps(incident.patience)
        incident.factor = float(np.exp(median([event[3] for event in mine])))
        incident.others = float(np.exp(others))
        incident.samples, incident.bursts, incident.period = samples, len(mine), period

    def _renew(self, state: GradientOutlierState, known: Int64) -> None:
        """What is usual for each rank, from time to time."""
        deviations = state.deviations.matrix(known)
        usable = np.isfinite(deviations).sum(axis=0) >= self.policy.least
        state.usual, state.limit = np.full((2, len(known)), np.nan)
        deviations = deviations[:, usable]
        state.usual[usable] = usual = np.nanmedian(deviations, axis=0)
        spread = 1.4826 * np.nanmedian(np.abs(deviations - usual), axis=0)
        state.limit[usable] = np.maximum(
            self.policy.burst_deviations * spread, math.log(self.policy.burst_factor)
        )


def _onset(history: RankHistory, known: Int64, column: int) -> int:
    """Since which sample a rank stands out; the first one known where no change is seen."""
    deviations, steps = history.matrix(known)[:, column], history.steps()
    there = np.isfinite(deviations)
    at, before, after = change_point(deviations[there])
    return int(steps[there][0] if abs(before) >= 0.5 * abs(after) else steps[there][at])


def _check(state: GradientOutlierState, policy: GradientOutlierPolicy) -> Check:
    if state.judged < policy.least:
        return Check.insufficient(
            f"{count(state.judged, 'sample')} of {policy.least} at all ranks' local gradients."
        )
    return Check.ok(f"Norms of the ranks' own gradients compared at {count(state.judged, 'step')}.")
