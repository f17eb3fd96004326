"""Samples that two ranks see in one epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankscope.agent.wire import NO_SAMPLE, SAMPLE_DIGESTS
from rankscope.server.detectors.base import Detector, Finding, Outcome, Reach
from rankscope.server.detectors.data.batches import BATCHES, batch_digests, label_digests
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.epochs_seen import Visits
from rankscope.server.detectors.mechanisms.restarts import passed, restarts
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count, number, percent, ranks
from rankscope.server.detectors.policy import Number, Policy, Share, Times
from rankscope.server.window import Check, Window

# Samples and batches remembered. When there are more, every second one is examined from then on.
_MEMORY = 200_000
# Samples of a step that are examined, of all ranks together: dozens of steps are enough then.
_A_STEP = 64
_RECENT = 4
# Lengths of a loader after which its samples have come again, were they the same.
_EPOCHS = 2


@dataclass(frozen=True, slots=True)
class OverlapPolicy(Policy):
    """Thresholds of `data.overlap`, a sequential test after Wald.

    Whatever comes again comes to its own rank with probability 1 / N, or `rarer` times less often:
    the ordinary run, in which each rank has a part of its own, knows no repeats at all.

    Attributes:
        rarer: how much rarer than by chance a sample returns to its own rank, where ranks share
            their samples.
        decided: logarithm of the odds at which the test is decided: it errs once in 10,000 runs,
            either way.
        next_epoch: share of recent samples that are repeats, above which an epoch has ended and the
            next one deals the same samples to other ranks.
    """

    rarer: Times = 32
    decided: Number = math.log(1e4)
    next_epoch: Share = 0.5


@dataclass(slots=True)
class Shared:
    """What came to a second rank.

    Attributes:
        repeats, fresh: since the first of them, what another rank had had, and what was new.
        own: what came to the same rank again since then.
        ranks: those concerned.
        samples: whether these are samples; else whole batches.
    """

    repeats: int = 0
    fresh: int = 0
    own: int = 0
    ranks: set[int] = field(default_factory=set)
    samples: bool = False


@dataclass(slots=True)
class OverlapState:
    """What is remembered.

    Attributes:
        items: samples or batches that were examined.
        by_samples: samples are reported in this run.
        owners: sample or batch -> ranks that had it first.
        recent: share of the last ones that had been there before.
        evidence: log-likelihood ratio for parts that overlap.
        halvings: how often only every second sample was kept.
        restarts: how often a rank has begun anew so far.
        found: whether the test has decided that parts overlap: what comes again in later epochs
            says nothing against it, and no sampler mends itself before a restart.
        closed: why it is no longer judged; empty while it is.
        visits: how often samples came; `epoch`: batches of a rank's loader, NaN where not known.
        whole, labels: the same of whole batches, where this is of samples (few steps report these),
            and of their labels.
    """

    steps: int = 0
    judged: int = 0
    items: int = 0
    by_samples: bool = False
    owners: dict[int, tuple[int, ...]] = field(default_factory=dict)
    recent: float = 0.0
    evidence: float = 0.0
    halvings: int = 0
    restarts: int = 0
    found: bool = False
    closed: str = ""
    began: int = -1
    shared: Shared = field(default_factory=Shared)
    watch: Watch[Shared] = field(default_factory=lambda: Watch(clear_after=64))
    whole: OverlapState | None = None
    labels: OverlapState | None = None
    visits: Visits = field(default_factory=Visits)
    epoch: float = math.nan

    def thin_out(self, halvings: int) -> None:
        """Keeps every second sample so often, from now on."""
        if halvings > self.halvings:
            self.halvings = halvings
            self.owners = {i: who for i, who in self.owners.items() if _kept(i, halvings)}

    def forget(self, restarts: int) -> None:
        """What was read so far shows nothing any more."""
        self.owners.clear()
        self.shared, self.began, self.recent, self.evidence = Shared(), -1, 0.0, 0.0
        self.restarts, self.found, self.closed = restarts, False, ""


class Overlap(Detector[OverlapState]):
    """Ranks whose parts of the data overlap: some samples are seen twice in an epoch, others never.

    Statistic:
        Samples that a rank gets and another rank has had in the same epoch. Of what comes again
        because the data hold it twice, because it is drawn at random, or because an epoch has
        ended, one in N comes to the rank that had it, of N ranks; where each rank goes through the
        data in an order of its own, none does within an epoch. A sequential probability ratio test
        (Wald, 1945) of 1/(32 N) against 1/N, both errors 1e-4. Where most of what comes has been
        there before, it is another epoch, which means nothing. Of each batch some samples are
        known, those with the smallest hashes, the same ones wherever they come; of agents that
        report none, whole batches. Whole batches, which are known of more steps, and the targets of
        their losses, which random augmentation leaves as they are, are tested beside the samples,
        in the same way: labels that are alike by chance come to their own rank as often. What ranks
        read before a restart is forgotten; until one it stands once it is found, as no sampler
        mends itself. Batches that come to two ranks at the same step are `data.duplicated`.

    Severity:
        Warning.

    Evidence:
        `repeats`, `fresh`, `own` (since the first repeat: what another rank had had, what was new,
        what the same rank had had), `share` (of repeats in all of it), `samples` (whether that
        counts samples; else whole batches), `by_labels` (or their labels).

    Source:
        mlcommons/training#625: 20 to 30 % of the samples, by a seed of each rank's own.
    """

    kinds = ("data.overlap",)
    wants = ("loader_batches",)
    min_ranks = 2

    policy: OverlapPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Batches that come to another rank as many as decide the test, whenever that is."""
        least = math.log((1 - 1 / (2 * self.policy.rarer)) / (1 - 1 / 2))
        return (Reach(BATCHES, math.ceil(self.policy.decided / least), returns=True),)

    def advance(self, window: Window, state: OverlapState) -> Outcome:
        """Goes through the batches step by step."""
        state.steps += len(window.steps)
        state.visits.take(window)
        batches = rank_rows(window, "loader_batches")[1]
        if batches.size and not np.isnan(batches).all():
            state.epoch = float(np.nanmax(batches))
        series = batch_digests(window)
        members = max(window.data_parallel, key=len)
        if series is not None and len(members) > 1:
            rows = np.flatnonzero(np.isin(window.ranks, members))
            present, values = series.present[rows], series.values[rows]
            state.by_samples |= any(name in window.digests for name in SAMPLE_DIGESTS)
            samples, reported = _samples(window, rows, by_samples=state.by_samples)
            if state.by_samples:
                state.whole = state.whole or OverlapState()
                self._go(
                    window, state.whole, rows, (present, values), (values[None], present[None])
                )
            self._go(window, state, rows, (present, values), (samples, reported))
            targets = label_digests(window)
            if targets is not None:
                state.labels = state.labels or OverlapState()
                reported = (targets.present[rows] & present)[None]
                held = (targets.values[rows][None], reported)
                self._go(window, state.labels, rows, (present, values), held)
        # Where several find it, it is one fault: samples show the most of it.
        parts = (state, state.whole, state.labels)
        found = next((p for p in parts if p is not None and p.watch.found), state)
        findings = tuple(
            _finding(e, by_labels=found is state.labels) for e in found.watch.take(window.last_step)
        )
        return Outcome({"data.overlap": _check(window, state, self.policy)}, findings)

    def _go(
        self,
        window: Window,
        state: OverlapState,
        rows: npt.NDArray[np.int64],
        batches: tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint64]],
        items: tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]],
    ) -> None:
        """Goes through the steps of a window.

        Args:
            batches: where there is one, and its digest: [rows, steps].
            items: samples, batches or labels, and where there is one: [K, rows, steps].
        """
        later = restarts(window)
        (present, values), (held, reported) = batches, items
        # All ranks keep the same part of all samples, so that shares and odds stay.
        fewest = max(len(held) * len(rows) // _A_STEP, 1).bit_length() - 1
        state.thin_out(fewest)
        reported = reported & (held & np.uint64((1 << state.halvings) - 1) == 0)
        for column in np.flatnonzero(present.any(axis=0)).tolist():
            step = int(window.steps[column])
            begun = passed(later, step)
            if begun > state.restarts:
                # What was read after the checkpoint is read again, and perhaps by other ranks.
                state.forget(begun)
            if state.closed:
                continue
            there = np.flatnonzero(present[:, column])
            of_ranks = values[there, column].tolist()
            if len(set(of_ranks)) < len(of_ranks):
                state.judged += 1
                continue  # another detector's matter
            places, row = np.nonzero(reported[:, :, column])
            pairs = zip(
                window.ranks[rows[row]].tolist(), held[places, row, column].tolist(), strict=True
            )
            state.shared.samples = state.by_samples
            self._step(state, step, pairs, len(rows))

    def _step(
        self, state: OverlapState, step: int, held: Iterable[tuple[int, int]], members: int
    ) -> None:
        if state.found and not state.owners:
            state.watch.bad(step, state.shared)
            return
        if len(state.owners) > _MEMORY:
            state.thin_out(state.halvings + 1)
        owners, shared = state.owners, state.shared
        first: dict[int, list[int]] = {}
        repeats = own = total = 0
        for rank, item in held:
            if not _kept(item, state.halvings):
                continue  # thinned out since the window began
            total += 1
            known = owners.get(item) or first.get(item)
            if known is None:
                first[item] = [rank]
            elif rank in known:
                own += 1
            else:
                repeats += 1
                shared.ranks |= {rank, *known}
                if isinstance(known, list):
                    known.append(rank)
        if not total:
            return
        state.judged += 1
        state.items += total
        owners |= {item: tuple(ranks) for item, ranks in first.items()}
        if repeats and state.began < 0:
            state.began = step
        if state.began >= 0 and repeats + own <= self.policy.next_epoch * total:
            shared.repeats += repeats
            shared.own += own
            shared.fresh += len(first)
        weight = math.exp(-total / (_RECENT * members))
        state.recent = weight * state.recent + (1 - weight) * (repeats + own) / total
        if state.found:
            if state.recent > self.policy.next_epoch:
                owners.clear()
        else:
            if state.recent <= self.policy.next_epoch:
                chance = 1 / (self.policy.rarer * members)
                state.evidence += repeats * math.log((1 - chance) / (1 - 1 / members))
            # What speaks against it counts in any case.
            state.evidence -= own * math.log(self.policy.rarer)
            state.found = state.evidence >= self.policy.decided
        if state.found:
            state.watch.bad(step, shared, first_step=state.began)
        elif state.watch.open(step) is not None:
            state.watch.good(step)  # of before a restart
        if state.evidence <= -self.policy.decided:
            state.closed = (
                f"At step {step} repeated samples came back to their own rank as often as by "
                "chance: another epoch began, or the data hold the same samples several times."
            )
            owners.clear()


def _kept(item: int, halvings: int) -> bool:
    # Digests are spread evenly, in their low bits as well.
    return not item & ((1 << halvings) - 1)


def _samples(
    window: Window, rows: npt.NDArray[np.int64], *, by_samples: bool
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Samples of each rank and step, and where there is one: [K, rows, steps].

    Whole batches (K = 1) where no samples are reported in the whole run.
    """
    series = [window.digests[name] for name in SAMPLE_DIGESTS if name in window.digests]
    if by_samples and not series:
        none = np.zeros((1, len(rows), len(window.steps)))
        return none.astype(np.uint64), none.astype(np.bool_)
    if not series:
        digests = batch_digests(window)
        assert digests is not None  # else nobody asks
        return digests.values[rows][None], digests.present[rows][None].copy()
    parts = []
    for one in series:
        pairs = np.where(one.present[rows], one.values[rows], ~np.uint64(0))
        parts += [pairs >> np.uint64(32), pairs & np.uint64(NO_SAMPLE)]
    samples = np.stack(parts)
    return samples, samples != np.uint64(NO_SAMPLE)


def _finding(episode: Episode[Shared], *, by_labels: bool = False) -> Finding:
    shared, step = episode.facts, episode.first_step
    suspects = tuple(sorted(shared.ranks))
    share = shared.repeats / (shared.repeats + shared.fresh + shared.own)
    what = (
        "samples"
        if shared.samples
        else "batches"
        if not by_labels
        else "batches (known by their labels)"
    )
    compared = " that were examined" if shared.samples else ""
    again = f"{shared.own:,} had been the same rank's" if shared.own else "none the same rank's"
    return episode.finding(
        kind="data.overlap",
        severity="warning",
        title=f"{ranks(suspects).capitalize()} share samples within an epoch since step {step}",
        ranks=suspects,
        stage="batch",
        cause=(
            f"{shared.repeats:,} {what} since step {step} had been another rank's before, "
            f"{percent(share)} of those{compared}, and {again}: the ranks' parts of the data "
            "overlap, and so some samples are not seen at all. Usually each rank shuffles with "
            "a seed of its own."
        ),
        remedy=(
            "Give the sampler the same seed on all ranks: `DistributedSampler(seed=...)` and "
            "random splits made before sharding must not depend on the rank."
        ),
        evidence={
            "repeats": shared.repeats,
            "fresh": shared.fresh,
            "own": shared.own,
            "share": share,
            "samples": shared.samples,
            "by_labels": by_labels,
        },
    )


def _check(window: Window, state: OverlapState, policy: OverlapPolicy) -> Check:
    if not state.judged:
        return Check.missing(
            "No two replicas post digests of their batches.", early="No batches have been seen yet."
        )
    if state.closed:
        return Check.ok(f"The ranks' parts did not overlap until then. {state.closed}")
    if state.visits.all_new and state.steps >= _EPOCHS * state.epoch:
        return Check.insufficient(
            f"No sample came a second time in {count(state.steps, 'step')}, in which the data were "
            "gone through more than once: inputs are augmented anew each time, and samples cannot "
            "be recognised."
        )
    size = len(max(window.data_parallel, key=len))
    what = "sample" if state.by_samples else "batch"
    limit = "" if state.by_samples else "; samples in different batches cannot be distinguished"
    reported = (
        f"In {count(state.judged, 'checked step')}, two ranks saw the same {what} no more often "
        f"than by chance{limit}."
    )
    needed = policy.decided / math.log((1 - 1 / (policy.rarer * size)) / (1 - 1 / size))
    # Were all data dealt to each rank in an order of its own, half of what the others read in an
    # epoch of the length of the run would have come before, seen at this share of the steps.
    expected = state.items * (size - 1) / (2 * size) * state.judged / max(state.steps, 1)
    if expected < needed:
        return Check.insufficient(
            f"{reported} But overlapping parts would have shown only {number(expected)} times in "
            f"these, and {number(math.ceil(needed))} times are needed."
        )
    return Check.ok(reported)
