"""Memory that grows with every step, until there is none left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.restarts import passed
from rankscope.server.detectors.mechanisms.statistics import Spacing, rank_rows
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    duration,
    if_several,
    ranks,
    sentences,
    size,
)
from rankscope.server.detectors.memory import step_time
from rankscope.server.detectors.memory.blocks import Minima
from rankscope.server.detectors.memory.step_time import Lengths, inputs_of
from rankscope.server.detectors.memory.trend import Trend, began, steady
from rankscope.server.detectors.policy import Blocks as BlockCount
from rankscope.server.detectors.policy import (
    Bytes,
    Observations,
    Policy,
    Seconds,
    Share,
    Sigmas,
    Times,
)
from rankscope.server.window import Check, Float64, Int64, Window

_RESIDENT, _DEVICE = "process_resident_memory_bytes", "cuda_memory_allocated_bytes"
# Of resident memory, pages of files: the system takes them back where it needs room.
_FILES = "process_mapped_file_bytes"
# Series -> key of its findings; how a person calls it; and whose memory it is that runs out.
_JUDGED = {
    _RESIDENT: ("process", "resident memory", "machine"),
    _DEVICE: ("device", "device memory", "device"),
}
# Number of batches that the loader gives: an epoch has no more steps.
_EPOCH = "loader_batches"
# Consecutive judgements, one a block, that have to find it.
_CONSECUTIVE = 4
# Blocks without it after which it is over.
_CALM = 16


@dataclass(frozen=True, slots=True)
class GrowingPolicy(Policy):
    """Thresholds of `memory.growing`.

    Attributes:
        least_bytes: smallest growth. A process's allocator and the libraries that it loads take
            some dozens of megabytes at a time.
        least_share: the same as a share of what there was before.
        points: number of blocks of 4 observations (of longer runs 8, 16, ...) that show it.
        few: blocks that do where the memory has grown by `much` over them.
        much: the same as a share of what there was before: by half is what no start takes up late.
        skipped: blocks at the beginning of a process that are not counted: pools and workspaces are
            made there.
        certain: slope over its standard error, at the least. Of 1,000 walks without an aim, of 640
            observations each, 2 were reported with it and the thresholds below.
        even: smallest slope of each quarter, as a share of the whole slope: steps in size are no
            growth. A leak that adds to a block in four still has half of it in each.
        keeps: smallest slope of the last quarter, as a share of that of the first, and of as much
            before (of the second half 0.6, which is the same of a power of time): what fills up
            grows more slowly; a square root comes to 0.85 of it, and 0.41.
        observed: observations before which it counts only where memory runs out soon: caches fill
            evenly, too. 120 are the least that a slope and four judgements of it need (26 blocks
            of 4, and 4 more); a few more are left to what a start takes up.
        epochs: the same as a number of epochs, where their length is known: data that are kept in
            memory have all been read then.
        data: growth of a step over the size of its inputs, from which on it is not these that are
            kept: what an image was cut out of, or decoded from, is some times as large.
        soon: a warning where memory runs out within this many times as long as it has been growing.
            At 4 a fifth of what was free is gone.
        night: the same where it runs out within this time: who starts a job in the evening finds
            it ended in the morning.
        glance: share of that time for which it has been growing, at the least.
    """

    least_bytes: Bytes = 2.0**25
    least_share: Share = 0.05
    points: BlockCount = 24
    few: BlockCount = 12
    much: Share = 0.5
    skipped: BlockCount = 2
    certain: Sigmas = 20.0
    even: Share = 0.5
    keeps: Share = 0.9
    observed: Observations = 128
    epochs: Times = 1.25
    data: Times = 16.0
    soon: Times = 4.0
    night: Seconds = 12 * 3600.0
    glance: Share = 1 / 256


@dataclass(slots=True)
class Growth:
    """What is known of one.

    Attributes:
        by_rank: ranks whose memory grows -> bytes a step.
        before, now: bytes of the one that grows fastest, at the beginning and last.
        calm: whether the memory of all other ranks does not grow.
        all_ranks: whether that of all ranks does.
        world_size: number of ranks.
        since: step since which it grows.
        limit: bytes that there are; 0 where that is not known.
        exhausted: step at which they are used up, at this pace; infinite where that is not known.
        seconds: until then; infinite where that is not known.
        without_files: whether pages of files are known, and left out.
        serious: whether that was soon, once.
    """

    by_rank: Mapping[int, float]
    before: float
    now: float
    calm: bool
    all_ranks: bool
    world_size: int
    since: float
    limit: float
    exhausted: float
    seconds: float
    without_files: bool = False
    serious: bool = False


@dataclass(slots=True)
class Track:
    """One series of all ranks.

    Attributes:
        consecutive: by rank, judgements in a row that found its memory growing.
        restarts: by rank, how many of its processes have been replaced.
        points: of the rank that has the most.
    """

    minima: Minima = field(default_factory=Minima)
    consecutive: dict[int, int] = field(default_factory=dict)
    restarts: dict[int, int] = field(default_factory=dict)
    observed: int = 0
    points: int = 0
    spacing: Spacing = field(default_factory=Spacing)
    watch: Watch[Growth] = field(default_factory=Watch)


@dataclass(slots=True)
class GrowingState:
    """What is remembered.

    Attributes:
        epochs: steps at which a loader was met that gives more batches than those before, and how
            many.
        inputs: bytes of a step's inputs on the rank that has most, the largest so far.
        lengths: number of steps whose lengths are known, and their sum in seconds.
    """

    tracks: dict[str, Track] = field(default_factory=lambda: {name: Track() for name in _JUDGED})
    epochs: list[tuple[int, float]] = field(default_factory=list)
    lengths: tuple[int, float] = (0, 0.0)
    inputs: list[tuple[int, float]] = field(default_factory=list)

    def largest_inputs(self, step: int) -> float:
        """Bytes of a step's inputs as far as they are known at a step; infinite where not."""
        return max((size for since, size in self.inputs if since <= step), default=math.inf)

    def epoch(self, step: int) -> float:
        """Steps that an epoch has at the most, as far as that is known at a step; 0 where not."""
        return max((size for since, size in self.epochs if since <= step), default=0.0)


