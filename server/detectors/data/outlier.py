"""One batch of one rank that is like none of the others, and whether it comes again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.agent.wire import NO_SAMPLE, SAMPLE_DIGESTS
from rankscope.server.detectors.base import Detector, Finding, Outcome, Reach
from rankscope.server.detectors.data import input_moments, moved_inputs, odd_inputs
from rankscope.server.detectors.data.changed_inputs import ChangedInputs
from rankscope.server.detectors.data.input_sizes import SERIES as INPUT_SIZES
from rankscope.server.detectors.data.input_sizes import InputSizes
from rankscope.server.detectors.data.outlier_findings import Batches, Odd, finding
from rankscope.server.detectors.data.received import RECEIVED, Received
from rankscope.server.detectors.data.unlike_inputs import UnlikeInputs
from rankscope.server.detectors.mechanisms.episode import Watch
from rankscope.server.detectors.mechanisms.statistics import (
    Progress,
    exceeds,
    rank_rows,
    robust_sigma,
)
from rankscope.server.detectors.mechanisms.wording import count
from rankscope.server.detectors.policy import Observations, Policy, Share, Sigmas, Times
from rankscope.server.window import Check, Float64, Window

_BACK = 64
# Observations after which it is found out anew what is usual.
_REFRESH = 16
_FLOOR = 0.05
# Not the largest: earlier outliers that did not stand out enough would hide the next ones.
_HIGHEST = 0.98
# Losses of the rank before and after it that are examined, and how many after it may be odd, too.
_AFTER = 4
_STILL_ODD = 1
# Outliers that are remembered.
_REMEMBERED = 32
# Outliers that make a cycle, how short it may be, and times it that may lie between two of them.
_CYCLES = 3
_SHORTEST = 8
_MISSED = 4


@dataclass(frozen=True, slots=True)
class OutlierPolicy(Policy):
    """Thresholds of `data.outlier`.

    Attributes:
        min_z: robust z of the logarithm of the rank's loss among the ranks', from which on it is an
            outlier.
        unlearned_z: the same where the loss is above that of the run's start.
        others_z: largest robust z of the other ranks' losses beside an outlier.
        min_ratio: smallest ratio of the loss to the 98 % quantile of all ranks' losses.
        min_progress: smallest rise over the rank's own median, as a share of the progress made.
        evidence: observations, of the last 64, that are needed before anything is judged.
        chance: probability that chance puts as many outliers on one rank, below which they are its
            own.
    """

    min_z: Sigmas = 10.0
    unlearned_z: Sigmas = 6.0
    others_z: Sigmas = 4.0
    min_ratio: Times = 3.0
    min_progress: Share = 0.2
    evidence: Observations = 32
    chance: Share = 0.01


@dataclass(slots=True)
class _Waiting:
    odd: Odd
    after: int = 0
    still: int = 0


@dataclass(frozen=True, slots=True)
class _Usual:
    """What the last losses are like: how they scatter, what few are above, each rank's median."""

    sigma: float
    high: float
    levels: Float64

    @classmethod
    def of(cls, values: Sequence[Float64]) -> _Usual:
        past = np.stack(values)
        deviations = past - np.median(past, axis=1, keepdims=True)
        # Of an odd number one is the median itself, which shows nothing of how they scatter.
        scattered = deviations[deviations != 0]
        sigma = max(robust_sigma(scattered), _FLOOR) if len(scattered) else _FLOOR
        high = float(np.quantile(past, _HIGHEST))
        return cls(sigma, high, np.exp(np.median(past, axis=0)))


@dataclass(slots=True)
class OutlierState:
    """What `data.outlier` remembers.

    Attributes:
        values: the last losses (logarithms, where all are positive), float64 [R] each.
            last_outlying: rank -> the last observation at which it stood out, by their number.
        suspects: samples of outliers that have been in no batch since that was as usual, as far as
            samples are reported; `acquitted` are the others.
    """

    judged: int = 0
    signed: bool = False
    ranks: tuple[int, ...] = ()
    values: deque[Float64] = field(default_factory=lambda: deque(maxlen=_BACK))
    usual: _Usual | None = None
    progress: Progress = field(default_factory=Progress)
    waiting: list[_Waiting] = field(default_factory=list)
    odd: deque[Odd] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    last_outlying: dict[int, int] = field(default_factory=dict)
    suspects: set[int] = field(default_factory=set)
    acquitted: set[int] = field(default_factory=set)
    watch: Watch[Batches] = field(default_factory=lambda: Watch(clear_after=16))
    inputs: InputSizes = field(default_factory=InputSizes)
    received: Received = field(default_factory=Received)
    odd_inputs: odd_inputs.OddInputs = field(default_factory=odd_inputs.OddInputs)
    moved: moved_inputs.MovedInputs = field(default_factory=moved_inputs.MovedInputs)
    unlike: UnlikeInputs = field(default_factory=UnlikeInputs)
    changed: ChangedInputs = field(default_factory=ChangedInputs)


