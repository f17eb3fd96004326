"""Numbers in what a rank says of itself: they come over the network, and may be anything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any


def finite(value: Any) -> float | None:
    """A number as a float; None for what is none, is not finite, or is larger than a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def parameter_groups(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The settings of the optimizer's groups, as far as they are said."""
    groups = config.get("parameter_groups")
    if isinstance(groups, list | tuple):
        yield from (group for group in groups if isinstance(group, Mapping))
