"""What is known of a divergence at the step at which it is first seen.

Which link broke first, who is suspected, since when they may differ, what still agreed, and whether
ranks that differ from all others may be meant to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.detectors.desync.optimizer_settings import STAGE as SETTINGS_STAGE
from rankscope.server.detectors.desync.order import (
    differing_setting,
    held_elsewhere,
    reduces_no_longer,
)
from rankscope.server.detectors.desync.resets import Blame
from rankscope.server.detectors.desync.state import GRADIENTS, KIND_OF_STAGE, DesyncState
from rankscope.server.window import Comparison, Window


def open_divergence(
    window: Window,
    state: DesyncState,
    broken: Sequence[Comparison],
    comparisons: Sequence[Comparison],
    *,
    clear_after: int,
) -> Divergence:
    """The divergence that begins with what differs at one step.

    Args:
        broken: what differs, in the order of the chain; at least one.
        comparisons: all of the step.
        clear_after: steps of agreement after which it is over.
    """
    first = broken[0]
    blame = state.resets.blame(first, state.last_equal)
    blame = state.writers.blame(window, first, blame)
    agreed = [state.last_equal.get(stage) for stage in (first.stage, "parameters")]
    agreed_until = max((step for step in agreed if step is not None), default=None)
    setting = ""
    values: Mapping[int, float] = {}
    if first.stage == SETTINGS_STAGE:
        setting, values = differing_setting(window, first)
        if not setting:
            setting, values = state.given.differing(window, first)
        elsewhere = held_elsewhere(window, first, setting)
        blame = _on_the_side_of(blame, {r for r, v in values.items() if v in elsewhere})
    elif first.stage in ("outside_optimizer", "parameters"):
        blame = _on_the_side_of(blame, state.servers.until(window, first.step))
    return Divergence(
        first_step=blame.first_step,
        reported=blame.reported,
        seen_step=first.step,
        last_step=first.step,
        clear_after=clear_after,
        kind=KIND_OF_STAGE[blame.stage],
        stage=blame.stage,
        ranks=blame.suspects,
        decided=blame.decided,
        groups=blame.groups,
        agreed=tuple(
            c.stage
            for c in comparisons
            if c.equal and set(first.deviating) <= set(c.ranks.tolist())
        ),
        by_norm=tuple(
            c.stage for c in comparisons if c.equal and c.stage in GRADIENTS and not c.tensor_count
        ),
        last_equal=state.last_equal.get(first.stage),
        agreed_until=agreed_until,
        unwatched=(
            agreed_until is None
            or state.gradients_until < first.step
            or state.gradients_since > agreed_until + 1
        ),
        setting=setting,
        values=values,
        tentative=_may_be_meant(window, state, first, comparisons),
        at_start=any(first.step in begins for begins in window.begins.values()),
    )


def _on_the_side_of(blame: Blame, right: Collection[int]) -> Blame:
    """Where the ranks alone do not tell who is wrong, those that differ from these are.

    Of two ranks that share a part of the model, the one that is set as ranks of other parts are is
    right; and of a server and a worker that holds its parameters the server.
    """
    members = {rank for group in blame.groups for rank in group}
    sound = members.intersection(right)
    if blame.decided or not sound or sound == members:
        return blame
    others = tuple(group for group in blame.groups if sound.isdisjoint(group))
    if len(others) != len(blame.groups) - 1:
        return blame
    return replace(
        blame,
        decided=True,
        suspects=tuple(sorted(members - sound)),
        groups=(tuple(sorted(sound)), *others),
    )


def _may_be_meant(
    window: Window, state: DesyncState, first: Comparison, comparisons: Sequence[Comparison]
) -> bool:
    """Whether ranks that are all by themselves may train alone on purpose, or until an average."""
    if int(first.clusters.max()) + 1 != len(first.ranks):
        return False
    if first.stage not in (*GRADIENTS, "parameters"):
        return False
    if reduces_no_longer(window, first.step):
        return True
    agreed = any(state.last_equal.get(stage) for stage in (*GRADIENTS, "parameters"))
    if agreed and not state.returns:
        return False
    # Who shares gradients does not clip them in a way of its own; parameters that each updates in
    # part may be gathered before the next forward pass.
    shared = any(c.equal and c.stage in GRADIENTS for c in comparisons)
    if first.stage in GRADIENTS and shared:
        return False
    return "data_parallel" in window.config and not window.config["data_parallel"]