class DataOutlier(Detector[OutlierState]):
    """One rank's batch has a loss like no other, while the other ranks' are as always.

    One broken or mislabelled sample, a file of another kind, an empty text. What it does to the
    gradient is in every copy of the model. And ranks whose inputs have become larger or smaller to
    stay so, as under another normalisation, while the others' have not, or that are distributed
    otherwise than the others': mirrored images, columns in another order, another tokenizer.

    Statistic:
        d = the logarithm of a rank's loss minus the median of the ranks'; z = d over the robust
        standard deviation of all ranks' d in the last 64 observations, of which there are 32 or
        more (0.05 at least). An outlier has z > 10 (6 where half of the start has been gained and
        the loss is above it again: worse than knowing nothing), a loss above 3 times what 98 % of
        all ranks' in those 64 are below, and above its own median by a fifth of the progress made,
        while no other rank has z > 4. None of the 4 losses of the rank before it has z > 4, and at
        most one of the 4 after it: what stays is `rank.loss_outlier`. They recur where the same
        batch is odd twice, where a sample was in two odd batches and in no other that was reported,
        where three come at the same distance (of 8 steps or more; up to 3 in between need not stand
        out), or where as many are of one rank alone as chance gives in fewer than 1 of 100 cases.
        Inputs: the logarithm of `input_rms`, of which 4 consecutive observations of a rank lie on
        one side of its median in the last 64 (16 at least), by a factor of 2 and by 8 robust
        standard deviations (0.02 at least), while the others moved less than a third as far. Or a
        rank's median over its first 16 lies apart from all others' by a factor of 5 (of two ranks,
        20), and these agree within the cube root of that distance. Or the mean of all ranks has
        moved so by a factor of 20, or of 2 where the median loss since then (of 4 to 32) lies above
        that of the 32 before by a tenth and 3 of their robust standard deviations. And single ones,
        on one rank or on all: further from the median of the rank's last 64 (16 at least) than a
        factor of 5, 10 robust standard deviations and 3 times the furthest of these, and at most
        one of the 4 after it. Kinds of inputs: the moments that agents report (`input_moments/...`,
        `token_moments/...`). Of the last 64 observations (or 32), in 8 blocks, a rank's distance
        from the median of the others' lies on one side in all blocks, is 8 times its standard error
        by them, and is above 0.4 standard deviations of a single sample (tokens: 0.2 in mean signs)
        and above 6 standard errors by the number of different samples a rank has read, while the
        others agree within a third of it; where it began in between, the move itself is as large, 6
        of its standard errors, and twice the furthest that 8 observations had been off before.
        Judged every 8 observations (of more than 64 ranks, every 32). Not of losses that go below
        0. Or the means over all ranks of 8 consecutive observations all lie beyond the last 64 (16
        at least) on one side, by as much, and the loss rose as above.

    Severity:
        Info for one; warning where they recur (inputs: at 3 steps, or one that is 1,000 times as
        large or small as usual and three times as far out as makes one odd), and for inputs of
        another size or kind. Info for kinds that have been different from the start, up to 1.5
        times the distance at which they count (of two ranks, 2 times): shards may be so.

    Evidence:
        `steps`, `losses`, `others` (median of the ranks), `z`, `pattern`, `period`; of inputs
        `factor` and `usual` (what they were before), with those of all ranks `loss_before` and
        `loss_after`, of single ones `steps`, `factors` and
        `period` (0: none); of kinds `distance` and `moments`, the series.

    Source:
        Peers as their own control, as in `rank.loss_outlier`; Chowdhery et al. (2022), PaLM, skip
        the batches after which the loss had jumped. Never on a healthy run of the corpus.
    """

    kinds = ("data.outlier",)
    needs = ("loss",)
    wants = (
        INPUT_SIZES,
        RECEIVED,
        "samples",
        "sample_elements",
        "loader_batches",
        *input_moments.SERIES,
    )
    policy: OutlierPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """One odd batch is one step."""
        return (Reach(self.needs, moves="at all"),)

    def advance(self, window: Window, state: OutlierState) -> Outcome:
        """Holds each rank's loss against the others' and those before."""
        if tuple(window.ranks.tolist()) != state.ranks:
            # Ranks that join later, mostly within the first steps.
            state.ranks = tuple(window.ranks.tolist())
            state.values.clear()
            state.usual = None
        held = _Held(window)
        steps, rows = rank_rows(window, "loss")
        whole = np.isfinite(rows).all(axis=1) & (rows.shape[1] > 1)
        steps, rows = steps[whole], rows[whole]
        if len(steps):
            least = rows.min(axis=1)
            logs = np.log(np.maximum(rows, np.finfo(np.float64).tiny))
            middles = np.median(logs, axis=1)
            above = (logs.max(axis=1) - middles).tolist()
            columns = zip(
                steps.tolist(),
                np.median(rows, axis=1).tolist(),
                least.tolist(),
                middles.tolist(),
                above,
                strict=True,
            )
            for n, (step, level, smallest, middle, most) in enumerate(columns):
                state.signed |= smallest < 0
                # A loss of 0 has no logarithm, and no sign either.
                if state.signed or not smallest > 0:
                    state.watch.good(step)
                    continue
                state.progress.push(step, level)
                self._take(step, rows[n], logs[n], middle, most, held, state)
        findings = tuple(finding(e) for e in state.watch.take(window.last_step))
        findings += tuple(state.inputs.take(window))
        state.received.take(window)
        received = state.received
        findings += tuple(state.odd_inputs.take(window, INPUT_SIZES, received))
        findings += tuple(state.moved.take(window, INPUT_SIZES, received))
        findings += tuple(_of_kinds(findings, state, window))
        return Outcome({"data.outlier": _check(state, self.policy)}, findings)

    def _take(
        self,
        step: int,
        row: Float64,
        values: Float64,
        middle: float,
        most: float,
        held: _Held,
        state: OutlierState,
    ) -> None:
        odd = -1
        scores: Float64 | None = None
        if len(state.values) >= self.policy.evidence:
            state.judged += 1
            if state.usual is None or state.judged % _REFRESH == 0:
                state.usual = _Usual.of(state.values)
            # Nearly every step stops here.
            least = min(self.policy.min_z, self.policy.unlearned_z, self.policy.others_z)
            if most > least * state.usual.sigma:
                scores = (values - middle) / state.usual.sigma
                odd = self._outlier(row, values, scores, state.usual, state)
        self._follow(step, scores, state)
        if scores is not None:
            for place in np.flatnonzero(scores > self.policy.others_z).tolist():
                before = state.last_outlying.get(state.ranks[place], -_AFTER)
                state.last_outlying[state.ranks[place]] = state.judged
                if place == odd and state.judged - before <= _AFTER:
                    odd = -1  # it differed before: it is no single batch
        if odd < 0:
            state.values.append(values.copy())
            if state.suspects:
                clear = state.suspects.intersection(held.rows_at(step))
                state.suspects -= clear
                state.acquitted |= clear
            state.watch.good(step)
            return
        digest, samples = held.of(odd, step)
        state.suspects |= samples - state.acquitted
        found = Odd(
            step=step,
            rank=state.ranks[odd],
            value=float(row[odd]),
            others=float(np.median(np.delete(row, odd))),
            z=float(values[odd] - middle) / state.usual.sigma if state.usual else math.nan,
            digest=digest,
            rows=samples,
        )
        state.waiting.append(_Waiting(found))

    def _outlier(
        self, row: Float64, values: Float64, scores: Float64, usual: _Usual, state: OutlierState
    ) -> int:
        """Place of the rank whose batch is odd; -1 where there is none, or more than one."""
        place = int(np.argmax(scores))
        # Of two, the other's is the same, the other way round.
        others = np.delete(np.abs(scores), place) if len(row) > 2 else np.zeros(1)
        # Where little was gained, the start is no measure: half of all losses lie above it.
        start = state.progress.start
        unlearned = 2 * state.progress.scale > start and exceeds(float(row[place]), start)
        if (
            scores[place] > (self.policy.unlearned_z if unlearned else self.policy.min_z)
            and others.max(initial=0.0) <= self.policy.others_z
            and values[place] > usual.high + math.log(self.policy.min_ratio)
            and row[place] - usual.levels[place] > self.policy.min_progress * state.progress.scale
        ):
            return place
        return -1

    def _follow(self, step: int, scores: Float64 | None, state: OutlierState) -> None:
        """What came after an outlier shows whether it was one batch."""
        for waiting in [*state.waiting]:
            place = state.ranks.index(waiting.odd.rank)
            waiting.after += 1
            waiting.still += scores is not None and bool(scores[place] > self.policy.others_z)
            if waiting.still > _STILL_ODD:
                state.waiting.remove(waiting)
            elif waiting.after >= _AFTER:
                state.waiting.remove(waiting)
                self._found(step, waiting.odd, state)

    def _found(self, step: int, odd: Odd, state: OutlierState) -> None:
        state.odd.append(odd)
        facts = _together(tuple(state.odd), state, self.policy.chance)
        recurs = facts.pattern != ""
        first = facts.odd[0].step if recurs else odd.step
        episode = state.watch.bad(step, facts, first_step=first)
        episode.facts = facts
        if recurs:
            # One that keeps coming back is one alert and not one each time.
            gaps = [b.step - a.step for a, b in zip(facts.odd, facts.odd[1:], strict=False)]
            episode.clear_after = max(episode.clear_after, 3 * max(gaps))


