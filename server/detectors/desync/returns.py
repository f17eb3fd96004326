"""Ranks that become equal again and again, as they do where they synchronise on purpose. Pure."""

from __future__ import annotations

import math

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.desync.averaging_rounds import MissedRound, interval_of
from rankscope.server.detectors.desync.explain import periodic_finding, versions_finding
from rankscope.server.detectors.desync.state import DesyncState
from rankscope.server.detectors.desync.versions import VersionFacts
from rankscope.server.window import Comparison

# Rounds in a row that no rank makes, after which there are none any more: an interval may be
# doubled, and doubled again, on purpose.
_ROUNDS = 4
# And steps, at the least: after a phase of averages at every step they may come every 32.
_STEPS = 64


def interval_of_returns(state: DesyncState, needed: int) -> int:
    """Steps from one return to equality to the next, 0 where they come at no known interval.

    Args:
        needed: returns at equal distances, where the ranks do not say when they write.
    """
    returns = list(state.returns)
    intervals = np.diff(returns)
    # Where ranks say at every step whether they write, it is known that no round was between.
    rounds = state.averaging_rounds.period
    if rounds and len(returns) > 1 and not (intervals % rounds).any():
        period = rounds
    elif len(returns) >= needed and not (intervals[1 - needed :] != intervals[-1]).any():
        period = int(intervals[-1])
    else:
        return 0
    return period if period > 1 or state.between else 0


def still_periodic(
    state: DesyncState,
    step: int,
    parameters: Comparison | None,
    version_facts: VersionFacts,
) -> bool:
    """Whether what is compared at a step fits ranks that become equal at the interval alone."""
    since = step - state.returns[-1]
    if version_facts.joined and since % state.period:
        # There are more rounds than the ones at which they had been examined.
        period = math.gcd(state.period, since)
        state.period = period if period > 1 else state.period
        return period > 1
    if parameters is None or (state.between and not version_facts.between and not parameters.equal):
        return True
    # Equal between two synchronisations: they are equal all the time now.
    return (parameters.equal or version_facts.joined) == (since % state.period == 0)


def missed_at(state: DesyncState, facts: VersionFacts, step: int) -> MissedRound | None:
    """The synchronisation that some ranks missed at a step, or that all of them no longer make."""
    if facts.outside and state.returns:
        return MissedRound(step, interval_of(state.returns))
    if facts.outside and state.never_met.found:
        return MissedRound(state.never_met.rounds[0], state.never_met.interval)
    due = state.due
    if due is None or step - due.step < max(_ROUNDS * due.period, _STEPS):
        return None
    # Ranks that were equal once more since then go on at another interval.
    equal = bool(state.returns) or state.last_equal.get("parameters", -1) >= due.step
    return due if not equal and state.averaging_rounds.none_since(due.step) else None


def returns_finding(state: DesyncState, last_step: int) -> Finding:
    """What is reported of synchronisation on purpose, as it stands at a step."""
    return periodic_finding(
        period=state.period,
        since=state.periodic_since,
        seen=state.periodic_seen,
        last_step=max(last_step, state.periodic_seen),
    )


def workers_finding(state: DesyncState, last_step: int) -> Finding:
    """What is reported of versions of one model, as it stands at a step."""
    assert state.workers is not None
    return versions_finding(
        since=state.workers.since,
        last_step=max(last_step, state.workers.since),
        caught_up=state.workers.caught_up,
    )
