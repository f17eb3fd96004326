"""Ranks whose losses count for more or less than the others', by how many there are in a step.

Of micro-batches each rank adds up the gradients of `n` mean losses, each divided by a number `d`
that the trainer chose: in an average over ranks it counts `n / d` times. Both are whole numbers,
known exactly and by design the same on all ranks, so that no statistic is needed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import rows_by_step
from rankscope.server.detectors.mechanisms.wording import agree, count, number, ranks, sentences
from rankscope.server.window import Bool, Float64, Window

PASSES, DIVISOR, SUMMED = "micro_steps", "loss_divisor", "losses_summed"
# Sampled steps that are looked at together, and at how many of them a rank has to count otherwise:
# the last group of an epoch may be smaller, on some ranks by one.
_SIZE, _TIMES = 16, 8
# Weights that differ by less do no harm beside the noise of a gradient.
_SAME = 0.01
_NONE = np.empty(0)


@dataclass(slots=True)
class Counted:
    """What was seen.

    Attributes:
        suspects: ranks that count otherwise; all where nothing shows which ones are wrong.
        decided: whether something does.
        usual: weight of the others, or of all ranks before.
        passes, divisors: by rank, at the last step at which they did.
        weights: the two's ratio.
    """

    suspects: tuple[int, ...]
    decided: bool
    usual: float
    passes: dict[int, float]
    divisors: dict[int, float]
    weights: dict[int, float]


@dataclass(slots=True)
class UnevenPasses:
    """Follows the ranks of the largest set that share their data.

    Attributes:
        who: those ranks.
        level: what all of them counted when they were last the same; NaN before.
        newest: passes, divisors and weights, [R] each, when they were last not the same.
    """

    who: tuple[int, ...] = ()
    level: float = np.nan
    newest: tuple[Float64, Float64, Float64] = field(default_factory=lambda: (_NONE,) * 3)
    recent: deque[tuple[int, Float64]] = field(default_factory=lambda: deque(maxlen=_SIZE))
    watch: Watch[Counted] = field(default_factory=lambda: Watch(clear_after=16))

    def take(self, window: Window) -> None:
        """Goes through a window's steps."""
        who = max(window.data_parallel, key=len)
        if who != self.who:
            self.who, self.level = who, np.nan
            self.recent.clear()
        chosen = np.flatnonzero(np.isin(window.ranks, who))
        if len(chosen) < 2:
            return
        divided = rows_by_step(window, DIVISOR)
        samples = rows_by_step(window, "samples")
        summed = rows_by_step(window, SUMMED)
        for step, row in rows_by_step(window, PASSES).items():
            passes = row[chosen]
            if not (passes > 0).all():  # NaN where a rank posts none
                continue
            divisors = np.ones(len(chosen))
            if step in divided:
                divisors = np.nan_to_num(divided[step][chosen], nan=1.0)
            weights = passes / divisors
            if _same(weights, float(weights[0])).all():
                self.level = float(weights[0])
            elif step in summed or (
                step in samples and _by_samples(weights, samples[step][chosen])
            ):
                continue
            else:
                self.newest = passes, divisors, weights
            self.recent.append((step, weights))
            found = self._judge()
            if found is None:
                self.watch.good(step)
                continue
            odd, decided, usual, since = found
            held = window.ranks[chosen].tolist()
            by_rank = [dict(zip(held, v.tolist(), strict=True)) for v in self.newest]
            suspects = tuple(r for r, is_odd in zip(held, odd.tolist(), strict=True) if is_odd)
            facts = Counted(suspects, decided, usual, *by_rank)
            self.watch.bad(step, facts, first_step=since).facts = facts

    def _judge(self) -> tuple[Bool, bool, float, int] | None:
        """Which ranks count otherwise, whether that is decided, than what, and since when."""
        if len(self.recent) < _TIMES:
            return None
        rows = np.array([weights for _, weights in self.recent])
        usual, decided = self.level, True
        if np.isnan(usual):
            values, times = np.unique(rows[-1], return_counts=True)
            usual = float(values[times.argmax()])
            decided = bool(2 * times.max() > rows.shape[1])
        differs = ~_same(rows, usual)
        odd = differs.sum(axis=0) >= _TIMES
        # Where the others vary, too, that is how batches are made.
        if not odd.any() or odd.all() or differs[:, ~odd].any():
            return None
        since = self.recent[int(np.argmax(differs.any(axis=1)))][0]
        return (odd if decided else np.ones_like(odd)), decided, usual, since

    def findings(self, window: Window) -> tuple[Finding, ...]:
        """What is to be reported after a window."""
        return tuple(_finding(episode) for episode in self.watch.take(window.last_step))


def _same(values: Float64, usual: float) -> Bool:
    same: Bool = np.abs(values - usual) <= _SAME * abs(usual)
    return same


def _by_samples(weights: Float64, samples: Float64) -> bool:
    """Whether ranks count by their samples, and one on average: so unequal shares should."""
    shares = weights / samples
    alike = bool(_same(shares, float(shares[0])).all())
    return alike and bool(_same(weights.mean(keepdims=True), 1.0).all())


def _finding(episode: Episode[Counted]) -> Finding:
    facts, step = episode.facts, episode.first_step
    who, one = ranks(facts.suspects), len(facts.suspects) == 1
    others = [r for r in facts.passes if r not in facts.suspects]
    mine = [facts.passes[r] for r in facts.suspects]
    theirs = [facts.passes[r] for r in others] or mine
    times = facts.weights[facts.suspects[0]] / facts.usual
    if not facts.decided:
        title = f"The losses of {who} have unequal weights since step {step}"
    elif len({*mine}) == 1 and {*mine} != {*theirs}:
        title = (
            f"{who.capitalize()} {agree(len(facts.suspects), 'adds')} up "
            f"{count(int(mine[0]), 'micro-batch')} a step and the others "
            f"{number(theirs[0])}, since step {step}"
        )
    else:
        title = (
            f"The {'loss' if one else 'losses'} of {who} {'counts' if one else 'count'} "
            f"{number(times)} times since step {step}"
        )
    seen = "; ".join(
        f"{count(int(facts.passes[rank]), 'backward pass')} of losses divided by "
        f"{number(facts.divisors[rank])} on rank {rank}"
        for rank in (*facts.suspects[:2], *others[:1])
    )
    cause = sentences(
        f"A step adds up {seen}.",
        f"In an average over ranks {who} {'counts' if one else 'count'} {number(times)} times what "
        "another rank does."
        if facts.decided
        else "In an average over ranks they do not count the same.",
        "A loop over micro-batches that is longer or shorter on some ranks, an accumulation that "
        "is counted on from another step, or a loss that is divided by another number there.",
        "" if facts.decided else "With two ranks, nothing shows which one is wrong.",
    )
    return episode.finding(
        kind="data.imbalanced",
        key="passes",
        severity="warning",
        title=title,
        ranks=facts.suspects,
        stage="batch",
        cause=cause,
        remedy=(
            "Run the same number of micro-batches in each step on all ranks, and divide each loss "
            "by that number; where ranks are meant to have more of them, divide by what all ranks "
            "have together (all-reduced) and multiply by the number of ranks."
        ),
        evidence={
            "passes": {str(rank): n for rank, n in facts.passes.items()},
            "divisors": {str(rank): n for rank, n in facts.divisors.items()},
            "times": times,
            "observed": episode.seen,
        },
    )