def _of_kinds(findings: tuple[Finding, ...], state: OutlierState, window: Window) -> list[Finding]:
    """Inputs of another kind, but for those that were found to be of another size alone."""
    resized = {f.ranks for f in findings if f.key.startswith("inputs:")}
    found = state.changed.take(window, state.received)
    unlike = state.unlike.take(window, state.received.since)
    # A loss that goes below 0 is the surrogate of a game: each rank plays one of its own.
    if not state.signed:
        found += unlike
    return [f for f in found if f.ranks not in resized]


class _Held:
    """What the batches of a window consist of, as far as it is reported."""

    def __init__(self, window: Window) -> None:
        self._column = {step: n for n, step in enumerate(window.steps.tolist())}
        self._batch = window.digests.get("batch")
        self._rows = [window.digests[name] for name in SAMPLE_DIGESTS if name in window.digests]

    def of(self, place: int, step: int) -> tuple[int | None, frozenset[int]]:
        """Digest of a rank's batch, and some of its samples."""
        column = self._column[step]
        digest = None
        if self._batch is not None and self._batch.present[place, column]:
            digest = int(self._batch.values[place, column])
        found: set[int] = set()
        for series in self._rows:
            if series.present[place, column]:
                both = int(series.values[place, column])
                found |= {both >> 32, both & NO_SAMPLE}
        return digest, frozenset(found - {NO_SAMPLE})

    def rows_at(self, step: int) -> Iterator[int]:
        """Samples of all ranks at a step."""
        column = self._column[step]
        for series in self._rows:
            for both in series.values[series.present[:, column], column].tolist():
                yield from {both >> 32, both & NO_SAMPLE} - {NO_SAMPLE}


