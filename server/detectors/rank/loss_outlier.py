"""A rank whose loss is not like the others'."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import LASTS, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.disjoint_steps import Turns
from rankscope.server.detectors.mechanisms.history import RankHistory
from rankscope.server.detectors.mechanisms.loss_weights import (
    INPUTS,
    LossWeights,
    shares_of_samples,
)
from rankscope.server.detectors.mechanisms.peers import Change, PeerChange, either_way
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.statistics import (
    Progress,
    change_point,
    grows_with,
    median_of_sorted,
    others_median,
)
from rankscope.server.detectors.mechanisms.wording import count
from rankscope.server.detectors.policy import Count, Observations, Policy, Share, Sigmas, Times
from rankscope.server.detectors.rank.gradual import came_gradually
from rankscope.server.detectors.rank.loss_samples import LossSamples
from rankscope.server.detectors.rank.outlier_findings import LossOutlier, loss_finding
from rankscope.server.detectors.rank.rank_answers import RankAnswers
from rankscope.server.window import Check, Float64, Int64, Window

_MAX_EARLIER = 64
# Of the progress since the first five steps, what those themselves may have made at most: a first
# loss may be an outlier.
_FIRST_STEPS = 10.0


@dataclass(frozen=True, slots=True)
class LossOutlierPolicy(Policy):
    """Thresholds of `rank.loss_outlier`; counts are observations.

    Attributes:
        size: number of observations in a window.
        stride: number of observations from one window to the next.
        min_z: smallest mean difference over its standard error.
        min_level: smallest mean difference as a share of the others' level.
        min_progress: smallest mean difference as a share of the progress made. Shards of 25 samples
            each, memorised, came to 0.053.
        memorised_progress: the same where each sample has come many times.
        min_spread: smallest mean difference as a multiple of the range of the other ranks' own:
            where shards are unlike, all ranks differ, and one that lies a little further out is no
            outlier. Where nothing shows which side is wrong, of the range on either side.
        windows: consecutive windows that open an incident.
        critical_level: difference as a share of the level, from which on it is critical, with
            `critical_progress`.
        critical_progress: the same as a share of the progress made.
        same_side: share of the largest difference from which on another rank is suspect too.
        undecided: share of the largest difference from which on a rank on the other side leaves
            open which one is wrong.
        memory: number of observations among which the onset is looked for.
        established: share of the difference, relative to the level, that was there in the windows
            before the onset: from here on there is no onset, and the difference is as old as the
            run.
        begun: the same where as many ranks lie on one side as on the other: their losses may part
            as they fall, so a smaller share is enough.
        calm: windows without it after which it is over.
        knows: share of the deviance that the other ranks' answers explain, from which on they have
            learned what a rank without any such share has not.
    """

    size: Observations = 50
    stride: Observations = 10
    min_z: Sigmas = 6.0
    min_level: Times = 0.2
    min_progress: Times = 0.06
    memorised_progress: Times = 0.25
    min_spread: Times = 3.0
    windows: Count = 2
    critical_level: Times = 1.0
    critical_progress: Times = 0.25
    same_side: Share = 0.6
    undecided: Share = 0.8
    memory: Observations = 128
    established: Share = 0.5
    begun: Share = 0.33
    knows: Share = 0.05
    calm: Count = 15


@dataclass(slots=True)
class LossOutlierState:
    """What `rank.loss_outlier` remembers.

    Attributes:
        earlier: of windows that do not overlap, since the start: the last step, their level, and by
            rank the mean difference (of losses that pass through zero its median). Of many, every
            second one.
        turns: of each series, where workers never have a step in common.
        positive: whether all losses were: to divide by a level that passes through zero says
            nothing.
    """

    losses: RankHistory
    answers: RankAnswers
    earlier: list[tuple[int, float, Mapping[int, float]]] = field(default_factory=list)
    turns: dict[str, Turns] = field(
        default_factory=lambda: {n: Turns() for n in ("loss", "accuracy", "explained_deviance")}
    )
    positive: bool = True
    progress: Progress = field(default_factory=Progress)
    since: int = 0
    windows: int = 0
    firing: int = 0
    incident: LossOutlier | None = None
    peers: PeerChange | None = None
    weights: LossWeights = field(default_factory=LossWeights)
    samples: LossSamples = field(default_factory=LossSamples)


class RankLossOutlier(Detector[LossOutlierState]):
    """One rank's loss differs from the others', step after step.

    Single batches differ, and so does the loss of every rank at every step; a rank that trains on
    wrong labels, another shard or another preprocessing differs always to the same side.

    Statistic:
        d = the rank's loss minus the median of the other ranks' at the same step, over 50
        observations. It fires where the mean of d is more than 6 standard errors from 0, more than
        20 % of the others' level, more than 6 % of the progress made since the start (25 % where
        each sample has come 8 times or more: what is memorised differs for good), and more than
        3 times the range of the mean losses of the ranks that do not stand out with it (of those on
        either side where half of them differ), in two
        windows in a row, 10 observations apart. The onset is the change point of d, cut off at what
        it is now on either side, in the last 128 observations (two means, least squares); where d
        over the level (where losses pass through zero, d) was half as large as now in the windows
        before it (their median), a third of two halves, it has been there from the first step on.
        So it has where d grows in proportion to how far the others' loss has fallen since the
        start, and a step before which there was nothing of it is not significantly better (largest
        F of all such steps below 12.35): losses are alike at first whatever the labels are. It is
        over after 15 windows without. Of two halves that one rank is named
        whose answers alone explain less than nothing of the deviance (by 6 standard errors), where
        those of each other rank explain more than a twentieth. With these, and no more than nothing
        on average, a rank is named whose loss is above the others' by less than the 20 %.
        Sooner, and where the difference is small but clear: the logarithm of the rank's loss over
        the median of all has moved by more than 8 standard errors and 2 standard deviations, twice
        as far as it ever wandered, while no other rank's moved by half as much; or 4 or more single
        ones of it lie further away than any before, with a chance below 1e-8 of as many late and of
        one rank (32 observations or more of 8 samples or more, judged at every 8th). Losses that
        are multiplied by their ranks' shares of the samples are divided by them first (of a cross
        entropy, of which the mean is known). Workers that never have a step in common (an
        asynchronous parameter server) are compared in rounds: as soon as each has a new loss, by
        the mean of what it has.

    Severity:
        Warning; critical where the mean of d is above the others' level and above 25 % of the
        progress made. Info where half of the ranks differ and did so from the first 50
        observations on: two ranks, or two pairs of them, whose data differ are as likely as a
        fault. Of two ranks not where it would be critical: no data are as unlike as that. Info for
        single losses that are smaller than usual again and again, and for a loss that has come to
        lie below the others' little by little, by less than 25 % of the progress made.

    Evidence:
        `difference` (mean of d), `z`, `level` (the others'), `progress`, `decided`; with two ranks
        `moved` (how far each one's own loss moved at the onset); `times` (single losses that stand
        out); `accuracy` and `accuracy_others` where they are posted.

    Source:
        Paired comparison against the median of the peers. On 64 healthy runs (per-rank batches down
        to 1) it never fired; it named the rank with random labels in all runs.
    """

    kinds = ("rank.loss_outlier",)
    needs = ("loss",)
    wants = ("accuracy", "samples", *INPUTS)
    min_ranks = 2

    policy: LossOutlierPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Windows in a row, of a rank whose loss stays an outlier."""
        policy = self.policy
        return (
            Reach(
                self.needs,
                policy.size + (policy.windows - 1) * policy.stride,
                LASTS,
                moves="at all",
            ),
        )

    def start(self) -> LossOutlierState:
        """Nothing seen yet."""
        policy = self.policy
        return LossOutlierState(
            losses=RankHistory(policy.memory),
            answers=RankAnswers.begin(policy.size, sigmas=policy.min_z, knows=policy.knows),
        )

    def advance(self, window: Window, state: LossOutlierState) -> Outcome:
        """Takes the window's losses, and looks at every tenth of them."""
        findings: list[Finding] = []
        steps, rows, posted = state.turns["loss"].rows(window, "loss")
        accuracies, explained = (
            dict(zip(*_listed(state.turns[name].rows(window, name)), strict=True))
            for name in ("accuracy", "explained_deviance")
        )
        state.weights.take(window)
        state.samples.take(window)
        if state.weights.by_samples:
            rows = rows / shares_of_samples(window, steps)
        ordered = np.sort(rows, axis=1)  # NaN last
        counts = np.isfinite(ordered).sum(axis=1)
        judged = (counts == posted) & (counts > 1)
        medians = median_of_sorted(ordered, np.maximum(counts, 1)).tolist()
        for index, step in enumerate(steps.tolist()):
            state.answers.push(step, window.ranks, accuracies.get(step), explained.get(step))
            if not judged[index]:
                continue
            if state.incident is not None and state.incident.over(step):
                findings.append(loss_finding(state.incident))
                state.incident = None
            state.progress.push(step, medians[index])
            state.losses.push(step, window.ranks, rows[index].copy())
            state.positive &= not bool((rows[index] <= 0).any())
            state.since += 1
            if not state.samples.like_before(step):
                state.peers = None  # of fewer samples, all scatter more
            else:
                for change in self._changes(state, step, window.ranks, rows[index]):
                    self._changed(state, window.ranks, change)
            if len(state.losses) >= self.policy.size and state.since >= self.policy.stride:
                state.since = 0
                self._judge(state, step, window.ranks)
        state.samples.visits.pass_to(window.last_step)  # also where no step could be judged
        if state.incident is not None:
            findings.append(loss_finding(state.incident))
        return Outcome({"rank.loss_outlier": self._check(state)}, tuple(findings))

    def _judge(self, state: LossOutlierState, step: int, known: Int64) -> None:
        policy = self.policy
        state.windows += 1
        losses = state.losses.matrix(known, last=policy.size)
        difference = losses - others_median(losses)
        usable = np.isfinite(difference).sum(axis=0) >= 0.8 * policy.size
        difference, rank_numbers = difference[:, usable], known[usable]
        if len(rank_numbers) < 2:
            state.firing = 0
            return
        mean = np.nanmean(difference, axis=0)
        error = np.nanstd(difference, axis=0) / math.sqrt(policy.size)
        counts = np.isfinite(losses).sum(axis=1)
        level = float(np.median(median_of_sorted(np.sort(losses, axis=1), counts)))
        scale = state.progress.scale
        size = np.abs(mean)
        if level and (state.windows - 1) % max(policy.size // policy.stride, 1) == 0:
            # Where none is measured by its level, the first ones, which scatter most, would make
            # the mean.
            usual = mean if state.positive else np.nanmedian(difference, axis=0)
            reported = dict(zip(rank_numbers.tolist(), usual.tolist(), strict=True))
            state.earlier.append((step, abs(level), reported))
            if len(state.earlier) > _MAX_EARLIER:
                del state.earlier[1::2]
        clear = (size > policy.min_z * error) & (size > self._least(state))
        fires = clear & (size > policy.min_level * abs(level))
        top = int(np.argmax(size))
        if clear[top] and not fires[top] and mean[top] > 0:
            # A loss that has hardly fallen yet differs by little, whatever a rank's labels are.
            rank = int(rank_numbers[top])
            fires[top] = state.answers.know_nothing(known, rank, worse=False)
        state.firing = state.firing + 1 if fires[top] else 0
        if not fires[top]:
            return
        same = fires & (np.sign(mean) == np.sign(mean[top]))
        other = fires & ~same & (size >= policy.undecided * size[top])
        side = same & (size >= policy.same_side * size[top])
        # Of two halves neither is the rule, also where the scatter of one hides that it differs.
        halves = 2 * side.sum() >= len(side)
        decided = not other.any() and not halves
        # Without all that stand out with it, since a second rank at fault, less so, must not hide
        # it; unless these are half of all, as they are where no two ranks' data are alike.
        rest = ~same if 2 * (~same).sum() > len(same) else ~side
        own = np.nanmean(losses[:, usable], axis=0)
        spread = np.ptp(own[rest])
        if not decided:
            # Of a few ranks that all differ, two often lie close together by chance.
            above = own > np.median(own)
            spread = max(np.ptp(own[above]), np.ptp(own[~above])) if above.any() else spread
        if size[top] <= policy.min_spread * spread:
            state.firing = 0
            return
        suspects = side if decided else same | other | halves
        if not decided and mean[worse := int(np.argmax(mean))] > 0:
            # Whatever its data are, a rank whose answers are worse than a constant one would be has
            # not been learned from, where those of all others are better.
            if state.answers.know_nothing(known, int(rank_numbers[worse]), worse=True):
                decided, suspects, top = True, np.arange(len(mean)) == worse, worse
        who = tuple(int(r) for r in rank_numbers[suspects])
        critical = bool(
            size[top] > policy.critical_level * abs(level)
            and size[top] > policy.critical_progress * scale
        )
        calm = state.progress.spacing.steps(policy.calm * policy.stride)
        incident = state.incident
        if incident is None:
            if state.firing < policy.windows:
                return
            onset, from_start, moved = self._onset(
                state, known, int(rank_numbers[top]), float(mean[top]), level, decided=decided
            )
            incident = state.incident = LossOutlier(
                first_step=onset,
                seen_step=step,
                last_step=step,
                clear_after=calm,
                ranks=who,
                decided=decided,
                world=len(rank_numbers),
                difference=0.0,
                z=0.0,
                level=level,
                progress=scale,
                critical=False,
                from_start=from_start,
                accuracies=(math.nan, math.nan),
                moved=moved,
            )
        incident.last_step = step
        incident.clear_after = calm
        incident.ranks, incident.decided, incident.world = who, decided, len(rank_numbers)
        incident.difference, incident.level = float(mean[top]), level
        incident.z = float(size[top] / error[top]) if error[top] > 0 else math.inf
        incident.progress = scale
        incident.critical |= critical
        incident.accuracies = state.answers.accuracies(known, who)
        incident.learned = (
            incident.recurring is None
            and decided
            and mean[top] < 0
            and size[top] < policy.memorised_progress * state.progress.from_first
            and came_gradually(state.losses, known, int(rank_numbers[top]), incident.first_step)
        )

    def _least(self, state: LossOutlierState) -> float:
        """The smallest difference that counts."""
        if state.samples.come_again:
            return self.policy.memorised_progress * state.progress.from_first
        # Who has left the start behind within five steps has come further than the scale says.
        progress = min(state.progress.from_first, _FIRST_STEPS * state.progress.scale)
        return self.policy.min_progress * progress

    def _changes(
        self, state: LossOutlierState, step: int, known: Int64, losses: Float64
    ) -> Iterator[Change]:
        """What the distances of the ranks say, of losses that are positive."""
        there = np.isfinite(losses)
        if (losses[there] <= 0).any():
            state.peers = None
            return
        if state.peers is None or not np.array_equal(state.peers.ranks, known):
            state.peers = PeerChange(known.copy())
        yield from state.peers.push(step, losses)

    def _changed(self, state: LossOutlierState, known: Int64, change: Change) -> None:
        policy = self.policy
        incident = state.incident
        if change.question == "recurring" and (
            state.samples.few or either_way(state.losses.matrix(known), known, change)
        ):
            return
        if incident is not None:
            if change.question == "shift" and (incident.difference > 0) != (change.size > 0):
                state.peers = None  # back to where it was: like the others again from here on
            elif set(change.ranks) & set(incident.ranks):
                incident.last_step = max(incident.last_step, change.seen_step)
                if incident.recurring is not None and change.question == "recurring":
                    incident.recurring = change
            return
        level = float(np.nanmedian(state.losses.matrix(known, last=policy.size)))
        difference = level * math.expm1(change.size)
        if abs(difference) < self._least(state):
            return
        losses = state.losses.matrix(known)
        column = int(np.searchsorted(known, change.ranks[0]))
        from_start = len(change.ranks) == 1 and _since_start(state, losses, column, difference)
        state.incident = LossOutlier(
            first_step=state.progress.spacing.first if from_start else change.first_step,
            seen_step=change.seen_step,
            last_step=change.seen_step,
            clear_after=state.progress.spacing.steps(policy.calm * policy.stride),
            ranks=change.ranks,
            decided=len(change.ranks) < len(known),
            world=len(known),
            difference=difference,
            z=change.z,
            level=level,
            progress=state.progress.scale,
            critical=False,
            from_start=from_start,
            accuracies=state.answers.accuracies(known, change.ranks),
            moved={},
            # What lags behind more and more is no single loss, though it shows in such ones first.
            recurring=change if change.question == "recurring" and not from_start else None,
        )

    def _onset(
        self,
        state: LossOutlierState,
        known: Int64,
        rank: int,
        mean: float,
        level: float,
        *,
        decided: bool,
    ) -> tuple[int, bool, Mapping[int, float]]:
        """Since which step a rank is an outlier, whether perhaps always, and who moved then.

        Args:
            mean: how far it does.
            level: of the other ranks' losses.
            decided: whether it is the one at fault.
        """
        policy = self.policy
        losses, steps = state.losses.matrix(known), state.losses.steps()
        column = int(np.searchsorted(known, rank))
        difference = (losses - others_median(losses))[:, column]
        there = np.isfinite(difference)
        held = _held(difference[there], mean)
        at, before, after = change_point(held)
        changed = abs(before) < 0.5 * abs(after)
        first = int(steps[there][at if changed else 0])
        by_level = state.positive and level != 0
        before_it = [
            reported[rank] / (its_level if by_level else 1.0)
            for last, its_level, reported in state.earlier
            if last < first and rank in reported
        ]
        if before_it:
            now = mean / abs(level) if by_level else mean
            share = median(before_it) / now if now else 0.0
            if share >= (policy.established if decided else policy.begun):
                return state.progress.spacing.first, True, {}
        # Losses are alike at first whatever the data; what differs shows while they fall.
        forgotten = state.progress.count - len(losses)
        if not changed:
            return first, forgotten < self.policy.size, {}
        if _since_start(state, losses, column, mean):
            return state.progress.spacing.first, True, {}
        early = not forgotten and at < policy.size
        late = steps >= first
        moved = {}
        for index, number_ in enumerate(known.tolist()):
            own = losses[:, index]
            new, old = own[late & np.isfinite(own)], own[~late & np.isfinite(own)]
            if len(new) and len(old):
                moved[number_] = float(np.median(new) - np.median(old))
        return first, early, moved

    def _check(self, state: LossOutlierState) -> Check:
        if not state.windows:
            return Check.insufficient(
                f"{count(len(state.losses), 'step')} with finite losses of two or more ranks; "
                f"{self.policy.size} needed."
            )
        return Check.ok(
            f"{count(state.windows, 'window')} of {self.policy.size} steps: no rank's loss lies "
            "off the others'."
        )


def _held(difference: Float64, mean: float) -> Float64:
    """Differences to the side of their mean, cut off at it on either side.

    Losses scatter most while they fall: what is further away than what is to be dated counts no
    more than that.
    """
    return np.clip(math.copysign(1.0, mean) * difference, -abs(mean), abs(mean))


def _since_start(state: LossOutlierState, losses: Float64, column: int, mean: float) -> bool:
    """Whether a rank lags behind the others by a share of what these have learned from the first.

    Args:
        losses: float64 [N, R], all that are remembered.
        mean: how far the rank's lie from the others' now.
    """
    if state.progress.count > len(losses) or mean <= 0:
        return False  # what came before was forgotten; whose loss is lower lags behind nobody
    others = others_median(losses)[:, column]
    difference = losses[:, column] - others
    there = np.isfinite(difference)
    return grows_with((state.progress.start - others)[there], _held(difference[there], mean))


def _listed(found: tuple[Int64, Float64, Int64]) -> tuple[list[int], Float64]:
    return found[0].tolist(), found[1]
