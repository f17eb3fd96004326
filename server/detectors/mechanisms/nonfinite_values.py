"""Values that are not finite, as detectors of them remember them: evaluations, buffers."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope.server.detectors.mechanisms.episode import Watch

# Names that are kept of one incident.
MAX_NAMES = 20


@dataclass(slots=True)
class Values:
    """What was seen.

    Attributes:
        ranks: whose value was not finite when it began.
        value: `NaN` or `infinite`.
        names: of series or buffers, those of the first step first.
        more: how many there are in all.
    """

    ranks: tuple[int, ...]
    value: str
    names: tuple[str, ...] = ()
    more: int = 0


@dataclass(slots=True)
class ValuesState:
    """What is remembered.

    Attributes:
        steps: seen so far.
        judged: values examined.
        bad: series whose newest values are not finite, or ranks whose buffers are not.
        reported: rank -> names of buffers.
    """

    judged: int = 0
    bad: set[str | int] = field(default_factory=set)
    reported: dict[int, tuple[str, ...]] = field(default_factory=dict)
    watch: Watch[Values] = field(default_factory=lambda: Watch(clear_after=0))
