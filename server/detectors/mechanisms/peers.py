"""Has one rank stopped being like the others? Pure.

Ranks of one job need not be alike: shards and batches differ. But how a rank's value lies
relative to the others' is exchangeable over time while nothing happens to that rank. Two things
break that: its distance from them moves for good, or single values of it stand out again and again.
Both are judged by what the distances were before; no absolute size is asked for but a floor.

Sources: two-sample tests on medians (their standard error is sqrt(pi / 2) of the mean's); records
of exchangeable values (each of N is the largest with probability 1 / N).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.equal_distances import tail
from rankscope.server.detectors.mechanisms.statistics import (
    change_point,
    known_median,
    others_median,
)
from rankscope.server.window import Bool, Float64, Int64

# Observations between two judgements: the fewest of which a median says something.
BLOCK = 8
# Observations before a change, at the least, that say what was usual: of this many normal values
# the median absolute deviation is within a factor of 1.6 of the truth (95 %).
BEFORE = 24
# Observations that are remembered.
MEMORY = 512
# Observations after a change that are tried, smallest first.
_AFTER = (8, 16, 32, 64)
# A median that has moved by this many of its standard errors. Some 20 windows of a run, 4 lengths
# and up to 1,024 ranks are tested: 5.6 would do for one false alarm in 1,000 runs of normal
# distances; what is left is for tails that are not normal and for values that are not independent.
_SHIFTED = 8.0
# What moves by less than this many standard deviations of single values overlaps with what it was.
_MATERIAL = 2.0
# Single values beyond all before that make it a habit; the chance of as many, and the largest of
# its two factors: a run of 1,000 steps is judged 125 times, at 3 lengths.
_RECURRING, _CHANCE, _BESIDE = 4, 1e-8, 2e-3
# Chance with which what drifts may make a move that is no drift, beside all else that is asked.
_DRIFT_CHANCE = 1e-3
# Median multiple of the record by which they pass it: records of wandering or ever more scattered
# values are passed by a tenth, bad batches by the half and more.
_BEYOND = 1.5
# Standard deviations that the other values of that time may have moved to the same side: where they
# went along, the whole of what the rank has has moved, as a shard that is learned better does.
_ALONG = 0.7
# Median of the absolute values of normal noise -> its standard deviation.
_TO_SIGMA = 1.4826
# Distances of logarithms below this are rounding, not a difference.
_FLOOR = 0.02
# Of more ranks than these only the ones that stand out most are tested.
_MOST = 64
# Of single losses that stand out: the share of their distance from which on others stand out as
# far, and how often they do, as a share, where it is nobody's alone.
_HALF, _AS_OFTEN = 0.5, 1 / 3


@dataclass(frozen=True, slots=True)
class Change:
    """One rank that is no longer like the others.

    Attributes:
        question: `shift` for a lasting move, `recurring` for single values again and again.
        ranks: the suspect one; both of two where nothing shows which.
        first_step, seen_step: since when, and the newest observation.
        size: logarithm of how many times the others' its values have become.
        z: in standard errors, or of single values in multiples of the furthest before.
        count: observations that show it.
    """

    question: str
    ranks: tuple[int, ...]
    first_step: int
    seen_step: int
    size: float
    z: float
    count: int


@dataclass(slots=True)
class PeerChange:
    """Follows the distances of positive values from the other ranks' median.

    Attributes:
        ranks: that are compared, int64 [R].
        steps: of what is remembered.
        logs: logarithms of the values, float64 [R] each.
    """

    ranks: Int64
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=MEMORY))
    logs: deque[Float64] = field(default_factory=lambda: deque(maxlen=MEMORY))
    _waiting: int = 0

    def push(self, step: int, values: Float64) -> Iterator[Change]:
        """Takes the values of a step: float64 [R], positive, NaN where a rank has none."""
        self.steps.append(step)
        usable = (values > 0) & (values < np.inf)
        self.logs.append(np.log(np.where(usable, values, np.nan)))
        self._waiting += 1
        if self._waiting >= BLOCK:
            self._waiting = 0
            if len(self.logs) >= BEFORE + BLOCK and len(self.ranks) > 1:
                yield from self._judge()

    # ------------------------------------------------------------------------------------- inside

    def _judge(self) -> Iterator[Change]:
        logs = np.array(self.logs)
        away = distances(logs)
        chosen = self._standing_out(away)
        if not len(chosen):
            return
        for after in _AFTER:
            if len(away) - after < BEFORE:
                break
            found = self._shifted(logs, away, chosen, after)
            if found is not None:
                yield found
                return
        for after in _AFTER[1:]:
            if len(away) - after < BEFORE:
                break
            found = self._recurring(logs, away, chosen, after)
            if found is not None:
                yield found
                return

    def _standing_out(self, away: Float64) -> Int64:
        """Columns that are worth a test: all of a few ranks, of many the most unusual."""
        if away.shape[1] <= _MOST:
            return np.arange(away.shape[1])
        recent, before = away[-_AFTER[-1] :], away[: -_AFTER[0]]
        usual = _median(before)
        far = np.nan_to_num(np.abs(recent - usual))
        order = np.argsort(-np.partition(far, -_RECURRING, axis=0)[-_RECURRING])
        return np.sort(order[:_MOST])

    def _shifted(self, logs: Float64, away: Float64, chosen: Int64, after: int) -> Change | None:
        before, late = away[:-after, chosen], away[-after:, chosen]
        usual, now = _median(before), _median(late)
        # Losses scatter more, by factors, as they fall: neither side alone says how much, nor do a
        # few values of one rank, which lie close together by chance now and then. What they did
        # just before a change says more than a long plateau at which all gave one answer.
        own, recent = _spread(late, now), before[-BEFORE:]
        scatter = np.fmax(_spread(before, usual), _spread(recent, _median(recent)))
        scatter = np.fmax(np.fmax(scatter, own), known_median(own))
        sigma = np.maximum(scatter, _FLOOR)
        size = now - usual
        # Distances that wander have means that wander: neighbours' moves are the measure then.
        error = sigma * math.sqrt(math.pi / 2 * (1 / after + 1 / len(before)))
        whole = len(before) // after
        if whole < 2:
            return None
        pieces = before[len(before) - whole * after :].reshape(whole, after, -1)
        # A rank may have nothing in one of them: the others say how far it wanders.
        wander = _range(known_median(pieces, axis=1))
        # All of n moves of what drifts are C times as small as the next one by chance in C^-n.
        moves = (whole - 1) * max(len(self.ranks) - 1, 1)
        farther = max(2.0, _DRIFT_CHANCE ** (-1 / moves))
        lasting = self._lasting(late, usual, sigma, size)
        z = np.abs(size) / np.maximum(error, 1e-12)
        fires = (
            lasting
            & (z > _SHIFTED)
            & (np.abs(size) > _MATERIAL * sigma)
            & (np.abs(size) > farther * wander)
        )
        fires &= np.isfinite(size)
        if not fires.any():
            return None
        top = int(np.argmax(np.where(fires, np.abs(size), 0.0)))
        others = np.delete(np.nan_to_num(np.abs(size)), top)
        # With half of the ranks moved, which half it was is not known; nor is it one rank's matter.
        if len(self.ranks) > 2 and others.max() > 0.5 * abs(size[top]):
            return None
        column = int(chosen[top])
        there = np.isfinite(away[:, column])
        at, _, _ = change_point(away[there, column])
        steps = np.array(self.steps)
        return Change(
            question="shift",
            ranks=self._suspects(logs, column, after),
            first_step=int(steps[there][at]),
            seen_step=int(steps[-1]),
            size=float(size[top]),
            z=float(z[top]),
            count=int(np.isfinite(away[-after:, column]).sum()),
        )

    def _lasting(self, late: Float64, usual: Float64, sigma: Float64, size: Float64) -> Bool:
        """Whether both halves of what came after lie on the same side, well away."""
        half = len(late) // 2
        first, second = _median(late[:half]) - usual, _median(late[half:]) - usual
        same = (np.sign(first) == np.sign(size)) & (np.sign(second) == np.sign(size))
        least = np.minimum(np.abs(first), np.abs(second))
        lasting: Bool = same & (least > 0.5 * _MATERIAL * sigma)
        return lasting

    def _recurring(self, logs: Float64, away: Float64, chosen: Int64, after: int) -> Change | None:
        before, late = away[:-after, chosen], away[-after:, chosen]
        usual = _median(before)
        # Further than any value of any rank before, on its side, whatever the shape of the tail.
        past, now = before - usual, late - usual
        records = [float(np.nanmax(side * past, initial=10 * _FLOOR)) for side in (1, -1)]
        outs = [side * now > record for side, record in zip((1, -1), records, strict=True)]
        out = np.where(outs[0].sum(axis=0) >= outs[1].sum(axis=0), *outs)
        counts = out.sum(axis=0)
        top = int(np.argmax(counts))
        count = int(counts[top])
        if count < _RECURRING:
            return None
        # Of exchangeable values all of these would come late with this chance.
        chance = (after / len(away)) ** count
        column, rows = int(chosen[top]), np.flatnonzero(out[:, top])
        suspects = self._suspects(logs, column, after, rows)
        if len(self.ranks) > 2:
            # And all would belong to one rank with this: where all scatter more, they do not.
            world = len(self.ranks)
            beside = min(world * tail(int(counts.sum()), count, 1 / world), 1.0)
        else:
            beside = 1.0 if len(suspects) > 1 else _BESIDE
        if beside > _BESIDE or chance > _BESIDE or chance * beside > _CHANCE:
            return None
        beyond = float(np.median(np.abs(now[rows, top]))) / records[bool(now[rows[0], top] < 0)]
        if beyond < _BEYOND:
            return None  # what wanders, or scatters more and more, passes its records by little
        between = slice(rows[0], rows[-1] + 1)
        rest = now[between, top][~out[between, top]]
        rest = rest[np.isfinite(rest)]
        # Where all of them have moved there is no rest that could have gone along.
        along = np.median(rest) * np.sign(now[rows[0], top]) if len(rest) else 0.0
        if along > _ALONG * max(float(_spread(before, usual)[top]), _FLOOR):
            return None
        # An ordinary value that was a record before them is none of them.
        rows = rows[np.abs(now[rows, top]) > 0.7 * np.median(np.abs(now[rows, top]))]
        steps = np.array(self.steps)[-after:]
        return Change(
            question="recurring",
            ranks=suspects,
            first_step=int(steps[rows[0]]),
            seen_step=int(steps[-1]),
            size=float(np.median(now[rows, top])),
            z=beyond,
            count=count,
        )

    def _suspects(
        self, logs: Float64, column: int, after: int, rows: Int64 | None = None
    ) -> tuple[int, ...]:
        """Of two ranks the one that has moved itself, where the other has not."""
        if len(self.ranks) > 2:
            return (int(self.ranks[column]),)
        late = logs[-after:] if rows is None else logs[-after:][rows]
        moved = np.abs(_median(late) - _median(logs[:-after][-2 * after :]))
        if moved.max() < 3 * moved.min():
            return tuple(self.ranks.tolist())
        return (int(self.ranks[int(np.argmax(moved))]),)


def distances(logs: Float64) -> Float64:
    """Each rank's logarithm minus the median of all ranks' at its step; float64 [N, R]."""
    if logs.shape[1] == 2:
        half = 0.5 * (logs[:, 0] - logs[:, 1])
        return np.stack([half, -half], axis=1)
    there = np.isfinite(logs).sum(axis=1) > 1
    middle = np.where(there, known_median(logs, axis=1), np.nan)
    away: Float64 = logs - middle[:, None]
    return away


def _range(pieces: Float64) -> Float64:
    """Largest minus smallest known value of each column; NaN of fewer than two."""
    known = ~np.isnan(pieces)
    highest = np.where(known, pieces, -np.inf).max(axis=0)
    lowest = np.where(known, pieces, np.inf).min(axis=0)
    return np.where(known.sum(axis=0) > 1, highest - lowest, np.nan)


def _spread(values: Float64, middle: Float64) -> Float64:
    """Robust standard deviation of each column."""
    spread: Float64 = _TO_SIGMA * _median(np.abs(values - middle))
    return spread


def _median(values: Float64) -> Float64:
    if not len(values):
        return np.full(values.shape[1], np.nan)
    if np.isnan(values).any():
        return known_median(values)
    ordered = np.sort(values, axis=0)
    count = len(values)
    middle: Float64 = 0.5 * (ordered[(count - 1) // 2] + ordered[count // 2])
    return middle


def either_way(losses: Float64, known: Int64, change: Change) -> bool:
    """Whether others stand out as far as often: wrong labels here and there come to any rank.

    Args:
        losses: float64 [N, R], all that are remembered.
    """
    column = int(np.searchsorted(known, change.ranks[0]))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.log(losses / others_median(losses))[:, column]
    ratios = ratios[np.isfinite(ratios)]
    if not len(ratios):
        return False
    far = (ratios - np.median(ratios)) / (_HALF * change.size)
    return bool((far < -1).sum() >= _AS_OFTEN * max((far > 1).sum(), 1))
