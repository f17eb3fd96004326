"""Any recorded series that one rank, or the past, does not lead to expect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.effects import EPISODE, Rule
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import if_several
from rankscope.server.detectors.metric.events import Anomaly, finding
from rankscope.server.detectors.metric.found import Event, MetricPolicy
from rankscope.server.detectors.metric.past import Past
from rankscope.server.detectors.metric.rank_outlier import BLOCK, LEAST, Peers
from rankscope.server.detectors.metric.series import is_asked, is_clock, is_logged
from rankscope.server.detectors.metric.silence import Silence
from rankscope.server.window import Bool, Check, Float64, Int64, Window

# Series that are judged, of many ranks fewer: a run may have thousands, and each takes up to 1 KB
# for a rank. The training's own come first.
_MOST, _MOST_VALUES = 512, 2**15
# Families with better names for what they find.
_NAMED = (
    *("desync.", "reduction.", "update.", "schedule.", "data.", "loss.", "eval.", "buffers."),
    *("accuracy.", "generalization.", "gradient.", "layer.", "clipping.", "amp.", "compression."),
    *("lr.", "mode.", "push.", "rng.", "rank.", "collective."),
)


# Norms of gradients as a loss scaler has scaled them: they grow with the scale.
_SCALED = frozenset(("grad_norm_local",))


@dataclass(slots=True)
class Blocks:
    """Observations that do not make a block yet.

    Attributes:
        made: number of blocks so far.
        first: step of the first observation; -1 before it.
    """

    steps: list[Int64] = field(default_factory=list)
    rows: list[Float64] = field(default_factory=list)
    waiting: int = 0
    made: int = 0
    first: int = -1

    def push(self, steps: Int64, rows: Float64) -> Iterator[tuple[Int64, Float64]]:
        """Takes steps, int64 [N], and rows, float64 [N, R]; gives blocks of them as they fill."""
        if not len(steps):
            return
        self.first = int(steps[0]) if self.first < 0 else self.first
        self.steps.append(steps)
        self.rows.append(rows)
        self.waiting += len(steps)
        if self.waiting < BLOCK:
            return
        steps, rows = np.concatenate(self.steps), np.concatenate(self.rows)
        whole = len(steps) // BLOCK * BLOCK
        self.steps, self.rows, self.waiting = [steps[whole:]], [rows[whole:]], len(steps) - whole
        for at in range(0, whole, BLOCK):
            self.made += 1
            yield steps[at : at + BLOCK], rows[at : at + BLOCK]

    def spacing(self, step: int) -> float:
        """Steps from one observation to the next, up to the newest block, which ends at a step."""
        return (step - self.first) / (self.made * BLOCK - 1) if self.made else 1.0


@dataclass(slots=True)
class Track:
    """What is known of one series.

    Attributes:
        members: ranks that are compared.
        beside, alone: steps at which ranks can be compared, and all at which it was posted.
    """

    members: tuple[int, ...] = ()
    peers: Peers = field(default_factory=lambda: Peers(np.empty(0, dtype=np.int64)))
    past: dict[int, Past] = field(default_factory=dict)
    silence: Silence | None = None
    beside: Blocks = field(default_factory=Blocks)
    alone: Blocks = field(default_factory=Blocks)


@dataclass(slots=True)
class AnomalyState:
    """What is remembered.

    Attributes:
        active: steps at which each rank has posted anything, int64, by its number.
        left: series that are not judged, because there are too many.
    """

    tracks: dict[str, Track] = field(default_factory=dict)
    active: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    left: set[str] = field(default_factory=set)
    incidents: list[Anomaly] = field(default_factory=list)


class MetricAnomaly(Detector[AnomalyState]):
    """Any recorded series, a user's own too, does what nothing before it led to expect.

    Two questions, whatever the name: is a rank exchangeable with the others (it moves away from
    them and stays, or single values do, once or again and again), and does the series go on as it
    did (a new level, a spike, spikes at equal distances, or nothing posted any more). Ranks are
    compared in all series but settings, counts and times; the past of a user's own series alone is
    judged, since that of the training's has kinds that know its course. Events of several series
    that begin within 20 steps, or go on at the same rank, are one alert.

    Statistic:
        Of blocks of 16 observations the median by rank, against the median of the ranks at each
        step. A rank has moved where 2 to 8 consecutive blocks each lie further from what is usual
        for it than any rank's in the last 32 (8 at least), and the mean of them lies more than 8
        standard deviations (median absolute deviation), and 1.5 times the furthest (10^(3/n) times
        for few), of the n distances between neighbouring means of as many blocks before, so that
        what drifts or is smoothed is held against its own drift; 3 times as far as the others moved
        meanwhile. From the start: one of 4 ranks or more, 5 times as far out as the next one, and
        by a quarter of the level. Outliers: more than 10 standard deviations, and 3 times the next
        rank; reported where 10 times further than any before, or where 5 or more are of one rank,
        or at equal distances, by a chance below 1e-9. Of a user's series that is noisy (a fifth of
        its values are turning points), the median of the ranks: a level where 3 block medians lie 3
        times the range of the past outside it; a spike 10 times further than any before; spikes at
        equal distances by folding (`gradient.oscillating`), 10 standard deviations high. Silence:
        64 steps and 8 times the longest gap, at which the rank posts other series. Times and rates
        are asked for shifts and silence alone.

    Severity:
        Info. Warning where it is extreme and lasts or recurs, and did not do so at the start: a
        rank that has moved for 4 blocks by 12 standard deviations, 3 times the furthest distance
        before (10^(6/n) times for few), 3 times the range of the others and 6 times their moves;
        outliers of one rank that come again after 192 observations or more without, 3 times further
        than any other value; spikes at equal distances, 12 standard deviations high, that came as
        late; a series that one rank alone no longer posts.

    Evidence:
        `question`, `times` (over the furthest before; of what recurs standard deviations), `size`,
        `usual` (level; of silence the longest gap), `period` (steps), `series`: the same of each.

    Source:
        Exchangeability, as in conformal prediction (Vovk, Gammerman & Shafer 2005): of n values a
        new one is the furthest with a chance of 1/n, and C times the furthest with C^-a/n where
        tails fall with the power a. The median of 16 falls with 8 a: for a = 1 (Cauchy), 4 ranks,
        32 blocks and C = 3 two independent ones of four blocks have (1e-6)^2, and a run of 100,000
        steps and 50 series 312,000 blocks. For single values a = 3 and C = 10 leave 1e-3/n, against
        all n before them: 1 % of series of 100,000 steps have one, which is information. What
        drifts has no such tails, but moves: C^-n for n of them before, 1e-6 for a warning, by which
        of 1,000 runs with 1,000 such blocks each one is warned of. Robust scales: Rousseeuw & Croux
        (1993).
    """

    kinds = ("metric.anomaly",)
    wants = ("*",)
    lasting = "what it answers says how many series had enough values to be judged"
    effects = (
        Rule(
            root=_NAMED,
            consequence=("metric.anomaly",),
            earliest=-EPISODE,
            why="it is what these series show of it",
        ),
    )

    policy: MetricPolicy

    def advance(self, window: Window, state: AnomalyState) -> Outcome:
        """Asks every series."""
        found: list[tuple[int, str, int, Event, float]] = []
        if len(window.steps):
            clock = self._clock(window, state)
            largest = max(window.data_parallel, key=lambda group: len(group))
            compared = np.array(sorted(largest), dtype=np.int64)
            for name in self._series(window, state):
                for event, spacing in self._ask(name, window, compared, clock, state):
                    found.append((event.seen_step, name, len(found), event, spacing))
        findings: list[Finding] = []
        for _, name, _, event, spacing in sorted(found, key=lambda one: one[:3]):
            findings += self._take(name, event, spacing, window, state)
        for anomaly in state.incidents:
            if self._silent(anomaly, state) and window.last_step > anomaly.last_step:
                anomaly.last_step = window.last_step
            findings.append(finding(anomaly))
        return Outcome({"metric.anomaly": self._check(window, state)}, tuple(findings))

    def _series(self, window: Window, state: AnomalyState) -> list[str]:
        """Those that are asked at these steps, in the order of their names."""
        most = min(_MOST, _MOST_VALUES // len(window.ranks))
        for name in sorted(window.series, key=lambda name: (is_logged(name), name)):
            series = window.series[name]
            if name in state.tracks or name in state.left or not is_asked(name):
                continue
            if not series.present.any():
                continue
            if len(state.tracks) >= most:
                state.left.add(name)
                continue
            state.tracks[name] = Track(silence=Silence() if is_logged(name) else None)
        return sorted(state.tracks)

    def _clock(self, window: Window, state: AnomalyState) -> Int64:
        """Steps at which each rank has posted anything, int64 [R, S]."""
        new = int(window.ranks[-1]) + 1 - len(state.active)
        state.active = np.concatenate([state.active, np.zeros(max(new, 0), dtype=np.int64)])
        posts = np.zeros((len(window.ranks), len(window.steps)), dtype=bool)
        for series in window.series.values():
            posts |= series.present
        clock: Int64 = state.active[window.ranks, None] + np.cumsum(posts, axis=1)
        state.active[window.ranks] = clock[:, -1]
        return clock

    def _ask(
        self, name: str, window: Window, compared: Int64, clock: Int64, state: AnomalyState
    ) -> Iterator[tuple[Event, float]]:
        """Events of one series, each with how many steps lie from one observation to the next."""
        track = state.tracks[name]
        series = window.series.get(name)
        if track.silence is not None:
            posted = None if series is None else series.present
            for event in track.silence.take(window.ranks, window.steps, posted, clock, self.policy):
                yield event, 1.0
        if series is None:
            return
        if track.members != (members := tuple(compared.tolist())):
            state.tracks[name] = track = Track(members, Peers(compared), silence=track.silence)
        steps, rows = rank_rows(window, name)
        if name in _SCALED:
            rows = _unscaled(window, steps, rows)
        if len(compared) < len(window.ranks):
            rows = rows[:, np.searchsorted(window.ranks, compared)]
        known = np.isfinite(rows)
        whole = bool(known.all())
        if not whole:
            rows = np.where(known, rows, np.nan)
        there = known.sum(axis=1)
        enough = there >= max(2, (len(compared) + 1) // 2)
        timed = is_clock(name)
        for block in track.beside.push(*_chosen(steps, rows, enough)):
            spacing = track.beside.spacing(int(block[0][-1]))
            for event in track.peers.block(*block, self.policy, clock=timed):
                yield event, spacing
        if track.silence is None or timed:
            return
        for block in track.alone.push(*_chosen(steps, rows, there > 0)):
            spacing = track.alone.spacing(int(block[0][-1]))
            for event in self._before(track, *block):
                yield event, spacing

    def _before(self, track: Track, steps: Int64, rows: Float64) -> Iterator[Event]:
        """Holds a block against the past of its series."""
        there = ~np.isnan(rows)
        # Of two ranks the median is moved by either; the others' is not by one of them.
        if rows.shape[1] == 2 and there.all():
            for column, rank in enumerate(track.members):
                past = track.past.setdefault(rank, Past(ranks=(rank,)))
                yield from past.block(steps, rows[:, column], self.policy)
            return
        some = np.flatnonzero(there.any(axis=0)).tolist()
        only = track.members[some[0]] if len(some) == 1 < len(track.members) else -1
        past = track.past.setdefault(only, Past(ranks=(only,) if only >= 0 else ()))
        yield from past.block(steps, np.nanmedian(rows, axis=1), self.policy)

    def _take(
        self, name: str, event: Event, spacing: float, window: Window, state: AnomalyState
    ) -> Iterator[Finding]:
        """Puts an event where it belongs."""
        for known in [*state.incidents]:
            if not self._silent(known, state) and known.over(event.seen_step):
                yield finding(known)
                state.incidents.remove(known)
        calm = math.ceil(self.policy.calm * max(spacing, 1.0))
        anomaly = next((one for one in state.incidents if one.holds(event)), None)
        if anomaly is None:
            anomaly = Anomaly(
                first_step=event.first_step,
                seen_step=event.seen_step,
                last_step=event.seen_step,
                clear_after=calm,
                world=len(window.ranks),
                key=f"step:{event.first_step}",
            )
            state.incidents.append(anomaly)
        anomaly.add(name, event, calm)
        if event.question == "silence":
            anomaly.silent.add((name, event.who, event.first_step))

    def _silent(self, anomaly: Anomaly, state: AnomalyState) -> bool:
        """Whether a series that went silent still is."""
        for name, rank, since in [*anomaly.silent]:
            silence = state.tracks[name].silence
            if silence is not None and silence.silent_since[rank] != since:
                anomaly.silent.discard((name, rank, since))
                anomaly.last_step = max(anomaly.last_step, int(silence.until[rank]))
        return bool(anomaly.silent)

    def _check(self, window: Window, state: AnomalyState) -> Check:
        if state.incidents:
            return Check.open(f"{finding(state.incidents[-1]).title}.")
        judged = sum(max(t.beside.made, t.alone.made) > LEAST for t in state.tracks.values())
        if not judged:
            return Check.insufficient(
                f"No series has {(LEAST + 1) * BLOCK} values yet, of which the first "
                f"{LEAST * BLOCK} say what is usual."
            )
        left = f"; {len(state.left)} more are not" if state.left else ""
        peers = if_several(window.world_size, "ranks are exchangeable, and")
        return Check.ok(
            f"{judged} of {len(state.tracks)} series judged:{peers} series go on as they did{left}."
        )


def _chosen(steps: Int64, rows: Float64, which: Bool) -> tuple[Int64, Float64]:
    return (steps, rows) if which.all() else (steps[which], rows[which])


def _unscaled(window: Window, steps: Int64, rows: Float64) -> Float64:
    """Values without the loss scale of their step, where there is one: float64 [N, R]."""
    scaled, scales = rank_rows(window, "amp_scale")
    if not len(scaled):
        return rows
    at = np.minimum(np.searchsorted(scaled, steps), len(scaled) - 1)
    known = (scaled[at] == steps)[:, None] & (scales[at] > 0)
    return np.where(known, rows / np.where(known, scales[at], 1.0), np.nan)
