"""Ranks that compute one result together, and no longer draw the same random numbers for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.desync.learned_groups import (
    Group,
    Groups,
    Ranks,
    groups_of,
    suspects_of,
)
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.restarts import restarts
from rankscope.server.detectors.mechanisms.wording import agree, count, listing, ranks
from rankscope.server.detectors.policy import Observations, Policy
from rankscope.server.window import Check, Window

# The generator that dropout draws from: that of the device where there is one.
_DEVICE, _HOST = "rng/cuda", "rng/torch"
_GENERATORS = {_DEVICE: "torch on CUDA", _HOST: "torch"}
_STATES = tuple(f"words/{name}" for name in _GENERATORS)


@dataclass(frozen=True, slots=True)
class DrawnPolicy(Policy):
    """Thresholds of `desync.rng`.

    Attributes:
        shared: consecutive samples at which ranks had one batch and one state, new each time,
            before they are taken for ranks that draw alike.
    """

    shared: Observations = 4


@dataclass(slots=True)
class Different:
    """A group whose ranks draw different numbers.

    Attributes:
        group: the ranks.
        suspects: those without the state of most; all of them where there is none.
        generator: which.
        shared: observations at which they had drawn alike.
    """

    group: Ranks
    suspects: Ranks
    generator: str
    shared: int


@dataclass(slots=True)
class DrawnState:
    """What is remembered.

    Attributes:
        groups: ranks that draw alike for one batch.
        last: state and batch of each rank at its last observation.
        generator: the one that is examined.
    """

    groups: Groups[Group, Different] = field(default_factory=Groups)
    last: dict[int, tuple[int, int]] = field(default_factory=dict)
    generator: str = ""


class RandomDiverged(Detector[DrawnState]):
    """Ranks that hold different parts of a model drew the same random numbers, and no longer do.

    What tensor-parallel ranks both compute - the parts between the sharded layers - has to be the
    same on all of them, dropout included: with other masks they add up parts of different results.

    Statistic:
        Digests of the state of torch's generator (that of the device, where there is one). Ranks
        that hold different parts of the model and had, at four consecutive observations, one and
        the
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

    kinds = ("desync.rng",)
    min_ranks = 2

    policy: DrawnPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """The states that make ranks a group, and one more."""
        return (Reach(_STATES, self.policy.shared + 1, TO_THE_END),)

    def advance(self, window: Window, state: DrawnState) -> Outcome:
        """Goes through the states of the generators step by step."""
        sets = window.data_parallel
        part = {rank: number for number, c in enumerate(sets) for rank in c}
        if len(sets) > 1:
            self._compare(window, state, part)
        findings = tuple(_finding(e) for e in state.groups.episodes(window.last_step))
        return Outcome({"desync.rng": _check(window, state, self.policy)}, findings)

    def _compare(self, window: Window, state: DrawnState, part: dict[int, int]) -> None:
        batches = window.digests.get("batch")
        if _DEVICE in window.digests and state.generator != _DEVICE:
            state.generator = _DEVICE
            state.groups.forget()
        elif not state.generator and _HOST in window.digests:
            state.generator = _HOST
        drawn = window.digests.get(state.generator)
        if drawn is None:
            return
        later = restarts(window)
        for column in np.flatnonzero(drawn.present.sum(axis=0) > 1).tolist():
            state.groups.begin(later, int(window.steps[column]))
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
        state: DrawnState,
        step: int,
        now: dict[int, tuple[int, int | None]],
        part: dict[int, int],
    ) -> None:
        fresh: dict[int, tuple[int, int]] = {}
        for rank, (digest, batch) in now.items():
            before = state.last.get(rank, (0, 0))
            if batch is not None:
                # The same as before: nothing was drawn, or the batch is synthetic.
                if digest != before[0] and batch != before[1]:
                    fresh[rank] = digest, batch
                state.last[rank] = digest, batch

        def differs(group: Ranks, known: Group, held: Mapping[int, int]) -> tuple[Different, None]:
            return Different(group, suspects_of(held), state.generator, known.times), None

        state.groups.observe(
            step,
            {rank: digest for rank, (digest, _) in now.items()},
            groups_of(fresh, part),
            needed=self.policy.shared,
            made=Group,
            differs=differs,
        )


def _finding(episode: Episode[Different]) -> Finding:
    found, step = episode.facts, episode.first_step
    group, suspects = found.group, found.suspects
    alone = suspects != group
    title = (
        f"{ranks(suspects).capitalize()} {agree(len(suspects), 'draws')} other random "
        "numbers than the ranks that share the model"
        if alone
        else f"{ranks(group).capitalize()} share a model and draw different random numbers"
    )
    unknown = "" if alone else " Nothing shows which of them has drawn more."
    return episode.finding(
        kind="desync.rng",
        severity="warning",
        title=f"{title} since step {step}",
        ranks=suspects,
        stage="local_gradient",
        cause=(
            f"{ranks(group).capitalize()} hold different parts of the model, read the same batches "
            f"and drew the same numbers from the generator of `{_GENERATORS[found.generator]}` at "
            f"{count(found.shared, 'sample')} before; at step {step} its states differ. One of "
            "them has drawn where the others did not (a loader that draws its seed, a sampling "
            f"for a log, an evaluation on one rank), and their dropout masks differ.{unknown}"
        ),
        remedy=(
            "Draw on all ranks of the group or on none; give what one rank draws alone a "
            "`torch.Generator` of its own, or fork the state around it (`torch.random.fork_rng`)."
        ),
        evidence={
            "group": list(group),
            "generator": found.generator,
            "shared": found.shared,
            "observed": episode.seen,
        },
    )


def _check(window: Window, state: DrawnState, policy: DrawnPolicy) -> Check:
    if len(window.data_parallel) == 1 and window.data_parallel[0]:
        return Check.not_applicable(
            "All ranks hold the same tensors, or shards of them: each draws for itself."
        )
    if state.groups.known:
        reported = listing([ranks(group) for group in sorted(state.groups.known)], most=4)
        return Check.ok(f"{reported.capitalize()} drew the same numbers, as they have to.")
    few = state.groups.judged < policy.shared
    early = "Too few random states have been seen yet." if few else ""
    if not state.groups.judged:
        return Check.missing("No two ranks post the states of their generators.", early=early)
    why = "No ranks that hold different parts draw the same numbers for one batch."
    return Check.not_applicable(why, early=early)