def _together(odd: tuple[Odd, ...], state: OutlierState, chance: float) -> Batches:
    """How the outliers so far belong together, the newest always being one of them."""
    newest = odd[-1]
    same = tuple(o for o in odd if o.digest is not None and o.digest == newest.digest)
    if len(same) > 1:
        return Batches(same, "batch")
    for sample in sorted(newest.rows & state.suspects):
        same = tuple(o for o in odd if sample in o.rows)
        if len(same) > 1:
            return Batches(same, "sample")
    if len(odd) >= _CYCLES:
        last = odd[-_CYCLES:]
        gaps = [b.step - a.step for a, b in zip(last, last[1:], strict=False)]
        period = min(gaps)
        # Not each of them need stand out.
        if period >= _SHORTEST and all(g % period == 0 and g <= _MISSED * period for g in gaps):
            return Batches(_cyclic(odd, period), "cycle", period)
    alone = tuple(o for o in odd if o.rank == newest.rank)
    if len(alone) == len(odd) and len(state.ranks) ** (1 - len(odd)) < chance:
        return Batches(alone, "rank")
    return Batches((newest,))


def _cyclic(odd: tuple[Odd, ...], period: int) -> tuple[Odd, ...]:
    """The newest outliers that are a period apart, or some of them."""
    found = [odd[-1]]
    for one in reversed(odd[:-1]):
        gap = found[0].step - one.step
        if gap % period or gap > _MISSED * period:
            break
        found.insert(0, one)
    return tuple(found)


def _check(state: OutlierState, policy: OutlierPolicy) -> Check:
    if len(state.ranks) == 1:
        if state.odd_inputs.judged:
            what = count(state.odd_inputs.judged, "batch")
            return Check.ok(f"The inputs of {what} were as large as those before.")
        why = "Losses need 2 or more ranks, and inputs were not measured often enough."
        return Check.not_applicable(why)
    if state.signed:
        why = "The loss changes its sign: it is a surrogate whose size says nothing of a batch."
        return Check.not_applicable(why)
    if not state.judged:
        return Check.insufficient(
            f"{count(len(state.values), 'step')} with losses above 0 of all ranks of "
            f"{policy.evidence} needed."
        )
    before = f"; {count(len(state.odd), 'odd batch')} before"
    return Check.ok(
        f"{count(state.judged, 'step')} judged: no batch of one rank stands out"
        f"{before if state.odd else ''}."
    )