@dataclass(frozen=True, slots=True)
class _Rank:
    """The growth of one rank.

    Attributes:
        began: first step that its process reported.
        since: step since which it grows.
    """

    trend: Trend
    began: float
    since: float
    before: float
    now: float


class MemoryGrowing(Detector[GrowingState]):
    """The memory of a process, or of its device, grows with every step.

    Something is kept from each step to the next; at some step there is no memory left and the job
    ends. What is kept is not seen, only how much more there is.

    Statistic:
        `process_resident_memory_bytes` without `process_mapped_file_bytes`, where that is known
        (pages of data sets that are read through their mapping are given back where there is need
        of room), and on CUDA `cuda_memory_allocated_bytes`: the smallest
        value of each block of 4 observations (more of longer runs), by rank, without the first two
        blocks of a process. Its slope by Theil and Sen, over all blocks, their second half or their
        last quarter (24 at the least), has to be 20 times its standard error, with the
        autocorrelation of the residuals; that of each quarter at least half of it, that of the last
        quarter 0.9 times that of the first, and all of it 0.9 times that of as many blocks before:
        steps in size, and what fills up ever more slowly, are no growth. By 32 MiB and 5 % or more,
        at four blocks in a row; or over the last 12 blocks, by half of what there was. It counts
        from 128 observations on, and after one and a quarter epochs where the length of the loader
        is known (data kept in memory have been read then) and a step's growth is no more than 16
        times its inputs;
        before, where memory runs out soon, within the first epoch. Over when 16 blocks have not
        shown it.

    Severity:
        Info. Warning where, at this pace, memory runs out within four times as long as it has been
        growing, or within 12 hours (by the mean length of a step). The limit is that of the
        machine, or of the container, for all ranks of it together, or of the device; without a
        known one it stays information.

    Evidence:
        `series`, `bytes_per_step` (of the fastest), `by_rank`, `bytes_before`, `bytes`,
        `limit_bytes`, `exhausted_step` and `exhausted_seconds` (from the last observation on),
        where they are known.

    Source:
        pytorch.org, "Frequently Asked Questions": history that is kept across the training loop.
        Sen (1968); effective numbers of related values: Bayley & Hammersley (1946).
    """

    kinds = ("memory.growing",)
    needs = (_RESIDENT,)
    wants = (_DEVICE, _FILES, _EPOCH, *step_time.SERIES)
    policy: GrowingPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """As many observations as it counts from."""
        return (Reach((_RESIDENT,), self.policy.observed, TO_THE_END),)

    def advance(self, window: Window, state: GrowingState) -> Outcome:
        """Goes through the observations of each series."""
        for step, row in zip(*rank_rows(window, _EPOCH), strict=True):
            batches = float(np.nanmax(row))
            if batches > state.epoch(int(step)):
                state.epochs.append((int(step), batches))
        for step, most in inputs_of(window):
            if not state.inputs or most > state.inputs[-1][1]:
                state.inputs.append((step, most))
        findings: list[Finding] = []
        lengths = Lengths(window, state.lengths)
        for name, track in state.tracks.items():
            steps, rows = _taken(window, name)
            for step, row in zip(steps.tolist(), rows, strict=True):
                self._observe(window, state, name, step, row, lengths.mean(step))
            findings += [_finding(name, episode) for episode in track.watch.take(window.last_step)]
        state.lengths = lengths.total()
        findings.sort(key=lambda finding: finding.seen_step)
        return Outcome({"memory.growing": self._check(state)}, tuple(findings))

    def _observe(
        self,
        window: Window,
        state: GrowingState,
        name: str,
        step: int,
        row: Float64,
        length: float,
    ) -> None:
        track = state.tracks[name]
        track.observed += 1
        track.spacing.push(step)
        for rank, begins in window.begins.items():
            replaced = passed(np.array(begins[1:], dtype=np.int64), step)
            if replaced > track.restarts.get(rank, 0):
                track.restarts[rank] = replaced
                track.minima.forget(rank)
        values = np.full(int(window.ranks[-1]) + 1, np.nan)
        values[window.ranks] = row
        if not track.minima.push(step, values):
            return
        found = {
            rank: grown for rank in self._candidates(track) if (grown := self._of(track, rank))
        }
        track.consecutive = {rank: track.consecutive.get(rank, 0) + 1 for rank in found}
        lasting = {r: g for r, g in found.items() if track.consecutive[r] >= _CONSECUTIVE}
        facts = _facts(window, name, track, lasting, length) if lasting else None
        if facts is None or not self._counts(state, track, facts, lasting, step):
            track.watch.good(step)
            return
        track.watch.clear_after = track.spacing.steps(_CALM * track.minima.size)
        began = min(int(grown.since) for grown in lasting.values())
        _update(track.watch.bad(step, facts, first_step=began), facts, self.policy)

    def _candidates(self, track: Track) -> list[int]:
        """Ranks that have more by so much that it is worth a closer examination."""
        blocks = track.minima.matrix()
        known = np.isfinite(blocks).sum(axis=0) - self.policy.skipped
        track.points = max(int(known.max(initial=0)), 0)
        least = np.fmin.reduce(blocks, axis=0)
        enough = (known >= self.policy.points) & (blocks[-1] - least >= self.policy.least_bytes)
        return [int(rank) for rank in np.flatnonzero(enough)]

    def _of(self, track: Track, rank: int) -> _Rank | None:
        policy = self.policy
        steps, values = track.minima.of(rank)
        x, y = steps[policy.skipped :], values[policy.skipped :]
        few = policy.few
        tries = (x, y, policy.points, policy.least_share), (x[-few:], y[-few:], few, policy.much)
        for of_x, of_y, least, share in tries:
            trend = steady(
                of_x,
                of_y,
                least=least,
                certain=policy.certain,
                even=policy.even,
                keeps=policy.keeps,
            )
            if trend is None:
                continue
            before, now = float(of_y[trend.first]), float(of_y[-1])
            if now - before >= max(policy.least_bytes, share * before):
                since = began(x, y, len(x) - len(of_x) + trend.first, trend.slope)
                before = float(y[since])
                return _Rank(trend, float(steps[0]), float(x[since]), before, now)
        return None

    def _counts(
        self,
        state: GrowingState,
        track: Track,
        facts: Growth,
        lasting: Mapping[int, _Rank],
        step: int,
    ) -> bool:
        """Whether it is no cache that fills, as far as that can be known."""
        if track.watch.open(step) is not None:
            return True
        began = max(grown.began for grown in lasting.values())
        epoch = state.epoch(step)
        slowest = min(grown.trend.slope for grown in lasting.values())
        of_data = slowest <= self.policy.data * state.largest_inputs(step)
        if of_data and epoch and step - began < self.policy.epochs * epoch:
            return _is_soon(facts, step, self.policy) and facts.exhausted < began + epoch
        return track.observed >= self.policy.observed or _is_soon(facts, step, self.policy)

    def _check(self, state: GrowingState) -> Check:
        track = state.tracks[_RESIDENT]
        if track.points < self.policy.points:
            least = (self.policy.points + self.policy.skipped) * Minima().size
            why = f"{count(track.observed, 'observation')} of {least} of the memory in use."
            return Check.insufficient(why)
        device = " and of its device" if state.tracks[_DEVICE].points >= self.policy.points else ""
        return Check.ok(
            f"The memory of each process{device} was followed over "
            f"{count(track.observed, 'observation')}."
        )


