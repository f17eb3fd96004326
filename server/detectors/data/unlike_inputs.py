"""Ranks that read another kind of data than the others do. Pure.

Ranks draw their batches from one distribution, whatever the model makes of them: how their inputs
are distributed is then the same on all of them, but for chance. A flipped or shifted image, another
order of channels or columns, another tokenizer or vocabulary, a filter that takes out more than it
should: each shows there from the first batches on, long before it shows in a loss, and where all
ranks' losses suffer alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.data.input_moments import (
    NUMBERS,
    TOKENS,
    Batches,
    batches,
    far,
    scatter,
)
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.epochs_seen import Visits
from rankscope.server.detectors.mechanisms.statistics import (
    change_point,
    mean_over_ranks,
)
from rankscope.server.detectors.mechanisms.wording import number, percent, ranks, sentences
from rankscope.server.window import Bool, Float64, Window

# Latest observations that are judged together, the most first, and in how many blocks.
_LENGTHS, _BLOCKS = (64, 32), 8
# Observations from one judgement to the next, and that are remembered.
_EVERY, _MEMORY = 8, 128
# The same of more ranks than these: a judgement looks at all of them.
_MANY, _SELDOM = 64, 32
# What lies apart from the start is a remark, and a warning at this many times the distance: shards
# are one writer's, one day's, or one class's at times, and differ by as much as digits that are
# mirrored. Of two ranks nobody can say that the others agree.
_PLAIN, _PLAIN_OF_TWO = 1.5, 2.0
# Standard errors by the number of different samples that a rank has read: 12 moments, some
# hundred judgements and a hundred ranks make 1e5 questions a run, of which 6 answers 1e-4.
_ERRORS = 6.0
# The same by the scatter of eight blocks: data that are read in order wander from block to block.
# Student's t with 7 degrees of freedom passes it once in 1e4, and all must lie on one side.
_STUDENT = 8.0
# Of the distance, what the other ranks may lie apart among themselves.
_AGREE = 1 / 3
# Times as far that one of two ranks has moved to be the one that did.
_MOVED = 3.0
# Times the furthest that as many observations had been off before, from which on a rank has moved:
# episodes of a game, or a file that is read in order, wander, and are unlike at any time.
_WANDERED = 2.0


@dataclass(frozen=True, slots=True)
class Unlike:
    """Ranks whose inputs are distributed otherwise than the others'.

    Attributes:
        distance: of the means that differ most, in standard deviations of single samples; of
            tokens, of mean signs.
        begun: whether it was so from the first observation on.
        far: from which distance on it counts.
    """

    ranks: tuple[int, ...]
    distance: float
    begun: bool
    series: str

    @property
    def plain(self) -> bool:
        """Whether it is more than what two sources may differ in."""
        times = _PLAIN if len(self.ranks) == 1 else _PLAIN_OF_TWO
        return not self.begun or self.distance > times * far(self.series)


@dataclass(slots=True)
class Group:
    """Ranks that read batches of one kind of data.

    Attributes:
        past: what they read, oldest first.
        read: samples of one rank that were observed.
        seen: number of observations; `first`: step of the first one.
    """

    members: tuple[int, ...]
    series: str
    past: deque[Batches] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    read: float = 0.0
    seen: int = 0
    first: int = -1
    watch: Watch[Unlike] = field(default_factory=lambda: Watch(clear_after=_SELDOM))

    def take(self, read: Batches, visits: float, most: float) -> None:
        """The next observation of all members.

        Args:
            visits: how often each sample has come so far; NaN where it is not known.
            most: samples that there are for a rank; infinite where it is not known.
        """
        self.past.append(read)
        self.first = read.step if self.first < 0 else self.first
        self.read += read.samples
        self.seen += 1
        every = _EVERY if len(self.members) <= _MANY else _SELDOM
        if self.seen % every or self.seen < _LENGTHS[-1]:
            return
        different = min(self.read / max(visits, 1.0) if visits > 0 else self.read, most)
        found = self._judged(different)
        if found is None:
            self.watch.good(read.step)
        else:
            self.watch.bad(read.step, found[0], first_step=found[1])

    def _judged(self, different: float) -> tuple[Unlike, int] | None:
        """Who is unlike the others, and since which step."""
        for length in _LENGTHS:
            latest = list(self.past)[-length:]
            if len(latest) < length:
                continue
            samples = max(min(different, sum(one.samples for one in latest)), 1.0)
            least = max(far(self.series), _ERRORS * math.sqrt(2 / samples))
            found = self._apart(latest, least)
            if found is not None:
                dated = self._dated(*found)
                if dated is not None:
                    return dated
        return None

    def _apart(self, latest: list[Batches], least: float) -> tuple[int, int, float, float] | None:
        """Place of the rank that lies apart, in which moment, how far, and the unit of that."""
        values = np.stack([one.moments for one in latest])
        away = _from_the_others(values)
        means = away.mean(axis=0)
        blocks = away.reshape(_BLOCKS, -1, *means.shape).mean(axis=1)
        error = blocks.std(axis=0, ddof=1) / math.sqrt(_BLOCKS)
        unit = scatter(self.series, values, float(np.median([one.samples for one in latest])))
        distance = np.abs(means) / unit
        one_side: Bool = (np.sign(blocks) == np.sign(means)).all(axis=0)
        lasting = one_side & (np.abs(means) > _STUDENT * error)
        candidates = np.where(lasting & (distance > least), distance, 0.0)
        place, moment = divmod(int(np.argmax(candidates)), candidates.shape[1])
        most = float(candidates[place, moment])
        if not most:
            return None
        rest = np.ptp(np.delete(values.mean(axis=0), place, axis=0), axis=0) / unit
        # Where the others differ, too, each reads data of its own.
        if rest[moment] > _AGREE * most or rest.max() > least:
            return None
        return place, moment, most, float(unit[moment])

    def _dated(
        self, place: int, moment: int, distance: float, unit: float
    ) -> tuple[Unlike, int] | None:
        values = np.stack([one.moments[:, moment] for one in self.past])
        course = _from_the_others(values[:, :, None])[:, place, 0]
        at, before, after = change_point(course)
        # What lies apart from the start, by little more than batches scatter, has not moved.
        rest = course - np.where(np.arange(len(course)) < at, before, after)
        error = float(rest.std()) * math.sqrt(1 / max(at, 1) + 1 / (len(course) - at))
        moved = at >= _EVERY and abs(before) < abs(after) / 2
        moved &= abs(after - before) > max(far(self.series) * unit, _ERRORS * error)
        pieces = [course[n : n + _EVERY].mean() for n in range(0, at - _EVERY + 1, _EVERY)]
        if moved and abs(after - before) < _WANDERED * np.abs(np.array(pieces) - before).max():
            return None
        who: tuple[int, ...] = (self.members[place],)
        if len(self.members) == 2:
            # Nobody can say which of two is right, but for the one that has moved.
            moves = np.abs(values[at:].mean(axis=0) - values[:at].mean(axis=0))
            sure = moved and moves.max() > _MOVED * moves.min()
            who = (self.members[int(np.argmax(moves))],) if sure else self.members
        facts = Unlike(who, distance, not moved, self.series)
        return facts, self.past[at].step if moved else self.first


@dataclass(slots=True)
class UnlikeInputs:
    """Follows how the inputs of all ranks are distributed."""

    groups: dict[tuple[tuple[int, ...], str], Group] = field(default_factory=dict)
    visits: Visits = field(default_factory=Visits)
    _most: float = math.inf

    def take(self, window: Window, received: Collection[int]) -> list[Finding]:
        """Goes through a window; what was found.

        Args:
            received: ranks that read no data.
        """
        self.visits.lay(window)
        lengths = mean_over_ranks(window, "loader_batches")[1]
        if len(lengths):
            self._most = float(lengths[-1])
        waiting = [
            (read.step, n, group, read)
            for n, group in enumerate(self._groups(window, received))
            for read in batches(window, group.series, group.members)
        ]
        for step, _, group, read in sorted(waiting, key=lambda one: one[:2]):
            self.visits.pass_to(step)
            group.take(read, self.visits.mean, self._most * read.samples)
        self.visits.pass_to(window.last_step)
        for (members, _), group in self.groups.items():
            if members not in window.data_parallel or _any(members, received):
                group.watch.good(window.last_step)  # they are others by now
        found = [e for group in self.groups.values() for e in group.watch.take(window.last_step)]
        return [_finding(episode) for episode in found]

    def _groups(self, window: Window, received: Collection[int]) -> list[Group]:
        return [
            self.groups.setdefault((members, series), Group(members, series))
            for members in window.data_parallel
            if len(members) > 1 and not _any(members, received)
            for series in (NUMBERS, TOKENS)
        ]


def _any(members: Iterable[int], among: Collection[int]) -> bool:
    return any(rank in among for rank in members)


def _from_the_others(values: Float64) -> Float64:
    """Each rank's moments, [N, R, M], minus the median of the other ranks'."""
    size = values.shape[1]
    if size == 2:
        half = values[:, 0] - values[:, 1]
        return np.stack([half, -half], axis=1)
    if size > 8:
        # One more or less among them does not move their median by more than they scatter.
        everybody: Float64 = values - np.median(values, axis=1, keepdims=True)
        return everybody
    others = [np.median(np.delete(values, n, axis=1), axis=1) for n in range(size)]
    apart: Float64 = values - np.stack(others, axis=1)
    return apart


def _finding(episode: Episode[Unlike]) -> Finding:
    facts = episode.facts
    several, who = len(facts.ranks) > 1, ranks(facts.ranks)
    tokens = facts.series == TOKENS
    since = "" if facts.begun else f" since step {episode.first_step}"
    title = (
        f"The inputs of {who} are not of one kind{since}"
        if several
        else f"The inputs of {who} are of another kind than the others'{since}"
    )
    apart = (
        f"the share of them that a hash puts into one of two halves differs by "
        f"{percent(facts.distance / 2)}"
        if tokens
        else f"they differ by {number(facts.distance)} standard deviations of a single sample"
    )
    return episode.finding(
        kind="data.outlier",
        key=f"inputs:unlike:{facts.ranks[0]}",
        severity="warning" if facts.plain else "info",
        title=title,
        ranks=facts.ranks,
        stage="batch",
        cause=sentences(
            f"Since step {episode.first_step} the {'tokens' if tokens else 'inputs'} of {who} have "
            "been distributed otherwise than "
            f"{'one another' if several else 'the other ranks'}: {apart}, at every sampled step.",
            "Another tokenizer, vocabulary or hash, another text, or another order of its tokens."
            if tokens
            else "Another preprocessing (mirrored, shifted, cropped, channels or columns in "
            "another order, other statistics), a file of another kind, or a shard that lacks "
            "some of the classes.",
        ),
        remedy=(
            f"Print one batch of {who} and of another rank side by side, decode it, and compare "
            "files, versions and settings of what makes batches of them. Where ranks are to read "
            "different sources, silence this alert."
        ),
        evidence={"distance": facts.distance, "moments": facts.series},
    )
