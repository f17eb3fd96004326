"""Gradients that are not finite: where it began."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rankscope.server.detectors.base import Check, Detector, Finding, Outcome, Status
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.statistics import rank_rows
from rankscope.server.detectors.wording import count, listing, ranks, sentences
from rankscope.server.window import Occurrence, Window

# How long after the step what the ranks looked into afterwards belongs to it.
_FOLLOWS = 8


@dataclass(slots=True)
class Broken:
    """A gradient that is not finite.

    Attributes:
        value: how it was first seen, `NaN` or `infinite`.
        ranks: whose own gradient it was; all that applied it, where that is not known.
        own: whether they are those whose own gradient it was.
        tensors: gradients that hold such values -> how many elements.
        module, direction, text: where a value that is not finite was first made, as a rank told.
        teller: that rank, or -1.
    """

    value: str
    ranks: tuple[int, ...]
    own: bool
    tensors: dict[str, int] = field(default_factory=dict)
    module: str = ""
    direction: str = ""
    text: str = ""
    teller: int = -1


@dataclass(slots=True)
class BrokenState:
    """What is remembered: skipped steps by rank, and what ranks told of steps to come."""

    judged: int = 0
    skipped: dict[int, float] = field(default_factory=dict)
    events: list[Occurrence] = field(default_factory=list)
    watch: Watch[Broken] = field(default_factory=lambda: Watch(clear_after=8))


class GradientNonFinite(Detector[BrokenState]):
    """The gradient that is applied is not finite; the module that made the first such value.

    Statistic:
        A gradient norm (or the norm of a rank's own gradient) that is not finite. Steps that a
        loss scaler skips for it do not count: finding them is its task. Over after 8 finite steps.

    Severity:
        Critical.

    Evidence:
        `value`, `tensors` (elements that are not finite, by gradient), `module`, `pass`
        (forward or backward), `told_by` (rank).

    Source:
        The ranks look for themselves, at the steps after the first one (`nonfinite` events).
    """

    kinds: ClassVar[tuple[str, ...]] = ("gradient.nonfinite",)
    needs: ClassVar[tuple[str, ...]] = ("grad_norm",)
    wants: ClassVar[tuple[str, ...]] = ("grad_norm_local", "steps_skipped")

    def start(self) -> BrokenState:
        """Nothing seen yet."""
        return BrokenState()

    def advance(self, window: Window, state: BrokenState) -> Outcome:
        """Looks at every norm."""
        state.events += [event for event in window.events if event.kind == "nonfinite"]
        steps, norms = rank_rows(window, "grad_norm")
        local = dict(zip(*_listed(*rank_rows(window, "grad_norm_local")), strict=True))
        skipped = dict(zip(*_listed(*rank_rows(window, "steps_skipped")), strict=True))
        missing = window.series["grad_norm"].present if "grad_norm" in window.series else None
        columns = {int(s): c for c, s in enumerate(window.steps)}
        for step, row in zip(steps.tolist(), norms, strict=True):
            assert missing is not None
            there = missing[:, columns[step]]
            if step in skipped:
                there = there & ~self._skips(window, state, skipped[step])
                if not there.any():
                    continue
            state.judged += 1
            bad = there & ~np.isfinite(row)
            if not bad.any():
                state.watch.good(step)
                continue
            own = np.zeros(len(row), dtype=bool)
            if step in local:
                posted = window.series["grad_norm_local"].present[:, columns[step]]
                own = posted & ~np.isfinite(local[step])
            guilty = own if own.any() else bad
            value = "NaN" if np.isnan(row[bad]).any() else "infinite"
            who = tuple(int(r) for r in window.ranks[guilty])
            state.watch.bad(step, Broken(value, who, bool(own.any())))
        episodes = list(state.watch.take(window.last_step))
        for episode in episodes:
            _learn(episode, state.events)
        state.events = [e for e in state.events if e.step > window.last_step - 64]
        check = _check(window, state)
        return Outcome({"gradient.nonfinite": check}, tuple(_finding(e) for e in episodes))

    def _skips(
        self, window: Window, state: BrokenState, row: np.ndarray[Any, np.dtype[np.float64]]
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        skips = np.zeros(len(row), dtype=bool)
        for place, (rank, value) in enumerate(zip(window.ranks.tolist(), row, strict=True)):
            if not np.isnan(value):
                skips[place] = value > state.skipped.get(rank, 0.0)
                state.skipped[rank] = float(value)
        return skips


def _listed(steps: Any, rows: Any) -> tuple[list[int], list[Any]]:
    return steps.tolist(), list(rows)


def _learn(episode: Episode[Broken], events: list[Occurrence]) -> None:
    broken = episode.facts
    for event in events:
        if not episode.first_step <= event.step <= episode.first_step + _FOLLOWS:
            continue
        gradients = event.data.get("gradients")
        if isinstance(gradients, dict):
            for name, amount in gradients.items():
                broken.tensors[str(name)] = max(broken.tensors.get(str(name), 0), int(amount))
        module = str(event.data.get("module", ""))
        # The rank that was given only finite numbers, and made others of them, knows best.
        made = bool(event.data.get("input_finite", True)) and bool(
            event.data.get("parameters_finite", True)
        )
        if module and (not broken.module or (made and broken.teller < 0)):
            broken.module, broken.direction = module, str(event.data.get("pass", ""))
            broken.text = event.text
            broken.teller = event.rank if made else -1


def _finding(episode: Episode[Broken]) -> Finding:
    broken, step = episode.facts, episode.first_step
    names = list(broken.tensors)
    where = f", first in {broken.module}" if broken.module else ""
    whose = (
        f"The gradient that {ranks(broken.ranks)} computed is not finite, and the reduction "
        "carries it to every rank."
        if broken.own
        else ""
    )
    held = ""
    if names:
        held = f"Elements that are not finite are in {listing(names, most=4)}."
    return Finding(
        kind="gradient.nonfinite",
        severity="critical",
        title=f"The gradient is {broken.value} at step {step}{where}"[:118],
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=step,
        ranks=broken.ranks,
        tensors=tuple(names),
        stage="local_gradient" if broken.own else "reduced_gradient",
        cause=sentences(
            f"At step {step} the norm of the gradient is {broken.value}, and it was applied: "
            "parameters are not finite after it.",
            whose,
            f"{broken.text[:1].upper()}{broken.text[1:]}." if broken.text else "",
            held,
        ),
        remedy=(
            (f"Look at {broken.module}: " if broken.module else "Look for ")
            + "a division by zero, a logarithm or root of what may be 0 or negative, an overflow "
            "in 16 bits. Lower the rate or warm up longer if the loss had grown before; "
            f"go on from a checkpoint before step {step}."
        ),
        clear_after=episode.clear_after,
        evidence={
            "value": broken.value,
            "tensors": dict(broken.tensors),
            "module": broken.module,
            "pass": broken.direction,
            "told_by": broken.teller,
        },
    )


def _check(window: Window, state: BrokenState) -> Check:
    episode = state.watch.open(window.last_step)
    if episode is not None:
        return Check(Status.OPEN, f"{_finding(episode).title}.")
    if not state.judged:
        return Check(Status.INSUFFICIENT_DATA, "No gradient norm has been posted yet.")
    return Check(
        Status.OK, f"The last of {count(state.judged, 'gradient norm')} looked at was finite."
    )
