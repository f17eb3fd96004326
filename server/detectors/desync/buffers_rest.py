"""Statistics of batch norm, of each rank's own batches, that no step moves any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.incident import AGREED_UNTIL, Incident


@dataclass(slots=True)
class Rest:
    """Follows whether the statistics that differ between ranks still move.

    Statistics that batches move never differ by the same number at two consecutive samples.

    Attributes:
        moved: whether they were seen to move.
        resting: whether they did not move between the last two samples.
        since: the sample that first found them at rest, after they had moved; -1 for none.
        before: the sample before it: until then they moved.
        until: the last step at which they were at rest; None while they are.
        names: their names.
    """

    moved: bool = False
    resting: bool = False
    since: int = -1
    before: int = -1
    until: int | None = None
    names: tuple[str, ...] = ()
    _step: int = -1
    _last: Mapping[str, float] = field(default_factory=dict)

    def take(self, step: int, distances: Mapping[str, float]) -> None:
        """A sample that found the ranks to differ.

        Args:
            distances: by name of the statistics that do.
        """
        last, at = self._last, self._step
        self._last, self._step = dict(distances), step
        self.resting = bool(distances) and distances == last
        if self.resting:
            if self.moved and (self.since < 0 or self.until is not None):
                self.since, self.before, self.until = step, at, None
                self.names = tuple(distances)
        elif distances.keys() == last.keys() and distances:
            self.moved = True
            if self.since >= 0 and self.until is None:
                self.until = max(at, self.since)


def rest_finding(
    rest: Rest, *, ranks_: tuple[int, ...], last_step: int, clear_after: int
) -> Finding:
    """The finding as it stands.

    Args:
        ranks_: whose statistics differ.
        last_step: the last step at which they were found to.
    """
    step, names = rest.since, rest.names
    which = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
    last = last_step if rest.until is None else rest.until
    return Incident.since(step, last, clear_after=clear_after).finding(
        kind="desync.buffers",
        key="rest",
        severity="warning",
        title=f"Statistics that differ between ranks no longer move since step {step} ({which})",
        ranks=ranks_,
        tensors=names,
        stage="buffers",
        cause=(
            "Each rank's batch norm followed its own batches, and since "
            f"step {step} no step of the training moves its statistics any more: they were frozen "
            "while each rank had its own (evaluation mode), or estimated anew from different "
            "samples. The model computes something else on every rank, in evaluations and, where "
            "they are used, in training."
        ),
        remedy=(
            "Where they are to stay frozen, broadcast the buffers from one rank first, or estimate "
            "batch norm anew from the same samples on every rank (PreciseBN); else put the model "
            "back into training mode."
        ),
        evidence={"harm": "still", AGREED_UNTIL: rest.before},
    )
