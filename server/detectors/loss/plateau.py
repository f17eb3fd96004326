"""A loss that has not moved since the start."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.policy import Observations, Policy, Share, Sigmas
from rankscope.server.detectors.walking import median, noise_of_mean, together
from rankscope.server.detectors.wording import count, number, percent
from rankscope.server.window import Check, Status, Window

# Losses from one look to the next.
_STRIDE = 10


@dataclass(frozen=True, slots=True)
class PlateauPolicy(Policy):
    """Thresholds of `loss.plateau`.

    Attributes:
        evidence: losses before anything is judged.
        min_gain: share of the first losses that has to be gained.
        rate: share of the highest rate so far below which a step is not meant to teach anything.
        small_update: updates of the parameters, relative to their size, with which nothing can be
            learned in hundreds of steps.
        learned: accuracy above which something was learned, if not in this run.
        accuracy_gain: rise of the accuracy since the start that is none, at least.
        gain_error: the same in standard errors.
        first: losses that the mean at the start is of.
        last: losses that the mean of now is of.
    """

    evidence: Observations = 200
    min_gain: Share = 0.05
    rate: Share = 0.1
    small_update: Share = 1e-5
    learned: Share = 0.6
    accuracy_gain: Share = 0.05
    gain_error: Sigmas = 3.0
    first: Observations = 50
    last: Observations = 100


@dataclass(slots=True)
class Flat:
    """What was seen."""

    first: float
    last: float
    error: float
    accuracy: float
    update: float
    norm: float
    norm_first: float
    rate: float

    @property
    def gain(self) -> float:
        """Share of the first loss that was gained."""
        return (self.first - self.last) / abs(self.first) if self.first else 0.0

    def certain(self, policy: PlateauPolicy) -> bool:
        """Whether something beside the loss says that it should have moved."""
        if math.isnan(self.accuracy):
            return self.update < policy.small_update
        return self.accuracy <= policy.learned


@dataclass(slots=True)
class PlateauState:
    """What `loss.plateau` remembers."""

    last: deque[float]
    accuracies: deque[float]
    total: int = 0
    first: list[float] = field(default_factory=list)
    start_step: int = 0
    first_accuracies: list[float] = field(default_factory=list)
    updates: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    first_norms: list[float] = field(default_factory=list)
    rate: float = math.nan
    peak: float = 0.0
    signed: bool = False
    moved: bool = False
    flat: bool = False
    watch: Watch[Flat] = field(default_factory=lambda: Watch(clear_after=_STRIDE))


class LossPlateau(Detector[PlateauState]):
    """The loss is where it began: nothing is learned.

    Statistic:
        After 200 steps with a learning rate of at least a tenth of its peak, looked at every 10:
        the mean of the last 100 losses lies less than 5 % below that of the first 50. Once it has
        fallen by more, this kind has nothing more to say. A training that was resumed, or that has
        nothing left to learn, looks the same; so it is reported only if the accuracy is 0.6 or less
        and has not risen (by 3 standard errors, and 0.05), or, where there is no accuracy, if the
        updates say more.

    Severity:
        Warning where the accuracy is low, or updates are below 1e-5 of the parameters; info where
        no accuracy is posted and the updates are of usual size. Losses that change their sign are
        surrogates and are not judged.

    Evidence:
        `first`, `last` (means of the loss), `gain`, `standard_error` (of `last`), and where they
        are posted `accuracy`, `update_ratio`, `grad_norm`, `lr`.

    Source:
        runmedic's and SageMaker's rules on losses that do not fall, with the evidence that
        distinguishes "has not begun" from "is done". SageMaker's fires on 60 of 64 healthy runs.
    """

    kinds: ClassVar[tuple[str, ...]] = ("loss.plateau",)
    policies: ClassVar[type[Policy]] = PlateauPolicy
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    wants: ClassVar[tuple[str, ...]] = ("accuracy", "lr", "update_ratio", "grad_norm")

    policy: PlateauPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Losses that can change."""
        return (Reach(self.needs, self.policy.evidence, TO_THE_END, moves="at all"),)

    def start(self) -> PlateauState:
        """Nothing seen yet."""
        last = self.policy.last
        return PlateauState(deque(maxlen=last), deque(maxlen=last))

    def advance(self, window: Window, state: PlateauState) -> Outcome:
        """Takes the losses one by one."""
        for step, row in together(window, *self.needs, *self.wants):
            self._remember(row, state)
            loss = row.get("loss", math.nan)
            if state.moved or not math.isfinite(loss):
                continue
            if math.isfinite(state.rate) and state.rate < self.policy.rate * state.peak:
                continue
            state.signed |= loss < 0
            state.total += 1
            if len(state.first) < self.policy.first:
                state.first.append(loss)
                state.start_step = step if state.total == 1 else state.start_step
            state.last.append(loss)
            if (
                state.total >= self.policy.evidence
                and state.total % _STRIDE == 0
                and not state.signed
            ):
                self._look(step, state)
        findings = tuple(_finding(e, self.policy) for e in state.watch.take(window.last_step))
        return Outcome({"loss.plateau": _check(window, state, self.policy)}, findings)

    def _remember(self, row: dict[str, float], state: PlateauState) -> None:
        if "lr" in row:
            state.rate = row["lr"]
            state.peak = max(state.peak, state.rate)
        if math.isfinite(row.get("accuracy", math.nan)):
            state.accuracies.append(row["accuracy"])
            if len(state.first_accuracies) < self.policy.first:
                state.first_accuracies.append(row["accuracy"])
        if math.isfinite(row.get("update_ratio", math.nan)):
            state.updates.append(row["update_ratio"])
        if math.isfinite(row.get("grad_norm", math.nan)):
            state.norms.append(row["grad_norm"])
            if len(state.first_norms) < self.policy.first:
                state.first_norms.append(row["grad_norm"])

    def _look(self, step: int, state: PlateauState) -> None:
        first, last = float(np.mean(state.first)), float(np.mean(state.last))
        state.flat = first - last <= self.policy.min_gain * abs(first)
        if not state.flat:
            state.moved = True
            state.watch.good(step)
            return
        accuracy = float(np.mean(state.accuracies)) if state.accuracies else math.nan
        if math.isfinite(accuracy):
            began = float(np.mean(state.first_accuracies))
            error = math.hypot(
                noise_of_mean(state.accuracies), noise_of_mean(state.first_accuracies)
            )
            policy = self.policy
            gained = accuracy - began > max(policy.gain_error * error, policy.accuracy_gain)
            if accuracy > policy.learned or gained:
                state.watch.good(step)
                return
        elif not state.updates:
            return  # Nothing tells whether it has not begun or is done.
        facts = Flat(
            first,
            last,
            noise_of_mean(state.last),
            accuracy,
            median(state.updates),
            median(state.norms),
            median(state.first_norms),
            state.rate,
        )
        state.watch.bad(step, facts, first_step=state.start_step).facts = facts


