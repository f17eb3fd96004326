"""Ranks as a person writes them: `0,2-5`."""

from __future__ import annotations

from fastapi import HTTPException

MAX_RANKS = 100_000


def parse(text: str) -> list[int]:
    """The ranks named by `0, 2-5, 9`, ascending.

    Raises:
        HTTPException: 422, naming the part that cannot be read.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not part.strip():
            continue
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise HTTPException(422, f"{part.strip()!r} is neither a rank nor a range such as 2-5.")
        low, high = int(first), int(last) if dash else int(first)
        if not low <= high < MAX_RANKS:
            raise HTTPException(422, f"{part.strip()!r} is no range of ranks.")
        ranks.update(range(low, high + 1))
    return sorted(ranks)
