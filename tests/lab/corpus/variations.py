"""Variations of runs, of which the same has to be said: another unit of the loss, other numbers of
the ranks, other windows, and fewer steps logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors import build
from rankscope.server.detectors.settings import Effective
from tests.support.judging import Judgement, judge, verdict
from tests.support.runs.traces import Trace

FACTORS = (1e-3, 1e3)
# Of this number of steps one is logged.
SPARSE = (5, 20)
# Steps in a window; the replay of a finished run takes them all at once.
_WINDOW = 50
# An answer that would claim that all is well.
_CLEARED = "ok"


@dataclass(frozen=True)
class Difference:
    """What was said of a variation of a run, and should not have been.

    Attributes:
        how: the variation: `loss x 0.001`, `ranks renumbered`, `at once`, `every 5th`.
        kinds: of which it was.
    """

    how: str
    kinds: tuple[str, ...]


def plainly(run: Trace, settings: Effective) -> Judgement:
    """A run as it was, in windows of 50 steps."""
    return judge(run, build(settings), range(0, len(run.steps), _WINDOW), settings=settings)


def differences(run: Trace, settings: Effective, plain: Judgement) -> Iterator[Difference]:
    """All variations of a run that change what is said of it.

    At fewer steps an alert may be missed, but nothing new may be raised, and what is missed must
    not be said to be in order.
    """
    for factor in FACTORS:
        found = plainly(run.scaled(factor), settings)
        yield from _changed(f"loss x {factor:g}", plain, found)
    order = np.random.default_rng(run.seed).permutation(run.ranks).tolist()
    found = plainly(run.permuted(order), settings)
    yield from _changed("ranks renumbered", plain, found, order)
    yield from _changed("at once", plain, judge(run, build(settings), settings=settings))
    for every in SPARSE:
        found = plainly(run.thinned(every), settings)
        known = {alert.kind for alert in plain.alerts}
        new = _serious(found) - known
        if new:
            yield Difference(f"every {every}th: raised", tuple(sorted(new)))
        cleared = {
            kind
            for kind in _serious(plain) - {alert.kind for alert in found.alerts}
            if found.checks[kind].status == _CLEARED
        }
        if cleared:
            yield Difference(f"every {every}th: missed and called ok", tuple(sorted(cleared)))


def _changed(
    how: str, plain: Judgement, found: Judgement, order: Sequence[int] | None = None
) -> Iterator[Difference]:
    was = {verdict(alert) for alert in plain.alerts}
    now = {verdict(alert, order) for alert in found.alerts}
    kinds = {str(reported[0]) for reported in was ^ now}
    kinds |= {k for k, check in plain.checks.items() if found.checks[k].status != check.status}
    if kinds:
        yield Difference(how, tuple(sorted(kinds)))


def _serious(judgement: Judgement) -> set[str]:
    return {alert.kind for alert in judgement.alerts if alert.severity != "info"}