def _taken(window: Window, name: str) -> tuple[Int64, Float64]:
    """As `rank_rows`, of a process without the pages of files where those are known."""
    steps, rows = rank_rows(window, name)
    at, files = rank_rows(window, _FILES)
    if name != _RESIDENT or not len(at):
        return steps, rows
    places = np.minimum(np.searchsorted(at, steps), len(at) - 1)
    known = (at[places] == steps)[:, None] & np.isfinite(files[places])
    return steps, rows - np.where(known, files[places], 0.0)


def _facts(
    window: Window, name: str, track: Track, found: Mapping[int, _Rank], length: float
) -> Growth:
    """What is known of it; `length` is that of a step in seconds, NaN where it is not known."""
    fastest = max(found, key=lambda rank: found[rank].trend.slope)
    others = [rank for rank in window.ranks.tolist() if rank not in found]
    limit, free, pace = _what_is_left(window, name, track, found, fastest)
    since, now = found[fastest].since, track.minima.steps[-1]
    left = max(free, 0.0) / pace if limit else math.inf  # steps
    return Growth(
        by_rank={rank: grown.trend.slope for rank, grown in sorted(found.items())},
        before=found[fastest].before,
        now=found[fastest].now,
        calm=bool(others) and all(_is_calm(track, rank, since, found) for rank in others),
        all_ranks=not others,
        world_size=window.world_size,
        since=since,
        limit=limit,
        exhausted=now + left,
        seconds=math.inf if math.isnan(length) else left * length,
        without_files=name == _RESIDENT and bool(len(rank_rows(window, _FILES)[0])),
    )


