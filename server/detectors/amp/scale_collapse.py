"""A loss scale that falls and does not come back."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.gradient.skipped import Skips, whose
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count, number, percent, ranks, sentences
from rankscope.server.detectors.policy import Count, Number, Observations, Policy, Share
from rankscope.server.window import Check, Window

# What a rank reports while its scaler skips one step after the other: such steps have no number.
_SKIPPING = "amp.skipping"
# Steps looked back at, and the share of skipped ones among them that is no search any more.
_BACK = 200


@dataclass(frozen=True, slots=True)
class ScalePolicy(Policy):
    """Thresholds of `amp.scale_collapse`.

    Attributes:
        gone: loss scale below which gradients are made smaller instead of larger.
        calibration: steps at the beginning in which the scaler is still looking for its scale.
        share: share of the last 200 steps that were skipped, from which on it is reported.
        skipped: smallest number of skipped steps among the last 200.
    """

    gone: Number = 1.0
    calibration: Observations = 50
    share: Share = 0.05
    skipped: Count = 12


@dataclass(slots=True)
class Collapse:
    """What was seen.

    Attributes:
        scale, highest: of the loss, now and before.
        skipped, of: skipped steps among the last ones.
        in_a_row: skipped ones after which no other step has come as yet; 0 for none.
    """

    scale: float
    highest: float
    skipped: float
    of: int
    in_a_row: int = 0


@dataclass(slots=True)
class ScaleState:
    """What is remembered: skipped steps so far, at the last observations, and whose they were."""

    judged: int = 0
    highest: float = 0.0
    skips: Skips = field(default_factory=Skips)
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_BACK + 1))
    watch: Watch[Collapse] = field(default_factory=lambda: Watch(clear_after=32))


class ScaleCollapse(Detector[ScaleState]):
    """The loss scale of mixed precision has collapsed: steps are skipped one after the other.

    Statistic:
        A scale below 1, after one above it; or more than 5 % of the last 200 steps skipped (after
        the first 50, in which a scale is searched for), and 12 at least; or 16 steps in a row, as a
        rank reports at once: they have no numbers, and nothing else is posted until the optimizer
        steps again. Over after 32 steps.

    Severity:
        Critical below a scale of 1, and where no optimizer step is taken; else warning.

    Evidence:
        `amp_scale`, `highest` (where they are posted), `skipped` of the last `of` steps,
        `in_a_row`.

    Source:
        torch.amp.GradScaler halves its scale at each overflow; pytorch/pytorch#67590.
    """

    kinds = ("amp.scale_collapse",)
    wants = ("amp_scale", "steps_skipped")

    policy: ScalePolicy

    def reaches(self) -> tuple[Reach, ...]:
        """The scale beyond the steps in which it is looked for."""
        return (Reach(("amp_scale",), self.policy.skipped, LASTS_SAMPLED),)

    def advance(self, window: Window, state: ScaleState) -> Outcome:
        """Follows scale and skipped steps, of the rank that is worst off."""
        state.skips.take(window)
        steps, scales = rank_rows(window, "amp_scale")
        counted = {}
        for step, row in zip(*rank_rows(window, "steps_skipped"), strict=True):
            counted[int(step)] = float(np.nanmax(row))
        reports = sorted(
            (e.step, int(e.data.get("skipped", 0))) for e in window.events if e.kind == _SKIPPING
        )
        for step, row in zip(steps.tolist(), scales, strict=True):
            while reports and reports[0][0] <= step:
                self._stopped(state, *reports.pop(0))
            scale = float(np.nanmin(row))
            state.judged += 1
            state.highest = max(state.highest, scale)
            if step in counted:
                state.recent.append((step, counted[step]))
            skipped, of = 0.0, 0
            if state.recent:
                (first, before), (last, now) = state.recent[0], state.recent[-1]
                skipped = now - before
                # A skipped step has no number of its own, on most devices.
                of = int(last - first + skipped)
            gone = scale < self.policy.gone < state.highest
            many = (
                state.judged > self.policy.calibration
                and skipped >= self.policy.skipped
                and skipped > self.policy.share * of
            )
            if gone or many:
                found = Collapse(scale, state.highest, skipped, of)
                facts = state.watch.bad(step, found).facts
                facts.scale = min(scale, facts.scale)  # of NaN and a number the number
            else:
                state.watch.good(step)
        for report in reports:
            self._stopped(state, *report)
        findings = tuple(
            _finding(e, window, self.policy, state.skips)
            for e in state.watch.take(window.last_step)
        )
        return Outcome({"amp.scale_collapse": _check(window, state)}, findings)

    def _stopped(self, state: ScaleState, step: int, skipped: int) -> None:
        """A rank has reported that it takes no step any more."""
        found = Collapse(math.nan, state.highest, skipped, skipped)
        facts = state.watch.bad(step, found).facts
        facts.in_a_row = max(facts.in_a_row, skipped)


def _finding(
    episode: Episode[Collapse], window: Window, policy: ScalePolicy, skips: Skips
) -> Finding:
    found, step = episode.facts, episode.first_step
    gone = found.scale < policy.gone
    if found.in_a_row:
        title = f"No optimizer step has been taken since step {step}: all of them were skipped"
        cause = (
            f"The gradients of {count(found.in_a_row, 'step')} in a row were not finite, so the "
            "loss scaler skipped every one and halved its scale each time, which takes any usual "
            "scale below 1: what is not finite is in the computation itself (the loss, the inputs, "
            "parameters that are NaN). The model does not change any more; steps that are skipped "
            "have no number, so the run seems to stand still."
        )
    elif gone:
        title = f"The loss scale has fallen to {number(found.scale)} since step {step}"
        cause = (
            f"The loss scale fell from {number(found.highest)} to {number(found.scale)}: gradients "
            "overflow whatever the scale, so what is not finite is in the computation itself and "
            "not in the range of 16 bits."
        )
    else:
        title = f"{percent(found.skipped / max(found.of, 1))} of steps skipped since step {step}"
        cause = (
            f"{found.skipped:,.0f} of the last {found.of:,} steps were skipped because their "
            f"gradients were not finite, at a loss scale of {number(found.scale)}: a scale that "
            "fits skips one step in some thousands."
        )
    everyone = tuple(int(r) for r in window.ranks)
    suspects, tensors, source = whose(skips, everyone)
    return episode.finding(
        kind="amp.scale_collapse",
        severity="critical" if gone or found.in_a_row else "warning",
        title=title,
        ranks=suspects or everyone,
        tensors=tensors,
        cause=sentences(cause, source),
        remedy=(
            "Look for the module that makes values that are not finite (run some steps without "
            "autocast), use bfloat16, which needs no scale, or lower the learning rate."
        ),
        evidence={
            **({"amp_scale": found.scale} if math.isfinite(found.scale) else {}),
            **({"highest": found.highest} if found.highest else {}),
            "skipped": found.skipped,
            "of": found.of,
            **({"in_a_row": found.in_a_row} if found.in_a_row else {}),
        },
    )


def _check(window: Window, state: ScaleState) -> Check:
    if not state.judged:
        return Check.not_applicable("No rank scales its loss (no GradScaler is seen).")
    who = ranks(tuple(int(r) for r in window.ranks))
    return Check.ok(f"The loss scale of {who} held at {count(state.judged, 'checked step')}.")
