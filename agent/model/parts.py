"""What a user declares tensors to be parts of, as it is told to the server."""

from __future__ import annotations

from rankscope.agent.wire import OWN_COPY

_ESCAPE = "="


def part_of(key: str | None, rank: int) -> str:
    """The text that a key of `replicas` stands for.

    A key of the user's that looks like a rank's own copy is told otherwise: the same on all ranks
    that give it, and what no other key is told as.

    Args:
        key: None for what each rank trains a copy of its own of.
        rank: that says so.
    """
    if key is None:
        return f"{OWN_COPY}{rank}"
    if isinstance(key, str) and key.lstrip(_ESCAPE).startswith(OWN_COPY):
        return _ESCAPE + key
    return key
