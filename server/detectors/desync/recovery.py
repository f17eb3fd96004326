"""What texts about a desync share: the groups of equal ranks, and how to make them equal again."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.detectors.mechanisms.wording import listing


def shown(groups: Sequence[Sequence[int]]) -> str:
    """Groups of ranks: `(0 and 1) and (2 and 3)`."""
    return listing([f"({listing([str(r) for r in group])})" for group in groups])


def shown_groups(incident: Divergence) -> str:
    """The groups of equal ranks."""
    return shown(incident.groups)


def restore(incident: Divergence, source: str = "") -> str:
    """How to get out of it once the cause is mended."""
    good = next((group for group in incident.groups if incident.decided), ())
    source = source or (f"rank {good[0]}" if good else "a rank that you trust")
    again = (
        f"go back to a checkpoint from before step {incident.first_step}"
        if incident.first_step > 0
        else "start again"
    )
    # Settings are compared between ranks that hold parts of one model, too.
    parts = (
        " (not where each holds a part of the model: that would destroy it)"
        if incident.stage == "hyperparameters"
        else ""
    )
    return (
        "Then make the ranks equal again: broadcast parameters and optimizer state from "
        f"{source}{parts}, or {again}."
    )
