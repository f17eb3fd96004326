"""Ranks that draw the same random numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.policy import Observations, Policy
from rankscope.server.detectors.wording import count, ranks
from rankscope.server.window import Check, Status, Window

_GENERATORS = {
    "rng/torch": "torch",
    "rng/cuda": "torch on CUDA",
    "rng/numpy": "numpy",
    "rng/python": "random",
}
_STATES = tuple(f"words/{name}" for name in _GENERATORS)
_GRACE = 20


@dataclass(frozen=True, slots=True)
class SharedPolicy(Policy):
    """Thresholds of `rng.shared`.

    Attributes:
        streak: consecutive samples at which the states are equal and were drawn from since the
            previous one, before it is reported.
    """

    streak: Observations = 5


@dataclass(slots=True)
class SharedState:
    """What is remembered: last digest of each generator, and how often in a row it was shared."""

    steps: int = 0
    judged: int = 0
    last: dict[str, int] = field(default_factory=dict)
    streak: dict[str, tuple[int, int]] = field(default_factory=dict)
    watch: Watch[str] = field(default_factory=lambda: Watch(clear_after=64))


class RandomShared(Detector[SharedState]):
    """Ranks whose random generators are in one state: the same dropout, the same augmentation.

    Statistic:
        Digests of the states of `torch`, CUDA, `numpy` and `random`, equal on all ranks that hold
        the same tensors, at five consecutive observations between which numbers were drawn. A
        common
        seed for the first weights is right and is not reported: nothing is drawn from it later.

    Severity:
        Info: it costs variety and breaks nothing.

    Evidence:
        `generator`, `observed`.

    Source:
        huggingface/transformers#37932, facebookresearch/fastMRI#123.
    """

    kinds: ClassVar[tuple[str, ...]] = ("rng.shared",)
    policies: ClassVar[type[Policy]] = SharedPolicy
    min_ranks: ClassVar[int] = 2

    policy: SharedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Consecutive states that are equal."""
        return (Reach(_STATES, self.policy.streak + 1, TO_THE_END),)

    def start(self) -> SharedState:
        """Nothing seen yet."""
        return SharedState()

    def advance(self, window: Window, state: SharedState) -> Outcome:
        """Goes through the states step by step."""
        state.steps += len(window.steps)
        members = max(window.data_parallel, key=len)
        rows = np.flatnonzero(np.isin(window.ranks, members))
        found: dict[int, tuple[bool, str, int]] = {}
        for name in _GENERATORS if len(rows) > 1 else ():
            series = window.digests.get(name)
            if series is None:
                continue
            present, values = series.present[rows], series.values[rows]
            whole = np.flatnonzero(present.all(axis=0))
            same = (values[:, whole] == values[0, whole]).all(axis=0)
            for column, alike in zip(whole.tolist(), same.tolist(), strict=True):
                step, digest = int(window.steps[column]), int(values[:, column].min())
                drawn = name in state.last and state.last[name] != digest
                state.last[name] = digest
                times, since = state.streak.get(name, (0, step))
                if not alike:
                    times = 0
                elif drawn:
                    times, since = times + 1, since if times else step
                state.streak[name] = (times, since)
                shared, known, onset = found.get(step, (False, "", step))
                if times >= self.policy.streak and not shared:
                    found[step] = (True, name, since)
                else:
                    found[step] = (shared, known, onset)
        for step, (shared, name, since) in sorted(found.items()):
            state.judged += 1
            if shared:
                state.watch.bad(step, name, first_step=since)
            else:
                state.watch.good(step)
        findings = tuple(_finding(e, members) for e in state.watch.take(window.last_step))
        return Outcome({"rng.shared": _check(window, state, members)}, findings)


def _finding(episode: Episode[str], members: tuple[int, ...]) -> Finding:
    name, step = _GENERATORS[episode.facts], episode.first_step
    return episode.finding(
        kind="rng.shared",
        severity="info",
        title=f"{ranks(members).capitalize()} draw the same random numbers since step {step}",
        ranks=members,
        cause=(
            f"The generator of `{name}` is in the same state on {ranks(members)} at every step, "
            "and numbers are drawn from it: what draws from it (dropout, noise, augmentation, "
            "seeds for the workers of a loader) draws the same on all of them."
        ),
        remedy=(
            "Seed with the rank once the model is built (`torch.manual_seed(seed + rank)`), also "
            "in workers of the data loader. Nothing, if the ranks are meant to draw alike."
        ),
        evidence={"generator": episode.facts, "observed": episode.seen},
    )


def _check(window: Window, state: SharedState, members: tuple[int, ...]) -> Check:
    episode = state.watch.open(window.last_step)
    if episode is not None:
        return Check(Status.OPEN, f"{_finding(episode, members).title}.")
    if not state.judged:
        if state.steps < _GRACE:
            return Check(Status.INSUFFICIENT_DATA, "No random states have been compared yet.")
        return Check(Status.MISSING_INPUT, "No two replicas post the states of their generators.")
    return Check(
        Status.OK,
        f"The ranks drew numbers of their own, or none, at {count(state.judged, 'checked step')}.",
    )
