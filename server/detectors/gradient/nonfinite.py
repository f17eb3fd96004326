"""Gradients that are not finite: where it began."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.effects import Rule
from rankscope.server.detectors.gradient.skipped import KEY, Skips
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.origin import FOLLOWS, Origin, go_back, reports
from rankscope.server.detectors.mechanisms.series_by_step import median, rows_by_step
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count, listing, number, ranks, sentences
from rankscope.server.window import Check, Occurrence, Window

# Losses that are remembered, and growth within them that is none of single batches: where it goes
# on, steps were too large long before a value was not finite.
_BEFORE, _MANY_TIMES = 64, 1e3

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Broken:
    """A gradient that is not finite.

    Attributes:
        value: how it was first seen, `NaN` or `infinite`.
        ranks: whose own gradient it was; all that applied it, where that is not known.
        own: whether they are those whose own gradient it was.
        begins: whether it was the first step of a process.
        world: number of ranks.
        loss: whether the loss of all ranks was finite at that step; None: not posted.
        of: tensors that are trained; 0 where that is not known.
        rise: of the loss before, as (step, size) of its least and its last; empty where it did not
            grow to many times that.
        origin: what the ranks reported.
    """

    value: str
    ranks: tuple[int, ...]
    own: bool
    begins: bool
    world: int
    loss: bool | None
    of: int
    rise: tuple[tuple[int, float], ...] = ()
    origin: Origin = field(default_factory=Origin)


@dataclass(slots=True)
class BrokenState:
    """What is remembered: skipped steps by rank, sizes of the loss, and what ranks reported."""

    judged: int = 0
    skipped: dict[int, float] = field(default_factory=dict)
    skips: Skips = field(default_factory=Skips)
    events: list[Occurrence] = field(default_factory=list)
    sizes: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_BEFORE))
    watch: Watch[Broken] = field(default_factory=lambda: Watch(clear_after=8))


class GradientNonFinite(Detector[BrokenState]):
    """The gradient that is applied is not finite; the module that made the first such value.

    Statistic:
        A gradient norm (or the norm of a rank's own gradient, or of a few tensors of it, which are
        watched at every step that bears it) that is not finite. Steps that a
        loss scaler skips for it do not count: finding them is its task. Over after 8 finite steps.
        Of steps that are skipped, by a loss scaler or by the trainer's own question after a finite
        norm, each rank says whether its own gradient was finite: where it was not on some ranks,
        the same ones each time, these are named. Not in the first 50 steps of a loss scaler, nor
        right after its scale has grown.

    Severity:
        Critical. Of skipped steps info; warning from the third one on, under a loss scaler from the
        fifth, critical from the tenth.

    Evidence:
        `value`, `tensors` (elements that are not finite, by gradient), `module`, `pass`
        (forward or backward), `told_by` (rank). Of skipped steps `times`, `steps`, `scaled`,
        `finite_on` (ranks whose own gradients were finite).

    Source:
        The ranks look for themselves, before the update spreads it and at the steps after
        (`nonfinite` events).
    """

    kinds = ("gradient.nonfinite",)
    lasting = "what is not finite gets into the parameters, and is reported at every step"
    needs = ("grad_norm",)
    wants = (
        "grad_norm_local",
        "grad_norm_canary",
        "steps_skipped",
        "loss",
        "amp_scale",
    )
    effects = (
        Rule(
            root=("gradient.nonfinite",),
            root_key=KEY,
            consequence=("amp.scale_collapse",),
            why="its steps are skipped for these gradients",
        ),
    )

    def advance(self, window: Window, state: BrokenState) -> Outcome:
        """Looks at every norm."""
        state.events += reports(window.events)
        steps, norms = rank_rows(window, "grad_norm")
        local = rows_by_step(window, "grad_norm_local")
        canaries = rows_by_step(window, "grad_norm_canary")
        skipped = rows_by_step(window, "steps_skipped")
        losses = rows_by_step(window, "loss")
        columns = {int(s): c for c, s in enumerate(window.steps)}
        for step, row, posted in _with_canaries(window, steps, norms):
            if step in losses and np.isfinite(losses[step]).any():
                state.sizes.append((step, float(np.nanmedian(np.abs(losses[step])))))
            there = posted
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
            for name, known in (("grad_norm_local", local), ("grad_norm_canary", canaries)):
                if step in known:
                    posted = window.series[name].present[:, columns[step]]
                    own |= posted & ~np.isfinite(known[step])
            suspects = own if own.any() else bad
            value = "NaN" if np.isnan(row[bad]).any() else "infinite"
            who = tuple(int(r) for r in window.ranks[suspects])
            loss = None
            if step in losses:
                posted = window.series["loss"].present[:, columns[step]]
                loss = bool(np.isfinite(losses[step][posted]).all())
            broken = Broken(
                value,
                who,
                bool(own.any()),
                begins=any(step in begins for begins in window.begins.values()),
                world=len(row),
                loss=loss,
                of=int(window.config.get("parameter_tensors") or 0),
                rise=_rise(state.sizes),
            )
            state.watch.bad(step, broken)
        episodes = list(state.watch.take(window.last_step))
        for episode in episodes:
            episode.facts.origin.learn(state.events, episode.first_step)
        state.events = [
            e
            for e in state.events
            if "at_start" in e.data or e.step > window.last_step - 8 * FOLLOWS
        ]
        state.skips.take(window)
        skipped_for = state.skips.findings(window)
        findings = (*(_finding(e) for e in episodes), *skipped_for)
        return Outcome({"gradient.nonfinite": _check(state)}, findings)

    def _skips(
        self, window: Window, state: BrokenState, row: np.ndarray[Any, np.dtype[np.float64]]
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        skips = np.zeros(len(row), dtype=bool)
        for place, (rank, value) in enumerate(zip(window.ranks.tolist(), row, strict=True)):
            if not np.isnan(value):
                skips[place] = value > state.skipped.get(rank, 0.0)
                state.skipped[rank] = float(value)
        return skips


def _with_canaries(
    window: Window, steps: Int64, norms: Float64
) -> Iterator[tuple[int, Float64, Bools]]:
    """Every step whose gradient is known, or of which some tensors on some rank are not finite.

    Yields:
        Step; norm by rank [R]; whether a rank posted it [R].
    """
    columns = {int(s): c for c, s in enumerate(window.steps)}
    found: dict[int, tuple[Float64, Bools]] = {}
    for name, at, rows in (
        ("grad_norm_canary", *rank_rows(window, "grad_norm_canary")),
        ("grad_norm", steps, norms),
    ):
        for step, row in zip(at.tolist(), rows, strict=True):
            posted = window.series[name].present[:, columns[step]]
            # Of a few tensors that are finite, nothing follows for the whole.
            if name == "grad_norm" or (posted & ~np.isfinite(row)).any():
                found[step] = row, posted
    for step in sorted(found):
        yield step, *found[step]


def _rise(sizes: Collection[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """What a loss has grown from and to, where it was on its way to what no number holds."""
    known = [(step, size) for step, size in sizes if 0 < size < np.inf]
    if not known:
        return ()
    least, last = min(known, key=lambda one: one[1]), known[-1]
    # Of a loss near 0 single values are many times others.
    usual = 10 * median([size for _, size in known])
    return (least, last) if last[1] > max(_MANY_TIMES * least[1], usual) else ()


def _finding(episode: Episode[Broken]) -> Finding:
    broken, step = episode.facts, episode.first_step
    origin = broken.origin
    names = list(origin.tensors)
    where = f", first in {origin.module}" if origin.module else ""
    whose = ""
    if broken.own and broken.world > 1:
        whose = (
            f"The gradient that {ranks(broken.ranks)} computed is not finite, and the reduction "
            "carries it to every rank."
        )
    seen = origin.explained(step, begins=broken.begins)
    held = ""
    if names and broken.loss and len(names) >= broken.of > 0:
        held = (
            f"The gradients of all {count(broken.of, 'tensor')} hold such values while the loss is "
            "finite: they arose where the backward pass begins, in the loss or what follows the "
            "last of these tensors."
        )
    elif names:
        held = f"Elements that are not finite are in {listing(names, most=4)}."
    remedy = (
        "Look for what makes such values: possibly a division by zero, a logarithm or root of what "
        "may be 0 or negative (their derivative at 0 is infinite), an overflow in 16 bits. "
        + go_back(step, begins=broken.begins)
    )
    diverged = ""
    if broken.rise:
        (low, small), (high, large) = broken.rise
        diverged = (
            f"The loss had gone from {number(small)} at step {low} to {number(large)} in size at "
            f"step {high}: training had diverged, and the values have outgrown what numbers hold."
        )
        remedy = (
            "Look for what made it diverge: a learning rate that is too high or rises, a loss "
            f"without a lower bound, a sign. {go_back(low + 1, begins=False)}"
        )
        seen = None
    return episode.finding(
        kind="gradient.nonfinite",
        severity="critical",
        title=f"The gradient is {broken.value} at step {step}{where}"[:118],
        ranks=broken.ranks,
        tensors=tuple(names),
        stage="local_gradient" if broken.own else "reduced_gradient",
        cause=sentences(
            f"At step {step} the norm of the gradient is {broken.value}, and it was applied: what "
            "it reaches is not finite after that step.",
            diverged,
            whose,
            seen[0] if seen is not None else "",
            held,
        ),
        remedy=seen[1] if seen is not None else remedy,
        evidence={
            "value": broken.value,
            "tensors": dict(origin.tensors),
            "module": origin.module,
            "pass": origin.direction,
            "told_by": origin.teller,
        },
    )


def _check(state: BrokenState) -> Check:
    if not state.judged:
        return Check.insufficient("No gradient norm has been posted yet.")
    return Check.ok(f"The last of {count(state.judged, 'gradient norm')} examined was finite.")
