"""What the addresses of figures have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, HTTPException, Query

from rankscope.dashboard.figures import THEMES
from rankscope.dashboard.figures.theme import Theme as Colors
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


@dataclass(frozen=True, slots=True)
class View:
    """What is asked for of any figure over the steps.

    Attributes:
        from_step, to_step: first and last step; None: from the first, to the last.
        theme: colours.
    """

    from_step: int | None
    to_step: int | None
    theme: Colors

    @property
    def axis(self) -> tuple[float, float] | None:
        """As of `shown`."""
        return shown(self.from_step, self.to_step)


def _view(from_step: Step = None, to_step: Step = None, theme: Theme = "light") -> View:
    return View(from_step, to_step, THEMES[theme])


Viewed = Annotated[View, Depends(_view)]
