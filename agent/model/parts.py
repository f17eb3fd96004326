"""What a user declares tensors to be parts of, as it is sent to the server."""

from __future__ import annotations

from rankscope.agent.wire import RANK_LOCAL

_ESCAPE = "="


def part_of(key: str | None, rank: int) -> str:
    """The text that a key of `replicas` stands for.

    A key of the user's that looks like a rank's own copy is sent in another form: the same on
    all ranks that give it, and one that no other key has.

    Args:
        key: None for what each rank trains a copy of its own of.
        rank: that says so.
    """
    if key is None:
        return f"{RANK_LOCAL}{rank}"
    if isinstance(key, str) and key.lstrip(_ESCAPE).startswith(RANK_LOCAL):
        return _ESCAPE + key
    return key
