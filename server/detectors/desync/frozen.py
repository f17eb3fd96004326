"""Parameters that no optimizer moves, and that are not the same on all ranks.

Nothing moves them, so that they say nothing of the chain of a step, nor it of them: they are an
incident of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.detectors.desync.state import FROZEN, DesyncState
from rankscope.server.window import Comparison, Window


def take_frozen(
    state: DesyncState,
    comparisons: Iterable[Comparison],
    opened: Callable[[Comparison], Divergence],
) -> Iterator[Divergence]:
    """Goes through the comparisons of a window, of which it takes those of frozen parameters.

    Args:
        opened: makes an incident of a comparison.

    Yields:
        Incidents that are over.
    """
    for comparison in comparisons:
        if comparison.stage != FROZEN:
            continue
        state.checked[FROZEN] = state.checked.get(FROZEN, 0) + 1
        state.differed[FROZEN] = state.differed.get(FROZEN, 0) + (not comparison.equal)
        state.ranks = max(state.ranks, len(comparison.ranks))
        ended = state.frozen.take(comparison.step, [comparison], lambda broken: opened(broken[0]))
        if ended is not None:
            yield ended
        if comparison.equal:
            state.last_equal[FROZEN] = comparison.step


def standing(state: DesyncState, window: Window) -> Divergence | None:
    """The incident that stands at the end of a window, where it is to be reported."""
    frozen, chain = state.frozen.incident, state.incident
    if frozen is None:
        return None
    if not frozen.agreeing:
        frozen.stands(window.last_step, window.liveness)
    # Ranks that were built or loaded differently differ in all that they hold, at once.
    if chain is not None and chain.kind == frozen.kind and {*frozen.ranks} <= {*chain.ranks}:
        if chain.first_step <= frozen.first_step:
            return None
    return frozen
