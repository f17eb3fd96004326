"""Ticks of an axis of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def rank_ticks(ranks: Sequence[int], named: Sequence[int], at_most: int) -> dict[str, Any]:
    """Ticks at the rows of an axis of ranks: evenly thinned, and one for each named rank.

    An even tick that would touch a named one gives way. More named ranks than `at_most` are a
    pattern, not a list: then the ticks stay even.
    """
    stride = 1
    while len(ranks) > stride * at_most:
        stride *= 2
    special = [row for row, rank in enumerate(ranks) if rank in set(named)]
    if len(special) > at_most:
        special = []
    even = [
        row
        for row in range(0, len(ranks), stride)
        if all(abs(row - other) >= stride for other in special)
    ]
    rows = sorted({*even, *special})
    return {"tickvals": rows, "ticktext": [str(ranks[row]) for row in rows]}