def _check(window: Window, state: PlateauState, policy: PlateauPolicy) -> Check:
    episode = state.watch.open(window.last_step)
    if episode is not None:
        return Check(Status.OPEN, f"{_finding(episode, policy).title}.")
    if state.signed:
        why = "The loss changes its sign: it is a surrogate, and need not fall."
        return Check(Status.NOT_APPLICABLE, why)
    if state.moved:
        first = number(float(np.mean(state.first)))
        return Check(Status.OK, f"The loss has fallen from {first} to {number(state.last[-1])}.")
    if state.total < policy.evidence:
        why = f"{count(state.total, 'finite loss value')} of {policy.evidence} needed."
        return Check(Status.INSUFFICIENT_DATA, why)
    if state.accuracies or state.updates:
        return Check(Status.OK, "The loss has hardly moved, but what was learned before stays.")
    why = (
        "The loss has hardly moved. Without an accuracy and `update_ratio` nothing tells whether "
        "it has not begun to learn or has nothing left to learn."
    )
    return Check(Status.INSUFFICIENT_DATA, why)


def _finding(episode: Episode[Flat], policy: PlateauPolicy) -> Finding:
    facts = episode.facts
    evidence = {
        "first": facts.first,
        "last": facts.last,
        "gain": facts.gain,
        "standard_error": facts.error,
    }
    named = {
        "accuracy": facts.accuracy,
        "update_ratio": facts.update,
        "grad_norm": facts.norm,
        "lr": facts.rate,
    }
    evidence |= {name: value for name, value in named.items() if math.isfinite(value)}
    cause, remedy = _explained(facts, policy)
    at = f" and the accuracy at {percent(facts.accuracy)}" if math.isfinite(facts.accuracy) else ""
    title = (
        f"Nothing is learned: the loss is still at {number(facts.last)}{at}"
        if facts.certain(policy)
        else f"The loss is where it began ({number(facts.first)}, now {number(facts.last)})"
    )
    return Finding(
        kind="loss.plateau",
        severity="warning" if facts.certain(policy) else "info",
        title=title,
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=episode.first_step,
        cause=cause,
        remedy=remedy,
        clear_after=episode.clear_after,
        evidence=evidence,
    )


def _explained(facts: Flat, policy: PlateauPolicy) -> tuple[str, str]:
    """Cause and remedy, the likeliest by what the other signals say."""
    moved = f"The loss came from {number(facts.first)} to {number(facts.last)}"
    if facts.update == 0 and facts.norm > 0:
        return (
            f"{moved}: the steps change no parameter although there is a gradient of "
            f"{number(facts.norm)}. The optimizer holds other parameters than the model trains "
            "with (made before the model was moved, wrapped or copied), or its rate is 0.",
            "Make the optimizer from `model.parameters()` after the model is on its device and "
            "wrapped, and compare their ids.",
        )
    if facts.update < policy.small_update:
        raised = (
            f" from {number(facts.rate)} to {number(facts.rate * 1e-3 / facts.update)}"
            if facts.rate > 0 and facts.update > 0
            else ""
        )
        return (
            f"{moved}: a step changes the parameters by {number(facts.update)} of their size, far "
            "below the usual 1e-3.",
            f"Raise the learning rate{raised} (by tens, not at once), which makes updates of 1e-3.",
        )
    if facts.norm < 0.05 * facts.norm_first:
        return (
            f"{moved}, and the gradient has shrunk from {number(facts.norm_first)} to "
            f"{number(facts.norm)}: units are dead or saturated.",
            "Look at `dead_units` and `saturated_units`; lower the learning rate, initialise "
            "anew, normalise between the layers.",
        )
    return (
        f"{moved} although steps change the parameters"
        f"{f' by {number(facts.update)} of their size' if math.isfinite(facts.update) else ''}. "
        "The targets do not belong to the inputs (shuffled separately), the gradient does not "
        "reach the early layers (saturated or dead units), or the rate throws the parameters "
        "about.",
        "Try to memorise one batch: if that fails, it is the model or the rate (try a tenth"
        f"{f', {number(facts.rate / 10)}' if facts.rate > 0 else ''}); if it works, compare inputs "
        "and targets of some samples by eye.",
    )
