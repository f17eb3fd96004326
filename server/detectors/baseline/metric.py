"""Norms, updates, times and memory that are far from those of earlier runs at the same steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.comparison.bands import Band, band
from rankscope.server.comparison.resources import MEMORY
from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.baseline.curves import Curve, Interim, Interims, courses, usable
from rankscope.server.detectors.baseline.loss import ROOTS
from rankscope.server.detectors.baseline.texts import compared_with, differences
from rankscope.server.detectors.effects import EPISODE, Rule
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import mean_over_ranks, rank_rows
from rankscope.server.detectors.mechanisms.wording import (
    count,
    duration,
    listing,
    number,
    sentences,
    size,
)
from rankscope.server.detectors.policy import Count, Policy, Share, Times
from rankscope.server.window import Baselines, Check, Float64, Int64, Window

_SECONDS, _SHORTEST = "step_seconds", "step_seconds/shortest"
_NORMS: Mapping[str, str] = {
    "grad_norm": "gradient norm",
    "update_ratio": "ratio of updates to parameters",
}
_NAMES: Mapping[str, str] = {
    **_NORMS,
    _SECONDS: "length of a step",
    "process_resident_memory_bytes": "memory of a process",
    "cuda_max_memory_allocated_bytes": "memory of the tensors on a device",
    "cuda_memory_reserved_bytes": "memory reserved on a device",
}
# What is assumed of the spread between runs before any was seen, on the logarithm: of times and
# memory as the gate has it; norms go with what the batches and the seed make of a training.
_ASSUMED = {**dict.fromkeys(_NORMS, 0.2), _SECONDS: 0.1, **dict.fromkeys(MEMORY, 0.02)}
# Buckets whose median is compared: so that single ones do not matter.
_LEAST = 8
# Of the shortest step of each bucket the quantile that is compared: of a short run, in which each
# step is a bucket, most are long where the machine has other things to do.
_FAST = 0.1


@dataclass(frozen=True, slots=True)
class MetricPolicy(Policy):
    """Thresholds of `baseline.metric`.

    Attributes:
        least: baselines without which nothing is compared, as of `baseline.loss`.
        confidence: of the band. A run is compared some 30 times in six series.
        norm: by how much a gradient norm, or the ratio of updates, is larger or smaller than
            expected: a norm is twice as large where a batch is a fourth as large.
        slower: by how much a step is longer, that of `rankscope gate --against`.
        larger: by how much more memory is taken. At the end the gate asks for a tenth; libraries of
            another version and fragments take as much.
    """

    least: Count = 3
    confidence: Share = 0.999
    norm: Times = 3.0
    slower: Times = 1.5
    larger: Times = 1.25

    def factor(self, name: str) -> float:
        """By how much a series has to be another one."""
        if name in _NORMS:
            return self.norm
        return self.slower if name == _SECONDS else self.larger


@dataclass(frozen=True, slots=True)
class Unlike:
    """What is known of a comparison in which a series is far from that of the baselines.

    Attributes:
        value, expected, bound: of the medians; the bound is the nearest that passes.
        runs: baselines that it was compared with.
    """

    interim: Interim
    value: float
    expected: float
    bound: float
    runs: tuple[str, ...]


@dataclass(slots=True)
class Track:
    """What is remembered of a series.

    Attributes:
        since: first step of the medians, and step, of the first comparison that found it one
            after the other.
    """

    curve: Curve
    since: tuple[int, int] | None = None
    judged: int = 0
    watch: Watch[Unlike] = field(default_factory=lambda: Watch(clear_after=0))


@dataclass(slots=True)
class MetricState:
    """What is remembered; `last` is the step of the newest comparison."""

    tracks: dict[str, Track] = field(default_factory=dict)
    interims: Interims = field(default_factory=Interims)
    last: int = -1


class BaselineMetric(Detector[MetricState]):
    """A norm, a step's length or the memory is far from that of earlier runs at the same steps.

    Whatever a run does from its first step on is usual by its own past. By that of its project's
    baselines (`baseline.loss` says which these are) it need not be: gradients ten times as large
    because of a loss that is no mean any more, steps twice as long because of a slower kernel.

    Statistic:
        Of `grad_norm`, `update_ratio`, `step_seconds` and the memory of processes and devices (the
        largest of the ranks) the median of the last fifth of the steps, in buckets of steps, in
        interim comparisons, each after a ninth more steps. Reported where it is, in comparisons one
        after the other, the last of which has no step in common with the first, beyond the
        prediction limit of 99.9 % for one more run (Student's t on the logarithm), and by a factor:
        of norms 3 in either direction, of the length of a step 1.5, of memory 1.25. Of the length
        of steps the shortest ones (of each bucket, and of these the shortest tenth) have to be
        longer, too: what else a machine does makes most steps longer and hardly ever all. Times and
        memory are compared with baselines on as many ranks and the same kind of device. Over with a
        comparison that finds it within half of the distance.

    Severity:
        Warning of times and memory, where no setting differs, or where all baselines of the model
        (three at least) agree on those that do; else information, as of norms, which show how a
        training differs and not that it is worse.

    Evidence:
        `metric`; `step`: of the last comparison; `value`, `expected`, `limit`; `times`: by how much
        it is another one; `baselines`: their ids; `differing`: as of `baseline.loss`.

    Source:
        The band is that of `rankscope gate --against`; so are the factors of times, from 400 runs
        on a busy machine.
    """

    kinds = ("baseline.metric",)
    wants = (*_NAMES,)
    effects = (
        Rule(
            root=(*ROOTS, "throughput.", "memory.", "collective.", "baseline.loss"),
            consequence=("baseline.metric",),
            earliest=-EPISODE,
            same_ranks=False,
            why="it is what norms, times or memory show of that",
        ),
    )

    policy: MetricPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """What is so from the start on stays."""
        return (Reach(tuple(_NAMES), _LEAST, TO_THE_END),)

    def advance(self, window: Window, state: MetricState) -> Outcome:
        """Takes the steps of all series, and compares where that is due."""
        kind = self.kinds[0]
        baselines = usable(window.baselines, self.policy.least)
        if isinstance(baselines, Check):
            return Outcome({kind: baselines})
        names = [n for n in (*_NAMES, _SHORTEST) if n in baselines.curves]
        if not names:
            return Outcome(
                {kind: Check.missing("The baselines have recorded none of these series.")}
            )
        width = max(baselines.curves[names[0]])
        for name in names:
            self._take(name, width, window, state)
        for interim in state.interims.until(window.last_step, baselines.last, least_width=width):
            state.last = interim.step
            for name in (n for n in names if n != _SHORTEST and n in state.tracks):
                self._compare(name, interim, baselines, state)
        findings = [
            _finding(name, episode, baselines)
            for name, track in state.tracks.items()
            for episode in track.watch.take(window.last_step)
        ]
        return Outcome({kind: self._check(baselines, state)}, tuple(findings))

    def _take(self, name: str, width: int, window: Window, state: MetricState) -> None:
        metric = name.partition("/")[0]
        if metric not in window.series:
            return
        if name not in state.tracks:
            which = "low" if name == _SHORTEST else "high" if name in MEMORY else "mean"
            state.tracks[name] = Track(Curve(which))
        steps, values = _of_ranks(window, metric, state.tracks[name].curve.which)
        state.tracks[name].curve.push(steps, values, (width,))

    def _compare(
        self, name: str, interim: Interim, baselines: Baselines, state: MetricState
    ) -> None:
        track, policy = state.tracks[name], self.policy
        found = self._beside(name, name, interim, baselines, state)
        if found is None:
            return
        track.judged += 1
        own, between, facts = found
        least = math.log(policy.factor(name))
        far = max(between.reach, least)
        distance = own - between.expected
        shortest = self._beside(_SHORTEST, name, interim, baselines, state)
        if name == _SECONDS and shortest is not None:
            # The shorter of both: it is longer by that at least.
            distance = min(distance, shortest[0] - shortest[1].expected)
        if name not in _NORMS:
            distance = max(distance, 0.0)
        if abs(distance) > far:
            begin = interim.step - _late(interim) * interim.width + 1
            if track.judged == 1:
                # Nothing shows that it was ever otherwise.
                begin = track.curve.first
            if track.since is None:
                track.since = begin, interim.step
            if begin > track.since[1] or track.watch.open(interim.step) is not None:
                first = track.since[0]
                track.watch.bad(interim.step, facts, first_step=first).facts = facts
        elif abs(distance) <= far / 2 or track.watch.open(interim.step) is None:
            track.since = None
            track.watch.good(interim.step)

    def _beside(
        self, name: str, of: str, interim: Interim, baselines: Baselines, state: MetricState
    ) -> tuple[float, Band, Unlike] | None:
        """Level of the run, and the band of its baselines, on the logarithm; None: too little.

        Args:
            of: the series by whose factor it is judged.
        """
        if name not in state.tracks or name not in baselines.curves:
            return None
        late = _late(interim)
        share = _FAST if name == _SHORTEST else 0.5
        own = _level(state.tracks[name].curve.course(interim).values[-late:], share)
        theirs = [_level(c.values[-late:], share) for c in courses(baselines, name, interim)]
        machine = of not in _NORMS
        kept = [
            n
            for n, value in enumerate(theirs)
            if math.isfinite(value) and not (machine and baselines.elsewhere[n])
        ]
        if not math.isfinite(own) or len(kept) < self.policy.least:
            return None
        levels = np.array([theirs[n] for n in kept])
        found = band(levels, assumed=_ASSUMED[of], confidence=self.policy.confidence)
        sign = -1 if own < found.expected else 1
        far = max(found.reach, math.log(self.policy.factor(of)))
        facts = Unlike(
            interim,
            math.exp(own),
            math.exp(found.expected),
            math.exp(found.expected + sign * far),
            tuple(baselines.runs[n] for n in kept),
        )
        return own, found, facts

    def _check(self, baselines: Baselines, state: MetricState) -> Check:
        judged = [name for name, track in state.tracks.items() if track.judged]
        if not judged:
            return Check.insufficient(
                "Too little of these series is recorded so far, or by too few baselines on such a "
                "machine, to be compared."
            )
        times = max(state.tracks[name].judged for name in judged)
        return Check.ok(
            f"Compared {count(times, 'time')} with {compared_with(baselines.runs)}, up to step "
            f"{state.last:,}: {listing([_NAMES[n] for n in judged])} as there."
        )


def _late(interim: Interim) -> int:
    """Buckets whose median is compared."""
    return max(_LEAST, (interim.step + 1) // interim.width // 5)


def _level(values: Float64, share: float) -> float:
    """Logarithm of a quantile; NaN where too few are there, or it is not positive."""
    if len(values) < _LEAST:
        return math.nan
    level = float(np.quantile(values, share))
    return math.log(level) if level > 0 else math.nan


def _of_ranks(window: Window, metric: str, which: str) -> tuple[Int64, Float64]:
    if which == "mean":
        return mean_over_ranks(window, metric)
    steps, rows = rank_rows(window, metric)
    pick = np.fmin if which == "low" else np.fmax
    return steps, np.asarray(pick.reduce(rows, axis=1)) if len(steps) else np.empty(0)


def _value(name: str, value: float) -> str:
    if name in _NORMS:
        return number(value)
    return duration(value) if name == _SECONDS else size(value)


def _finding(name: str, episode: Episode[Unlike], baselines: Baselines) -> Finding:
    facts = episode.facts
    times = facts.value / facts.expected
    what = _NAMES[name]
    recipe = not baselines.unlike or baselines.established
    return Finding(
        kind="baseline.metric",
        key=name,
        severity="warning" if recipe and name not in _NORMS else "info",
        title=(
            f"From about step {episode.first_step} on the {what} is {number(times)} times that of "
            "earlier runs"
        ),
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=episode.first_step,
        cause=sentences(
            f"Up to step {facts.interim.step} the {what} is {_value(name, facts.value)} (median of "
            f"the last steps); that of {compared_with(facts.runs)} at the same steps is "
            f"{_value(name, facts.expected)}, and {_value(name, facts.bound)} would still pass.",
            differences(baselines),
        ),
        remedy=(
            "Look at what has changed in the code, the data or the settings since these runs: "
            f"`rankscope compare {baselines.of} {baselines.runs[0]}`. Nothing, if that is meant."
        ),
        clear_after=episode.clear_after,
        evidence={
            "metric": name,
            "step": facts.interim.step,
            "value": facts.value,
            "expected": facts.expected,
            "limit": facts.bound,
            "times": times,
            "baselines": list(facts.runs),
            "differing": {s.key: [s.own, s.theirs] for s in baselines.differing},
        },
    )
