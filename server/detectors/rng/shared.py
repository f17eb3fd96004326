"""Ranks that draw the same random numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count, ranks
from rankscope.server.detectors.policy import Observations, Policy, Share
from rankscope.server.window import Check, Window

_GENERATORS = {
    "rng/torch": "torch",
    "rng/cuda": "torch on CUDA",
    "rng/numpy": "numpy",
    "rng/python": "random",
}
_STATES = tuple(f"words/{name}" for name in _GENERATORS)
_WORKERS = "loader_workers"


@dataclass(frozen=True, slots=True)
class SharedPolicy(Policy):
    """Thresholds of `rng.shared`.

    Attributes:
        streak: consecutive samples at which the states are equal and were drawn from since the
            previous one, before it is reported.
        between: share of the longest time without a draw, up to which samples that lie so far apart
            show what steps draw. What is drawn at the start of each epoch alone is then drawn
            between two of them in a row at most.
    """

    streak: Observations = 5
    between: Share = 0.5


@dataclass(slots=True)
class Generator:
    """One generator, on all ranks that should draw their own numbers.

    An iteration over a DataLoader draws a seed for its workers, and one for the order, at the start
    of each epoch, whether anything comes of them or not: with no workers, and an order that is by
    another generator, nothing does. What steps draw (dropout, noise, augmentation) is drawn at
    each.

    Attributes:
        last, seen: its newest state, and at which step.
        times, since: consecutive samples at which it was shared and drawn from; the first of them.
        still: steps without a draw so far, in a row; `longest` of them.
    """

    last: int
    seen: int
    times: int = 0
    since: int = -1
    still: int = 0
    longest: int = 0

    def take(self, step: int, state: int, alike: bool, between: float | None) -> None:
        """Takes the state after a step.

        Args:
            between: share of the longest time without a draw up to which samples may lie apart;
                None: whatever is drawn counts, however seldom.
        """
        apart, drawn = max(step - self.seen, 0), state != self.last
        self.last, self.seen = state, step
        self.still = 0 if drawn else self.still + apart
        self.longest = max(self.longest, self.still)
        if not alike:
            self.times = 0
        elif drawn:
            if between is None or not self.longest or apart <= between * self.longest:
                self.since = self.since if self.times else step
                self.times += 1
        elif between is not None:
            self.times = 0


@dataclass(slots=True)
class SharedState:
    """What is remembered.

    Attributes:
        seeded: step from which on a loader has workers that are seeded; None for none.
        generators: by name.
    """

    judged: int = 0
    seeded: int | None = None
    generators: dict[str, Generator] = field(default_factory=dict)
    watch: Watch[str] = field(default_factory=lambda: Watch(clear_after=64))


class RandomShared(Detector[SharedState]):
    """Ranks whose random generators are in one state: the same dropout, the same augmentation.

    Statistic:
        Digests of the states of `torch`, CUDA, `numpy` and `random`, equal on all ranks that hold
        the same tensors, at five consecutive observations between which numbers were drawn; where
        a DataLoader has workers (`loader_workers`), which are seeded at the start of each epoch, at
        any five. Observations further apart than half of the longest time in which nothing was
        drawn say nothing: the start of an epoch draws, too. A common seed for the first weights is
        right and is not reported: nothing is drawn from it later.

    Severity:
        Info: it costs variety and breaks nothing.

    Evidence:
        `generator`, `observed`.

    Source:
        huggingface/transformers#37932, facebookresearch/fastMRI#123.
    """

    kinds = ("rng.shared",)
    wants = (_WORKERS,)
    min_ranks = 2

    policy: SharedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Consecutive states that are equal."""
        return (Reach(_STATES, self.policy.streak + 1, TO_THE_END),)

    def advance(self, window: Window, state: SharedState) -> Outcome:
        """Goes through the states step by step."""
        members = max(window.data_parallel, key=len)
        if state.seeded is None:
            at, numbers = rank_rows(window, _WORKERS)
            having = at[(numbers > 0).any(axis=1)]
            state.seeded = int(having[0]) if len(having) else None
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
                generator = state.generators.setdefault(name, Generator(digest, step))
                seeds = state.seeded is not None and state.seeded <= step
                generator.take(step, digest, alike, None if seeds else self.policy.between)
                shared, known, onset = found.get(step, (False, "", step))
                if generator.times >= self.policy.streak and not shared:
                    found[step] = (True, name, generator.since)
                else:
                    found[step] = (shared, known, onset)
        for step, (shared, name, since) in sorted(found.items()):
            state.judged += 1
            if shared:
                state.watch.bad(step, name, first_step=since)
            else:
                state.watch.good(step)
        findings = tuple(_finding(e, members) for e in state.watch.take(window.last_step))
        return Outcome({"rng.shared": _check(state)}, findings)


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


def _check(state: SharedState) -> Check:
    if not state.judged:
        return Check.missing(
            "No two replicas post the states of their generators.",
            early="No random states have been compared yet.",
        )
    return Check.ok(
        f"The ranks drew numbers of their own, or none, at {count(state.judged, 'checked step')}."
    )