def _is_calm(track: Track, rank: int, since: float, found: Mapping[int, _Rank]) -> bool:
    """Whether a rank has not even a quarter more, meanwhile, of what the slowest of those has."""
    steps, values = track.minima.of(rank)
    later = values[steps >= since]
    least = min(grown.now - grown.before for grown in found.values())
    return len(later) > 1 and float(later[-1] - later[0]) < least / 4


def _what_is_left(
    window: Window, name: str, track: Track, found: Mapping[int, _Rank], rank: int
) -> tuple[float, float, float]:
    """Bytes that there are where a rank is, those of them that are free, and bytes a step."""
    own = found[rank]
    key = "process" if name == _RESIDENT else "cuda"
    limits = (window.configs.get(rank) or {}).get("memory_limits")
    limit = limits.get(key) if isinstance(limits, Mapping) else None
    if not isinstance(limit, int | float) or not 0 < limit < math.inf:
        return 0.0, math.inf, own.trend.slope
    if key == "cuda":
        return float(limit), limit - own.now, own.trend.slope
    hosts = {life.rank: life.host for life in window.liveness}
    beside = [r for r in window.ranks.tolist() if hosts.get(rank) and hosts.get(r) == hosts[rank]]
    used = sum(float(np.nan_to_num(track.minima.rows[-1][r])) for r in beside or [rank])
    pace = sum(found[r].trend.slope for r in beside or [rank] if r in found)
    return float(limit), limit - used, pace


