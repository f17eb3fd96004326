"""Which of two links was first, where they were not looked at at the same steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankscope.server.detectors.desync.incident import Apart
from rankscope.server.window import Comparison

# Links before the optimizer's state: what breaks there goes into it.
_BEFORE = ("reduced_gradient", "clipped_gradient", "hyperparameters")


def state_was_first(
    config: Mapping[str, Any], incident: Apart, broken: Sequence[Comparison]
) -> bool:
    """Whether parameters that were seen to differ are the consequence of the optimizer's state.

    The state is looked at less often than the parameters. It is made of gradients: as long as these
    agree, parameters that differ do not change it, but for a decay that is added to the gradient.

    Args:
        config: what the ranks said of themselves.
        incident: began with the parameters.
        broken: comparisons of a later step that found a difference.
    """
    if incident.kind != "desync.parameters" or incident.stage == "start" or incident.at_start:
        return False
    if incident.missed or incident.lag[0] or incident.tentative or not incident.tensors:
        return False
    if any(incident.broken.get(stage) for stage in _BEFORE):
        return False
    found = next((c for c in broken if c.stage == "optimizer_state"), None)
    if found is None or found.deviating != incident.ranks or not found.tensors:
        return False
    # It was equal when the parameters were seen to differ already.
    if incident.compared.get("optimizer_state", 0) > incident.broken.get("optimizer_state", 0):
        return False
    names = {tensor.name for tensor in found.tensors}
    same = names == {tensor.name for tensor in incident.tensors}
    return same and not incident.everywhere and not _decay_in_gradients(config)


def _decay_in_gradients(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer adds a share of the parameters to their gradients; unknown: yes."""
    groups = config.get("parameter_groups")
    if not groups:
        return True
    decoupled = config.get("optimizer") == "AdamW"
    return any(
        group.get("weight_decay", 0) and not group.get("decoupled_weight_decay", decoupled)
        for group in groups
    )
