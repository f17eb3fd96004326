"""What a model keeps besides its parameters, and ranks that keep it each on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rankscope.server.detectors.base import Check, Detector, Finding, Outcome, Status
from rankscope.server.detectors.desync.incident import groups_of
from rankscope.server.detectors.incident import Incident
from rankscope.server.detectors.wording import count, ranks
from rankscope.server.window import Comparison, TensorDifference, Window

_CLEAR_AFTER = 8
# Steps without a comparison after which it counts as missing.
_GRACE = 20
_MAX_DETAILS = 16


@dataclass(slots=True, kw_only=True)
class OwnBuffers(Incident):
    """Ranks whose buffers differ.

    Attributes:
        first: the comparison that found it.
        tensors: those that differed at the first look tensor by tensor; of `tensor_count`.
        agreeing: whether the last comparison found them equal.
    """

    first: Comparison
    tensors: tuple[TensorDifference, ...] = ()
    tensor_count: int = 0
    agreeing: bool = False


@dataclass(slots=True)
class BuffersState:
    """What is remembered: comparisons so far, those that differed, and the incident."""

    steps: int = 0
    checked: int = 0
    differed: int = 0
    incident: OwnBuffers | None = None


class Buffers(Detector[BuffersState]):
    """Ranks whose buffers differ: statistics of batch norm, counters, caches.

    Statistic:
        Equality of digests, bit by bit. Over after 8 steps of agreement.

    Severity:
        Info. Most trainings with batch norm keep statistics of their own on each rank, by default:
        nothing is wrong with the training then, but which rank is evaluated and saved matters.

    Evidence:
        `groups` (ranks that agree with each other), `decided`, `tensors_differing`,
        `tensor_count`, `tensor_details`.

    Source:
        DistributedDataParallel's `broadcast_buffers`, which makes buffers equal at the beginning of
        a forward pass and leaves them to each rank until the next.
    """

    kinds: ClassVar[tuple[str, ...]] = ("desync.buffers",)
    min_ranks: ClassVar[int] = 2

    def start(self) -> BuffersState:
        """Nothing compared yet."""
        return BuffersState()

    def advance(self, window: Window, state: BuffersState) -> Outcome:
        """Goes through the comparisons of the buffers."""
        findings: list[Finding] = []
        state.steps += len(window.steps)
        for comparison in window.comparisons:
            if comparison.stage == "buffers" and len(comparison.ranks) > 1:
                self._step(state, comparison, findings)
        incident = state.incident
        if incident is not None:
            if not incident.agreeing:
                incident.last_step = max(incident.last_step, window.last_step)
            findings.append(_finding(incident))
        return Outcome({"desync.buffers": _check(state)}, tuple(findings))

    def _step(self, state: BuffersState, comparison: Comparison, findings: list[Finding]) -> None:
        step = comparison.step
        state.checked += 1
        state.differed += not comparison.equal
        incident = state.incident
        if incident is not None and incident.agreeing and incident.over(step):
            findings.append(_finding(incident))
            incident = state.incident = None
        if comparison.equal:
            if incident is not None and not incident.agreeing:
                # Nothing showed before this step that they agreed again.
                incident.last_step = max(incident.last_step, step - 1)
                incident.agreeing = True
            return
        if incident is None:
            incident = state.incident = OwnBuffers(
                first_step=step,
                seen_step=step,
                last_step=step,
                clear_after=_CLEAR_AFTER,
                first=comparison,
            )
        incident.agreeing = False
        incident.last_step = max(incident.last_step, step)
        if comparison.tensors and not incident.tensors:
            incident.tensors = comparison.tensors
            incident.tensor_count = comparison.tensor_count


def _finding(incident: OwnBuffers) -> Finding:
    first, names = incident.first, [t.name for t in incident.tensors]
    which = ""
    if names:
        which = f" ({names[0]}" + (f" and {len(names) - 1} more)" if len(names) > 1 else ")")
    return Finding(
        kind="desync.buffers",
        severity="info",
        title=f"{ranks(first.deviating).capitalize()} "
        f"{'keeps' if len(first.deviating) == 1 else 'keep'} buffers of "
        f"{'its' if len(first.deviating) == 1 else 'their'} own since step {first.step}{which}",
        seen_step=incident.seen_step,
        last_step=incident.last_step,
        first_step=incident.first_step,
        ranks=first.deviating,
        tensors=tuple(names),
        stage="buffers",
        cause=(
            "Buffers differ between the ranks. Those of batch norm do in most trainings: each rank "
            "follows the statistics of its own batches, and what is evaluated or saved depends on "
            "the rank that does it."
        ),
        remedy=(
            "Nothing, if this is meant. Else use SyncBatchNorm, or broadcast the buffers before "
            "evaluating and saving."
        ),
        clear_after=incident.clear_after,
        evidence={
            "groups": [list(group) for group in groups_of(first)],
            "decided": first.decided,
            "tensors_differing": len(names),
            "tensor_count": incident.tensor_count,
            "tensor_details": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "ranks": list(t.ranks),
                    "distance": t.distance,
                    "relative": t.relative,
                }
                for t in incident.tensors[:_MAX_DETAILS]
            ],
        },
    )


def _check(state: BuffersState) -> Check:
    if state.incident is not None:
        return Check(Status.OPEN, f"{_finding(state.incident).title}.")
    if not state.checked:
        if state.steps < _GRACE:
            return Check(Status.INSUFFICIENT_DATA, "No buffers have been compared yet.")
        return Check(Status.MISSING_INPUT, "No two ranks post fingerprints of buffers.")
    compared = count(state.checked, "checked step")
    if not state.differed:
        return Check(Status.OK, f"The ranks' buffers agreed bit for bit at all {compared}.")
    return Check(
        Status.OK,
        f"The ranks' buffers agree now; they did at {state.checked - state.differed:,} of "
        f"{compared}.",
    )