def _is_soon(facts: Growth, step: int, policy: GrowingPolicy) -> bool:
    return facts.exhausted - step <= policy.soon * (step - facts.since)


def _update(episode: Episode[Growth], facts: Growth, policy: GrowingPolicy) -> None:
    """What is known by now; what was said of an alert's severity stays."""
    soon = _is_soon(facts, episode.last_step, policy)
    # Not from a glance: what begins to train grows for a while.
    seen = (episode.last_step - facts.since) / max(facts.exhausted - episode.last_step, 1.0)
    soon |= facts.seconds <= policy.night and seen >= policy.glance
    serious = episode.facts.serious or soon
    episode.facts = facts
    episode.facts.serious = serious


def _finding(name: str, episode: Episode[Growth]) -> Finding:
    facts, step = episode.facts, episode.first_step
    key, called, whose = _JUDGED[name]
    who = tuple(facts.by_rank)
    slope = max(facts.by_rank.values())
    of = "every rank" if facts.all_ranks else ranks(who)
    whom = if_several(facts.world_size, f"of {of}")
    known = math.isfinite(facts.exhausted)
    end = f"; at this pace it runs out at about step {facts.exhausted:,.0f}" if known else ""
    if math.isfinite(facts.seconds):
        end = f"; at this pace there is none left in {duration(facts.seconds)}"
    shared = "all processes of its " if key == "process" else "its "
    return episode.finding(
        kind="memory.growing",
        key=key,
        severity="warning" if facts.serious else "info",
        title=f"The {called}{whom} grows by {size(slope)} a step since step {step}{end}",
        ranks=() if facts.all_ranks else who,
        cause=sentences(
            f"It has grown from {size(facts.before)} to {size(facts.now)}, by about as much at "
            f"each step{'' if len(who) == 1 else ' on the rank where it grows fastest'}.",
            f"That of the other ranks has not: it is something that {of} "
            f"{agree(len(who), 'does')} and they do not."
            if facts.calm
            else "",
            "Pages of mapped files are not counted." if facts.without_files else "",
            f"There are {size(facts.limit)} for {shared}{whose}"
            + (f": none is left at about step {facts.exhausted:,.0f}." if known else ".")
            if facts.limit
            else "",
            "What is kept was not seen. It may be losses or outputs that are added up or put into "
            "a list together with the graphs that made them; a cache or a buffer that has no "
            "bound, or has not reached it, looks the same.",
        ),
        remedy=(
            "Look for what the loop keeps from each step: outputs and losses that are added up or "
            "put into a list keep their graphs, and all that these hold where no backward pass "
            "goes through them (metrics, evaluations without `torch.no_grad()`); `.item()` and "
            "`.detach()` do not. Look at hooks, caches, and objects that a logger holds, too"
            f"{', under `if rank == ...` above all' if facts.calm else ''}. "
            + (
                "`torch.cuda.memory._record_memory_history` shows who allocates it."
                if name == _DEVICE
                else "`tracemalloc` shows who allocates it, as far as it is Python's."
            )
        ),
        evidence={
            "series": name,
            "bytes_per_step": slope,
            "by_rank": {str(rank): grown for rank, grown in facts.by_rank.items()},
            "bytes_before": facts.before,
            "bytes": facts.now,
            **({"limit_bytes": facts.limit} if facts.limit else {}),
            **({"exhausted_step": round(facts.exhausted)} if known else {}),
            **({"exhausted_seconds": facts.seconds} if math.isfinite(facts.seconds) else {}),
        },
    )
