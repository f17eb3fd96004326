"""Ranks that compute one result together, and no longer draw the same random numbers for it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.policy import Observations, Policy
from rankscope.server.detectors.restarts import passed, restarts
from rankscope.server.detectors.wording import count, listing, ranks
from rankscope.server.window import Check, Status, Window

# The generator that dropout draws from: that of the device where there is one.
_DEVICE, _HOST = "rng/cuda", "rng/torch"
_GENERATORS = {_DEVICE: "torch on CUDA", _HOST: "torch"}
_STATES = tuple(f"words/{name}" for name in _GENERATORS)
_GRACE = 20


@dataclass(frozen=True, slots=True)
class PartedPolicy(Policy):
    """Thresholds of `desync.rng`.

    Attributes:
        shared: on end at which ranks had one batch and one state, a new one each time.
    """

    shared: Observations = 4


@dataclass(slots=True)
class Parted:
    """A group whose ranks draw different numbers.

    Attributes:
        group: the ranks.
        guilty: those without the state of most; all of them where there is none.
        generator: which.
        shared: observations at which they had drawn alike.
    """

    group: tuple[int, ...]
    guilty: tuple[int, ...]
    generator: str
    shared: int


@dataclass(slots=True)
class PartedState:
    """What is remembered.

    Attributes:
        candidates: ranks that drew alike for one batch -> at how many observations on end.
        groups: those that are known to -> at how many observations they did.
        last: state and batch of each rank at its last observation.
        generator: the one that is looked at.
        restarts: how often a rank has begun anew so far.
    """

    steps: int = 0
    judged: int = 0
    candidates: dict[tuple[int, ...], int] = field(default_factory=dict)
    groups: dict[tuple[int, ...], int] = field(default_factory=dict)
    last: dict[int, tuple[int, int]] = field(default_factory=dict)
    generator: str = ""
    restarts: int = 0
    watch: Watch[Parted] = field(default_factory=lambda: Watch(clear_after=8))


class RandomParted(Detector[PartedState]):
    """Ranks that hold different parts of a model drew the same random numbers, and no longer do.

    What tensor-parallel ranks both compute - the parts between the sharded layers - has to be the
    same on all of them, dropout included: with other masks they add up parts of different results.

    Statistic:
        Digests of the state of torch's generator (that of the device, where there is one). Ranks
        that hold different parts of the model and had, at four observations on end, one and the
        same batch and state, new ones each time, are a group: numbers are drawn, and drawn alike.
        From then on their states have to be equal. Ranks that hold replicas, or read batches of
        their own, are no group: they should draw their own numbers (`rng.shared`). Learned anew
        after a restart. Over after 8 steps without.

    Severity:
        Warning.

    Evidence:
        `group`, `generator`, `shared` (observations at which they drew alike before), `observed`.

    Source:
        NVIDIA/Megatron-LM#206: a data loader that draws its seed on one tensor-parallel rank.
    """

    kinds: ClassVar[tuple[str, ...]] = ("desync.rng",)
    policies: ClassVar[type[Policy]] = PartedPolicy
    min_ranks: ClassVar[int] = 2

    policy: PartedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """The states that make ranks a group, and one more."""
        return (Reach(_STATES, self.policy.shared + 1, TO_THE_END),)

    def start(self) -> PartedState:
        """Nothing drawn yet."""
        return PartedState()

    def advance(self, window: Window, state: PartedState) -> Outcome:
        """Goes through the states of the generators step by step."""
        state.steps += len(window.steps)
        apart = window.data_parallel
        part = {rank: number for number, c in enumerate(apart) for rank in c}
        if len(apart) > 1:
            self._look(window, state, part)
        findings = tuple(_finding(e) for e in state.watch.take(window.last_step))
        return Outcome({"desync.rng": _check(window, state, self.policy)}, findings)

    def _look(self, window: Window, state: PartedState, part: dict[int, int]) -> None:
        batches = window.words.get("batch")
        if _DEVICE in window.words and state.generator != _DEVICE:
            state.generator = _DEVICE
            state.candidates.clear()
            state.groups.clear()
        elif not state.generator and _HOST in window.words:
            state.generator = _HOST
        drawn = window.words.get(state.generator)
        if drawn is None:
            return
        later = restarts(window)
        for column in np.flatnonzero(drawn.present.sum(axis=0) > 1).tolist():
            begun = passed(later, int(window.steps[column]))
            if begun > state.restarts:
                state.restarts = begun
                state.candidates.clear()
                state.groups.clear()
            rows = np.flatnonzero(drawn.present[:, column])
            known = batches.present[rows, column] if batches is not None else rows < 0
            batch = batches.values[rows, column] if batches is not None else rows
            now = {
                int(window.ranks[row]): (int(drawn.values[row, column]), int(b) if k else None)
                for row, b, k in zip(rows.tolist(), batch.tolist(), known.tolist(), strict=True)
            }
            self._step(state, int(window.steps[column]), now, part)

    def _step(
        self,
        state: PartedState,
        step: int,
        now: dict[int, tuple[int, int | None]],
        part: dict[int, int],
    ) -> None:
        state.judged += 1
        parted = None
        for group, times in state.groups.items():
            held = {rank: now[rank][0] for rank in group if rank in now}
            if len(held) == len(group):
                if len(set(held.values())) == 1:
                    state.groups[group] = times + 1
                elif parted is None:
                    parted = Parted(group, _outside(held), state.generator, times)
        if parted is not None:
            state.watch.bad(step, parted)
        elif state.groups:
            state.watch.good(step)
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank, (word, batch) in now.items():
            before = state.last.get(rank, (0, 0))
            # The same as before: nothing was drawn, or the batch is synthetic.
            if batch is not None and word != before[0] and batch != before[1]:
                alike[word, batch].append(rank)
            if batch is not None:
                state.last[rank] = (word, batch)
        candidates = {}
        taken = {rank for group in state.groups for rank in group}
        for members in alike.values():
            group = tuple(members)
            parts = {part.get(rank) for rank in group}
            if len(group) > 1 and len(parts) == len(group) and not taken & set(group):
                candidates[group] = state.candidates.get(group, 0) + 1
                if candidates[group] >= self.policy.shared:
                    state.groups[group] = candidates[group]
        state.candidates = candidates


def _outside(held: dict[int, int]) -> tuple[int, ...]:
    by_word: dict[int, list[int]] = defaultdict(list)
    for rank, word in held.items():
        by_word[word].append(rank)
    most = max(by_word.values(), key=len)
    if 2 * len(most) <= len(held):
        return tuple(sorted(held))
    return tuple(sorted(set(held) - set(most)))


def _finding(episode: Episode[Parted]) -> Finding:
    parted, step = episode.facts, episode.first_step
    group, guilty = parted.group, parted.guilty
    alone = guilty != group
    title = (
        f"{ranks(guilty).capitalize()} {'draws' if len(guilty) == 1 else 'draw'} other random "
        "numbers than the ranks that share the model"
        if alone
        else f"{ranks(group).capitalize()} share a model and draw different random numbers"
    )
    unknown = "" if alone else " Nothing tells which of them has drawn more."
    return Finding(
        kind="desync.rng",
        severity="warning",
        title=f"{title} since step {step}",
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=step,
        ranks=guilty,
        stage="local_gradient",
        cause=(
            f"{ranks(group).capitalize()} hold different parts of the model, read the same batches "
            f"and drew the same numbers from the generator of `{_GENERATORS[parted.generator]}` at "
            f"{count(parted.shared, 'look')} before; at step {step} its states differ. One of "
            "them has drawn where the others did not (a loader that draws its seed, a sampling "
            f"for a log, an evaluation on one rank), and their dropout masks differ.{unknown}"
        ),
        remedy=(
            "Draw on all ranks of the group or on none; give what one rank draws alone a "
            "`torch.Generator` of its own, or fork the state around it (`torch.random.fork_rng`)."
        ),
        clear_after=episode.clear_after,
        evidence={
            "group": list(group),
            "generator": parted.generator,
            "shared": parted.shared,
            "observed": episode.seen,
        },
    )


def _check(window: Window, state: PartedState, policy: PartedPolicy) -> Check:
    episode = state.watch.open(window.last_step)
    if episode is not None:
        return Check(Status.OPEN, f"{_finding(episode).title}.")
    if len(window.data_parallel) == 1 and window.data_parallel[0]:
        return Check(
            Status.NOT_APPLICABLE,
            "All ranks hold the same tensors, or shards of them: each draws for itself.",
        )
    if state.groups:
        told = listing([ranks(group) for group in sorted(state.groups)], most=4)
        return Check(Status.OK, f"{told.capitalize()} drew the same numbers, as they have to.")
    if state.judged < policy.shared and state.steps < _GRACE:
        return Check(Status.INSUFFICIENT_DATA, "Too few random states have been seen yet.")
    if not state.judged:
        return Check(Status.MISSING_INPUT, "No two ranks post the states of their generators.")
    return Check(
        Status.NOT_APPLICABLE,
        "No ranks that hold different parts draw the same numbers for one batch.",
    )
