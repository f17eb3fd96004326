"""Samples that two ranks see in one epoch, as far as digests of whole batches show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.base import Check, Detector, Finding, Outcome, Status
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.wording import count, percent, ranks
from rankscope.server.window import Window

_GRACE = 20
# Batches remembered; of a longer epoch the rest is not judged.
_MEMORY = 200_000
# Repeats by other ranks for each rank, with none of a rank's own: with samples drawn at random
# that happens once in 400 runs.
_EVIDENCE = 6
_AT_LEAST = 12


@dataclass(slots=True)
class Shared:
    """Batches that came to a second rank.

    Attributes:
        repeats, fresh: since the first of them, batches that another rank had had, and new ones.
        ranks: those concerned.
    """

    repeats: int
    fresh: int
    ranks: set[int]


@dataclass(slots=True)
class OverlapState:
    """What is remembered.

    Attributes:
        owner: batch -> rank that had it first.
        closed: why it is no longer judged; empty while it is.
    """

    steps: int = 0
    judged: int = 0
    owner: dict[int, int] = field(default_factory=dict)
    closed: str = ""
    began: int = -1
    shared: Shared = field(default_factory=lambda: Shared(0, 0, set()))
    watch: Watch[Shared] = field(default_factory=lambda: Watch(clear_after=64))


class Overlap(Detector[OverlapState]):
    """Ranks whose parts of the data overlap: some samples are seen twice in an epoch, others never.

    Statistic:
        A batch that another rank has had, in the first epoch, while no rank has had one of its own
        a second time and new ones go on to come: six such for each rank, and twelve at least. Only
        whole batches can be recognised, so this sees batches of one sample, and batches that are
        made beforehand. It ends with the first batch that comes to its own rank again. Batches that
        come at the same step are `data.duplicated`.

    Severity:
        Warning.

    Evidence:
        `repeats`, `fresh` (batches since the first repeat, and new ones among them), `share`.

    Source:
        mlcommons/training#625: 20 to 30 % of the samples, by a seed of each rank's own.
    """

    kinds: ClassVar[tuple[str, ...]] = ("data.overlap",)
    min_ranks: ClassVar[int] = 2

    def start(self) -> OverlapState:
        """No batch yet."""
        return OverlapState()

    def advance(self, window: Window, state: OverlapState) -> Outcome:
        """Goes through the batches step by step."""
        state.steps += len(window.steps)
        words = window.words.get("batch")
        members = max(window.replicas, key=len)
        if words is not None and len(members) > 1 and not state.closed:
            rows = np.flatnonzero(np.isin(window.ranks, members))
            present, values = words.present[rows], words.values[rows]
            for column in np.flatnonzero(present.any(axis=0)).tolist():
                there = rows[present[:, column]]
                self._step(
                    state,
                    int(window.steps[column]),
                    window.ranks[there].tolist(),
                    values[present[:, column], column].tolist(),
                )
                if state.closed:
                    break
        findings = tuple(_finding(e) for e in state.watch.take(window.last_step))
        return Outcome({"data.overlap": _check(window, state)}, findings)

    def _step(self, state: OverlapState, step: int, who: list[int], batches: list[int]) -> None:
        state.judged += 1
        if len(set(batches)) < len(batches):
            return  # another detector's matter
        owners = [state.owner.get(batch) for batch in batches]
        if any(owner == rank for owner, rank in zip(owners, who, strict=True)):
            state.closed = f"At step {step} a rank's own batches began to come again."
            state.owner.clear()
            state.watch.good(step)
            return
        shared = state.shared
        for rank, batch, owner in zip(who, batches, owners, strict=True):
            if owner is None:
                state.owner[batch] = rank
                shared.fresh += state.began >= 0
                continue
            if state.began < 0:
                state.began = step
            shared.repeats += 1
            shared.ranks |= {rank, owner}
        if len(state.owner) > _MEMORY:
            state.closed = f"After step {step} there were too many batches to remember."
            state.owner.clear()
        needed = max(_AT_LEAST, _EVIDENCE * len(who))
        if shared.repeats >= needed and shared.fresh >= 4 * len(who):
            state.watch.bad(step, shared, first_step=state.began)


def _finding(episode: Episode[Shared]) -> Finding:
    shared, step = episode.facts, episode.first_step
    guilty = tuple(sorted(shared.ranks))
    share = shared.repeats / (shared.repeats + shared.fresh)
    return Finding(
        kind="data.overlap",
        severity="warning",
        title=f"{ranks(guilty).capitalize()} share samples within an epoch since step {step}",
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=step,
        ranks=guilty,
        stage="batch",
        cause=(
            f"{shared.repeats:,} batches since step {step} had been another rank's before, "
            f"{percent(share)} of all, while no rank has had one of its own twice: the ranks' "
            "parts of the data overlap, and so others are not seen at all. Each rank shuffles "
            "with a seed of its own."
        ),
        remedy=(
            "Give the sampler the same seed on all ranks: `DistributedSampler(seed=...)` and "
            "random splits made before sharding must not depend on the rank."
        ),
        clear_after=episode.clear_after,
        evidence={"repeats": shared.repeats, "fresh": shared.fresh, "share": share},
    )


def _check(window: Window, state: OverlapState) -> Check:
    episode = state.watch.open(window.last_step)
    if episode is not None:
        return Check(Status.OPEN, f"{_finding(episode).title}.")
    if not state.judged:
        if state.steps < _GRACE:
            return Check(Status.INSUFFICIENT_DATA, "No batches have been seen yet.")
        return Check(Status.MISSING_INPUT, "No two replicas post digests of their batches.")
    if state.closed:
        return Check(Status.OK, f"The ranks' batches were told apart until then. {state.closed}")
    return Check(
        Status.OK,
        f"No batch was seen by two ranks in {count(state.judged, 'checked step')}; samples in "
        "different batches cannot be told apart.",
    )
