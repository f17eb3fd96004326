"""Batches that come again in the order in which they came before."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Detector, Outcome, Reach
from rankscope.server.detectors.data.batches import (
    BATCHES,
    Collisions,
    batch_digests,
    label_digests,
)
from rankscope.server.detectors.data.own_epochs import OwnEpochs, epochs_finding
from rankscope.server.detectors.data.own_repeats import OwnRepeats, own_finding
from rankscope.server.detectors.data.received import RECEIVED, Received
from rankscope.server.detectors.data.replayed_findings import (
    Repeat,
    Stuck,
    repeat_finding,
    stuck_finding,
)
from rankscope.server.detectors.effects import BLUR, EPISODE, Rule
from rankscope.server.detectors.mechanisms.episode import Watch
from rankscope.server.detectors.mechanisms.epochs_seen import Visits
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count, if_several
from rankscope.server.detectors.policy import Observations, Policy, Steps
from rankscope.server.window import Check, Window

# Consecutive observations of one batch that are no accumulation, repeated step or look at the same
# place of several epochs: those come two or three at a time.
_STUCK = 32
# Remembered observations; what lies further back is not recognised.
_MEMORY = 65_536


@dataclass(frozen=True, slots=True)
class ReplayedPolicy(Policy):
    """Thresholds of `data.replayed`.

    Attributes:
        run: consecutive batches that repeat earlier ones at one distance, before it is reported.
        far: distance in steps from which on one batch less is enough: several passes over one
            buffer of rollouts repeat batches sooner.
    """

    run: Observations = 3
    far: Steps = 16


@dataclass(slots=True)
class Order:
    """What is remembered: digests of all ranks' batches together, and when they were seen.

    Attributes:
        labels: they are digests of labels, which may be alike by chance: how often.
        distinct: different ones in the sequence that repeats now.
    """

    labels: Collisions | None = None
    distinct: set[bytes] = field(default_factory=set)
    judged: int = 0
    constant: int = 0
    alike: int = 0
    alike_since: int = -1
    stuck: Watch[Stuck] = field(default_factory=lambda: Watch(clear_after=8))
    seen: dict[bytes, int] = field(default_factory=dict)
    at: dict[int, bytes] = field(default_factory=dict)
    order: deque[int] = field(default_factory=deque)
    run: int = 0
    distance: int = 0
    since: int = 0
    earlier: int = -1
    previous: int = -1
    last: bytes = b""
    last_step: int = -1
    epochs: Watch[Repeat] = field(default_factory=lambda: Watch(clear_after=64))
    restarts: Watch[Repeat] = field(default_factory=lambda: Watch(clear_after=8))


@dataclass(slots=True)
class ReplayedState:
    """What is remembered of the batches, and of their labels."""

    batches: Order = field(default_factory=Order)
    labels: Order = field(default_factory=lambda: Order(Collisions()))
    own: OwnRepeats = field(default_factory=OwnRepeats)
    own_epochs: OwnEpochs = field(default_factory=OwnEpochs)
    visits: Visits = field(default_factory=Visits)
    received: Received = field(default_factory=Received)

    @property
    def by_labels(self) -> bool:
        """Whether labels repeat, while the batches that they belong to never did."""
        return not (self.batches.epochs.found or self.batches.restarts.found)


class Replayed(Detector[ReplayedState]):
    """Batches that come again in the order in which they came before.

    An epoch is like the one before it, or a resumed run begins with its data anew.

    Statistic:
        Digests of the batches of all ranks, as one sequence: three consecutive ones that were seen
        before (two, where 16 steps or more lie between them), each as many steps ago as the others.
        Where ranks had just started again, the data are replayed; else the order of an epoch is
        repeated. Of labels, which batches share by chance, as many consecutive ones, at least eight
        different ones, as come once in a million runs, by how often two of the run's steps have the
        same
        ones: so an order shows where random augmentation makes each batch a new one.
        Batches that are all the same have no order: 32 consecutive observations of one batch are a
        finding of their own. So are 8 at which some ranks, and not all of them, had the batch of
        one observation before, or of up to 8 before (twice through); and so is an order, of 9 steps
        or more, that comes again on some ranks while those of the others are new: as many different
        consecutive batches as of labels. Over 64 steps (8 after a
        restart) after the last batch of the sequence.

    Severity:
        Warning; info where every batch is the same from the start and nothing is known of others:
        all of the data may be in it. They are not where the loader has more batches than one
        (`loader_batches`), or the batch is a view of memory that holds 16 times as many samples or
        more (`samples_stored`; a part that is trained on as a whole is rarely less). Nor is it
        likely after more than 100 observations of a batch of 8, 16, 32, 64 or 128 samples, or of up
        to 128 sequences of tokens, unless the loader is known to have no other, or several ranks
        have the same one, as synthetic inputs are: that is a warning, too.

    Evidence:
        `distance` (steps from one to the other), `earlier_step`, `length` (observations
        that repeat), `restarted` (ranks), `by_labels` (it is known by the labels alone). Of one
        batch at all steps `length`, `varied` (there were others before), `batches` and `stored`
        (what there is beside it: of the loader, and times the batch), `samples` (in the batch).

    Source:
        pytorch/pytorch#31771 (`set_epoch` not called), and loaders that are not restored:
        huggingface/accelerate#4203.
    """

    kinds = ("data.replayed", "data.unshuffled")
    wants = ("samples", "samples_stored", "loader_batches", "tokens", RECEIVED)

    effects = (
        Rule(
            root=("data.replayed",),
            root_key="own",
            consequence=("rank.loss_outlier", "rank.gradient_outlier"),
            earliest=-BLUR,
            why="a model memorises what one rank reads over and over",
        ),
        Rule(
            root=("data.unshuffled",),
            root_key="stuck",
            consequence=("rank.loss_outlier",),
            earliest=-BLUR,
            latest=EPISODE,
            why="batches that come again and again are memorised, and each rank has its own",
        ),
        Rule(
            root=("data.unshuffled",),
            root_key="own",
            consequence=("rank.loss_outlier", "rank.gradient_outlier", "data.overlap"),
            earliest=-BLUR,
            why="one rank's part of the data is that of another shuffling",
        ),
        Rule(
            root=("data.unshuffled",),
            consequence=("loss.oscillating", "gradient.oscillating", "metric.anomaly"),
            earliest=-10 * EPISODE,
            same_ranks=False,
            same_period=True,
            why="batches that come in the same order each epoch make the same losses each epoch",
        ),
    )

    policy: ReplayedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """A sequence of batches that comes again, in the next epoch or after a restart."""
        return (Reach(BATCHES, self.policy.run, returns=True),)

    def advance(self, window: Window, state: ReplayedState) -> Outcome:
        """Goes through the batches step by step."""
        state.visits.take(window)
        state.received.take(window)
        for series, order in (
            (batch_digests(window), state.batches),
            (label_digests(window), state.labels),
        ):
            if series is None:
                continue
            whole = series.present.all(axis=0) & (len(window.ranks) == window.world_size)
            for column in np.flatnonzero(whole).tolist():
                # Ranks in any order: renumbering them is no other sequence.
                held = np.sort(series.values[:, column]).tobytes()
                digest = hashlib.blake2b(held, digest_size=8).digest()
                digests = series.values[:, column]
                shared = len(digests) > 1 and bool((digests == digests[0]).all())
                self._step(window, order, int(window.steps[column]), digest, shared=shared)
                if order is state.batches:
                    step = int(window.steps[column])
                    # What a stage of a pipeline is given is no batch of a loader's.
                    reads = ~state.received.at(window.ranks, window.steps[[column]])[0]
                    state.own.take(step, window.ranks[reads], digests[reads])
                    state.own_epochs.take(step, window.ranks[reads], digests[reads])
        # Where both repeat, it is one sequence: that of the batches is known sooner.
        reported = state.labels if state.by_labels else state.batches
        findings = [
            repeat_finding(episode, by_labels=reported.labels is not None)
            for watch in (reported.epochs, reported.restarts)
            for episode in watch.take(window.last_step)
        ]
        findings += [stuck_finding(e) for e in state.batches.stuck.take(window.last_step)]
        findings += [own_finding(e) for e in state.own.watch.take(window.last_step)]
        findings += [epochs_finding(e) for e in state.own_epochs.watch.take(window.last_step)]
        checks = {
            "data.replayed": _check(window, state, state.batches.restarts),
            "data.unshuffled": _check(window, state, state.batches.epochs),
        }
        return Outcome(checks, tuple(findings))

    def _step(
        self, window: Window, state: Order, step: int, digest: bytes, *, shared: bool
    ) -> None:
        earlier = state.seen.get(digest)
        state.judged += 1
        run = state.run
        same = digest == state.last
        state.constant += same
        self._follow_stuck(window, state, step, same=same, shared=shared)
        # Samples that lie whole epochs apart find the same batch again.
        constant = same and (
            step - state.last_step < self.policy.far or 2 * state.constant >= state.judged
        )
        if earlier is not None and not constant:
            distance = _common(step - earlier, state.distance, self.policy.far) if state.run else 0
            if distance:
                state.run, state.distance = state.run + 1, distance
            else:
                state.run, state.distance, state.since = 1, step - earlier, step
                state.earlier, state.previous = earlier, state.last_step
        elif constant or step - state.distance in state.at:
            # Where its counterpart was not examined, it says nothing.
            state.run = 0
        if state.run <= 1:
            state.distinct.clear()
        if state.run:
            state.distinct.add(digest)
        if state.labels is not None:
            # What goes on in a sequence is no chance.
            state.labels.push(int.from_bytes(digest, "little"), counts=state.run <= max(run, 1))
        state.last, state.last_step = digest, step
        state.seen[digest] = step
        state.at[step] = digest
        state.order.append(step)
        if len(state.order) > _MEMORY:
            gone = state.order.popleft()
            old = state.at.pop(gone)
            if state.seen.get(old) == gone:
                del state.seen[old]
        if not self._repeats(state, step):
            state.epochs.good(step)
            state.restarts.good(step)
            return
        restarted = tuple(
            rank
            for rank, begins in sorted(window.begins.items())
            if any(state.previous < begin <= state.since for begin in begins[1:])
        )
        repeat = Repeat(
            distance=state.distance,
            earlier=state.earlier,
            restarted=restarted,
            length=state.run,
            ranks=tuple(int(r) for r in window.ranks),
        )
        watch, other = state.epochs, state.restarts
        if restarted:
            watch, other = other, watch
        episode = watch.bad(step, repeat, first_step=state.since)
        episode.facts.length = max(episode.facts.length, state.run)
        other.good(step)

    def _follow_stuck(
        self, window: Window, state: Order, step: int, *, same: bool, shared: bool
    ) -> None:
        """One and the same batch at all steps; labels are alike by chance, and are not asked."""
        if state.labels is not None:
            return
        if not same:
            state.alike, state.alike_since = 1, step
            state.stuck.good(step)
            return
        state.alike += 1
        if state.alike >= _STUCK:
            varied = state.judged > state.alike
            batches, stored, samples, tokens = _had(window, step)
            facts = Stuck(state.alike, varied, tuple(int(r) for r in window.ranks))
            known = state.stuck.bad(step, facts, first_step=state.alike_since).facts
            known.length = state.alike
            known.batches, known.stored = max(known.batches, batches), max(known.stored, stored)
            known.samples, known.shared = max(known.samples, samples), shared
            known.sequences |= tokens > samples

    def _repeats(self, state: Order, step: int) -> bool:
        """Whether enough batches repeat that it is no chance."""
        if state.labels is not None:
            return len(state.distinct) >= state.labels.needed()
        return state.run >= self.policy.run or (
            state.run >= self.policy.run - 1 and step - state.since >= self.policy.far
        )


def _had(window: Window, step: int) -> tuple[int, float, int, int]:
    """Batches of the loader, samples stored over those of a batch, these, and their tokens.

    The least of the ranks.

    0 where it is not known.
    """
    found = []
    for metric in ("loader_batches", "samples_stored", "samples", "tokens"):
        steps, rows = rank_rows(window, metric)
        at = int(np.searchsorted(steps, step))
        known = at < len(steps) and int(steps[at]) == step and not np.isnan(rows[at]).all()
        found.append(float(np.nanmin(rows[at])) if known else 0.0)
    batches, stored, samples, tokens = found
    return int(batches), stored / samples if samples > 0 else 0.0, int(samples), int(tokens)


def _common(one: int, other: int, far: int) -> int:
    """The distance that both are made of: the shorter one, if it fits into the other; else 0.

    Longer ones than the least are those of samples that lie whole epochs apart.
    """
    shorter, longer = min(one, other), max(one, other)
    if shorter == longer or (shorter >= far and longer % shorter == 0):
        return shorter
    return 0


def _check(window: Window, state: ReplayedState, watch: Watch[Repeat]) -> Check:
    seen = state.batches
    if not seen.judged:
        whose = if_several(len(window.ranks), "of all ranks")
        why = f"No step has the digests of the batches{whose}."
        return Check.missing(why, early="No batches have been seen yet.")
    if 2 * seen.constant > seen.judged:
        return Check.not_applicable("The batches are all the same: they have no order to repeat.")
    labels = state.labels.labels
    known = labels is not None and labels.count >= 2 * labels.needed()
    if watch is seen.epochs and state.visits.all_new and not known:
        return Check.insufficient(
            f"No sample came a second time in {count(seen.judged, 'checked step')}: no epoch has "
            "been repeated yet, or the inputs are augmented anew each time; and the labels, which "
            "stay as they are, are not known or too much alike to show an order."
        )
    return Check.ok(
        f"No sequence of batches came a second time in {count(seen.judged, 'checked step')}."
    )
