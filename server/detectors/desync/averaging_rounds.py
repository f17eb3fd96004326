"""Averages of the parameters that a rank missed, found without reading the parameters.

Ranks that train for themselves write their parameters when they average them, and say so at every
step. A rank that misses one average is made equal by the next one: between two samples nobody would
see that it differed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.wording import agree, ranks
from rankscope.server.window import Window

MARK = "parameters_written"
# Every step posts its loss: a rank that did, and wrote nothing, has no mark.
_ALIVE = "loss"


@dataclass(frozen=True, slots=True)
class AveragingRound:
    """A step before which parameters were written.

    Attributes:
        absent: ranks that wrote nothing.
        present: ranks that did.
        compared: whether what was written was compared.
    """

    step: int
    absent: tuple[int, ...]
    present: tuple[int, ...]
    compared: bool


@dataclass(frozen=True, slots=True)
class MissedRound:
    """A synchronisation that was due and did not make all ranks equal.

    Attributes:
        step: at which it was due.
        period: steps from one to the next.
        ended: whether there was none since, of any rank.
    """

    step: int
    period: int
    ended: bool = False


@dataclass(slots=True)
class AveragingRounds:
    """When the ranks wrote their parameters together.

    Two averages of all, one without some of them and the next one again with all (or without the
    same ones), at one interval: single ranks that write now and then make no such pattern. Or four
    at one interval, each without the same ones, where every rank trains for itself.

    Attributes:
        never: the first of the rounds in which the same ranks never took part, and the one at which
            that was known; None for none.
        wrote: ranks that have taken part in any.
    """

    last: deque[AveragingRound] = field(default_factory=lambda: deque(maxlen=4))
    never: tuple[AveragingRound, int] | None = None
    wrote: set[int] = field(default_factory=set)

    @property
    def at(self) -> int:
        """The last step before which all wrote; -1 for none."""
        return next((m.step for m in reversed(self.last) if not m.absent), -1)

    def none_since(self, step: int) -> bool:
        """Whether ranks that say when they write wrote nothing before this step or a later one."""
        return bool(self.last) and self.last[-1].step < step

    @property
    def period(self) -> int:
        """Steps from one average to the next, of the last three in which all took part; else 0."""
        whole = [averaging.step for averaging in self.last if not averaging.absent]
        intervals = {after - before for before, after in pairwise(whole[-3:])}
        return intervals.pop() if len(whole) > 2 and len(intervals) == 1 else 0

    def found(self, window: Window, members: Sequence[int]) -> list[AveragingRound]:
        """The steps of a window before which any of the ranks wrote its parameters."""
        marks, alive = window.series.get(MARK), window.series.get(_ALIVE)
        if marks is None or alive is None:
            return []
        rows = np.flatnonzero(np.isin(window.ranks, members))
        # Where what was written was examined, it is known who holds what.
        compared = {c.step for c in window.comparisons if c.stage == "outside_optimizer"}
        if not window.rank_local.isdisjoint(members):
            # It is copies of their own that they write, and nobody compares these.
            compared.clear()
        met = []
        for column in np.flatnonzero(marks.present[rows].any(axis=0)).tolist():
            step = int(window.steps[column])
            if len(rows) < 2 or not alive.present[rows, column].all():
                continue
            wrote = marks.present[rows, column]
            absent, present = window.ranks[rows[~wrote]], window.ranks[rows[wrote]]
            met.append(
                AveragingRound(
                    step, tuple(absent.tolist()), tuple(present.tolist()), step in compared
                )
            )
        return met

    def take(self, averaging: AveragingRound, *, alone: bool) -> Finding | None:
        """Takes one step after the other; reports an average when the next one has come.

        Args:
            alone: whether every rank has trained for itself so far.
        """
        self.last.append(averaging)
        self.wrote.update(averaging.present)
        return self._missed() or self._never(averaging.step, alone=alone)

    def _never(self, step: int, *, alone: bool) -> Finding | None:
        if len(self.last) < 4:
            return None
        first, *others = self.last
        period = others[0].step - first.step
        regular = period >= 2 and all(b.step - a.step == period for a, b in pairwise(self.last))
        same = bool(first.absent) and all(other.absent == first.absent for other in others)
        same &= self.wrote.isdisjoint(first.absent)
        if not (regular and same and (alone or self.never is not None)):
            self.never = None
            return None
        if self.never is None:
            self.never = first, step
        began, seen = self.never
        return _never_finding(began, period, seen, step)

    def _missed(self) -> Finding | None:
        if len(self.last) < 4:
            return None
        first, second, third, fourth = self.last
        period = second.step - first.step
        steps = (first.step, second.step, third.step, fourth.step)
        regular = period >= 2 and all(b - a == period for a, b in pairwise(steps))
        if not regular or first.absent or second.absent or not third.absent or third.compared:
            return None
        if fourth.absent not in ((), third.absent):
            return None
        return _finding(third, period, fourth.step)


def interval_of(returns: Sequence[int]) -> int:
    """Steps between the last two synchronisations; since the first one, where there was but one."""
    return returns[-1] - returns[-2] if len(returns) > 1 else max(returns[-1], 1)


def _never_finding(began: AveragingRound, period: int, seen: int, step: int) -> Finding:
    who = ranks(began.absent)
    return Finding(
        kind="desync.parameters",
        key="never averaged",
        severity="critical",
        title=f"{who.capitalize()} never {agree(len(began.absent), 'takes')} the average of the "
        "parameters",
        seen_step=seen,
        last_step=step,
        first_step=began.step,
        ranks=began.absent,
        stage="outside_optimizer",
        cause=(
            f"Every rank trains for itself, and every {period} steps {ranks(began.present)} "
            f"{agree(len(began.present), 'writes')} parameters outside the optimizer: the average, "
            f"or what an outer optimizer makes of it. {who.capitalize()} "
            f"{agree(len(began.absent), 'has')} never done so, and "
            f"{agree(len(began.absent), 'goes')} on from parameters of its own."
        ),
        remedy=(
            f"Look at the condition under which {who} copies the average back, and at which "
            "parameters it copies to. Broadcast the parameters once from a rank that holds it."
        ),
        clear_after=period,
        evidence={"period": period, "took_part": list(began.present)},
    )


def _finding(missed: AveragingRound, period: int, seen: int) -> Finding:
    who, step = ranks(missed.absent), missed.step
    return Finding(
        kind="desync.parameters",
        key="left out",
        severity="warning",
        title=f"{who.capitalize()} missed the average of the parameters before step {step}",
        seen_step=seen,
        last_step=seen,
        first_step=step,
        ranks=missed.absent,
        stage="outside_optimizer",
        cause=(
            f"Every {period} steps all ranks write their parameters outside the optimizer: they "
            f"average them. Before step {step} {ranks(missed.present)} did, and {who} did not: "
            "it left the average out, or kept its own parameters."
        ),
        remedy=(
            f"Look at the condition under which {who} averages, and at what it does with the "
            "result. The next average that it takes part in makes the ranks equal again, with "
            "what it learned alone mixed in."
        ),
        clear_after=period,
        evidence={"period": period, "took_part": list(missed.present)},
    )
