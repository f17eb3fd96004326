"""What the addresses of figures have in common."""

from __future__ import annotations

from typing import Annotated

from fastapi import HTTPException, Query

from rankscope.dashboard.source import Source

Theme = Annotated[str, Query(pattern="^(light|dark)$")]
# Beyond, a browser's numbers are no integers any more.
Step = Annotated[int | None, Query(ge=0, le=2**53)]


def known(source: Source, run: str) -> list[int]:
    """The ranks of a run.

    Raises:
        HTTPException: 404, there is no such run.
    """
    ranks = source.ranks(run)
    if ranks is None:
        raise HTTPException(404, f"No run {run!r}.")
    return list(ranks)


def shown(from_step: int | None, to_step: int | None) -> tuple[float, float] | None:
    """What a chart's axis shows, where both ends are given.

    Raises:
        HTTPException: 422, the first lies behind the last.
    """
    if from_step is None or to_step is None:
        return None
    if from_step > to_step:
        raise HTTPException(422, f"from_step {from_step} lies behind to_step {to_step}.")
    return float(from_step), float(to_step)
