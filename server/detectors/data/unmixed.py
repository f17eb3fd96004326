"""Batches that are no random sample of the data: the targets in each are alike."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from rankscope.server.detectors.base import LASTS, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.data.batches import batch_digests
from rankscope.server.detectors.data.one_sided import OneSided
from rankscope.server.detectors.effects import EPISODE, Rule
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.statistics import BLOCK
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import count, number, percent
from rankscope.server.detectors.policy import Observations, Policy, Share
from rankscope.server.window import Check, Window

# Samples of which shares are kept.
_REMEMBERED = 512


@dataclass(frozen=True, slots=True)
class UnmixedPolicy(Policy):
    """Thresholds of `data.unmixed`.

    Attributes:
        size: number of samples whose median is judged.
        rare: targets of all classes but the most frequent one that are expected in the newest
            samples, half of `size` or more, whose mean is judged besides: of 30 there are no 7 or
            less by chance once in 10^7 times (Poisson).
        solved: mean of the last losses over that of the first ones, below which the model has
            learned the one class that all targets are of, and there was nothing else to learn.
            Where the classes are places in a batch (contrastive losses have the right one always
            first), no constant answer comes so far.
        share: scatter of a batch's targets as a share of that of all targets so far, below which it
            is reported. Random batches have 1, ten classes that follow each other in pairs 0.3, one
            class at a time almost 0.
    """

    size: Observations = 32
    rare: Observations = 30
    share: Share = 0.25
    solved: Share = 0.02


@dataclass(slots=True)
class UnmixedState:
    """What `data.unmixed` remembers: the newest shares, with their steps.

    Attributes:
        spread: entropy of the classes of all targets so far, in nats.
        first, last: losses; `solved` watches one class of all targets, from `begun` on.
        varied: there were targets of several classes.
        inputs: digest of the first batch of each row of the window; `other_inputs`: there were
            others. As long as there are none there is but one answer to learn.
    """

    recent: deque[tuple[int, float]]
    shares: deque[float]
    last: deque[float]
    judged: int = 0
    spread: float = 0.0
    first: list[float] = field(default_factory=list)
    begun: int = -1
    varied: bool = False
    inputs: dict[int, int] = field(default_factory=dict)
    other_inputs: bool = False
    solved: Watch[float] = field(default_factory=lambda: Watch(clear_after=32))
    one_sided: OneSided = field(default_factory=OneSided)
    watch: Watch[float] = field(default_factory=lambda: Watch(clear_after=32))


class Unmixed(Detector[UnmixedState]):
    """The targets of a batch are alike, while those of all batches so far are not.

    Data that are sorted by class and not shuffled, a loader that gives one file after the other, or
    one that has got stuck in a part of the data: each step forgets what the steps before taught.

    Statistic:
        The median of the last 32 `target_share` (mean over the ranks) is below 0.25: the entropy of
        the classes in a step is less than a quarter of that of the classes in all steps so far. So
        is the mean of the newest 16, or of so many that 30 targets of the rarer classes are
        expected in them: of two positives in a hundred most batches of 32 have none.
        Over after 32 steps without. Or all targets so far are of one class (a share of exactly 0 at
        every step), and the mean of the last 10 losses is below 0.02 of that of the first 10: that
        class is all that there was to learn. Or (key `rank`) all targets of a rank are of one class
        at 32 samples in a row at which those of the others have half of their scatter or more.

    Severity:
        Warning; info for one class where each rank has one and the same batch all the time, as
        with made-up data.

    Evidence:
        `target_share`; of one class `loss` (mean of the last 10) and `samples`; of a rank
        `observed`.

    Source:
        Of batches that are drawn at random the entropy is that of the data, less (classes - 1) /
        (2 N) for N targets (Miller & Madow 1955), which is corrected for.
    """

    kinds = ("data.unmixed",)

    effects = (
        Rule(
            root=("data.unmixed",),
            root_key="rank",
            consequence=("rank.loss_outlier", "rank.gradient_outlier", "accuracy.mismatch"),
            earliest=-EPISODE,
            why="a rank that has one class alone has another task than the others",
        ),
        Rule(
            root=("data.unmixed",),
            consequence=("loss.oscillating", "gradient.oscillating"),
            earliest=-EPISODE,
            same_ranks=False,
            why="each class that comes unlearns the one before",
        ),
        Rule(
            root=("data.unmixed",),
            consequence=("loss.diverging",),
            earliest=-EPISODE,
            latest=EPISODE,
            same_ranks=False,
            why="each class that comes unlearns the one before",
        ),
        # Which of them is named first depends on the length of an epoch. The order is the cause,
        # where it is known soon enough; else what the order makes is there already, and takes it.
        Rule(
            root=("data.unshuffled",),
            consequence=("data.unmixed",),
            earliest=-10 * EPISODE,
            same_ranks=False,
            why="data sorted by class that are not shuffled bring one class after the other",
        ),
        Rule(
            root=("data.unmixed",),
            consequence=("data.unshuffled",),
            earliest=-EPISODE,
            same_ranks=False,
            why="data sorted by class that are not shuffled come in that order in each epoch",
        ),
    )

    wants = (
        *("target_share", "target_deviance", "samples"),
        *("loss", "explained_deviance"),
    )

    policy: UnmixedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Samples that outweigh the others among those that the median is of."""
        return (Reach(self.wants[:1], self.policy.size // 2, LASTS),)

    def start(self) -> UnmixedState:
        """Nothing seen yet."""
        return UnmixedState(
            deque(maxlen=self.policy.size), deque(maxlen=_REMEMBERED), deque(maxlen=BLOCK)
        )

    def advance(self, window: Window, state: UnmixedState) -> Outcome:
        """Takes the shares step by step."""
        self._compare_inputs(window, state)
        state.one_sided.take(window)
        for step, row in together(window, *self.wants):
            if math.isfinite(row.get("loss", math.nan)):
                if len(state.first) < BLOCK:
                    state.first.append(row["loss"])
                state.last.append(row["loss"])
            if "target_share" not in row:
                continue
            state.judged += 1
            # Where a constant answer loses something, there have been several classes, though one
            # at a time.
            state.varied |= "explained_deviance" in row
            if self._one_class(step, row["target_share"], state):
                continue
            state.recent.append((step, row["target_share"]))
            state.shares.append(row["target_share"])
            shares = [share for _, share in state.recent]
            if row["target_share"] > 0 and "target_deviance" in row:
                state.spread = row["target_deviance"] / row["target_share"]
            if (
                len(shares) < self.policy.size
                or median(shares) >= self.policy.share
                or not self._alike(row.get("samples", math.inf) * len(window.ranks), state)
            ):
                state.watch.good(step)
                continue
            first = next(at for at, share in state.recent if share < self.policy.share)
            episode = state.watch.bad(step, median(shares), first_step=first)
            episode.facts = min(episode.facts, median(shares))
        findings = [_finding(e) for e in state.watch.take(window.last_step)]
        findings += [_one_class(e, state) for e in state.solved.take(window.last_step)]
        findings += state.one_sided.findings(window)
        return Outcome({"data.unmixed": self._check(state)}, tuple(findings))

    def _alike(self, samples: float, state: UnmixedState) -> bool:
        """Whether batches drawn at random would have shown other targets by now.

        Args:
            samples: of a step, on all ranks.
        """
        policy = self.policy
        # Where a share m of the targets is of the rarer of two classes, m > 0.001, the entropy is
        # less than 8 m.
        expected = state.spread / 8 * samples
        enough = policy.size // 2
        # Where several classes never met in a step their entropy is not known, nor needed; and a
        # rank that counts no samples says nothing of how many targets it has.
        if expected > 0:
            enough = max(enough, math.ceil(policy.rare / expected))
        newest = list(state.shares)[-enough:]
        return len(newest) == enough and fmean(newest) < policy.share

    @staticmethod
    def _compare_inputs(window: Window, state: UnmixedState) -> None:
        digests = batch_digests(window)
        if digests is None or state.varied or state.other_inputs:
            return
        for row in range(len(window.ranks)):
            for digest in digests.values[row, digests.present[row]].tolist():
                if digest != state.inputs.setdefault(row, digest):
                    state.other_inputs = True

    def _one_class(self, step: int, share: float, state: UnmixedState) -> bool:
        """Whether all targets so far are of one class."""
        if state.varied or share > 0:
            state.varied = True
            state.solved.good(step)
            return False
        state.begun = step if state.begun < 0 else state.begun
        enough = state.judged >= self.policy.size and len(state.last) == BLOCK
        if enough and fmean(state.last) < self.policy.solved * fmean(state.first):
            now = fmean(state.last)
            state.solved.bad(step, now, first_step=state.begun).facts = now
        return True

    def _check(self, state: UnmixedState) -> Check:
        if not state.judged:
            why = "No loss over classes was seen, so nothing shows how alike targets are."
            return Check.missing(why)
        if state.judged < self.policy.size:
            return too_few(state.judged, "sampled step", self.policy.size)
        if not state.varied:
            why = "All targets are of one class, and the loss still has something to learn of them."
            return Check.not_applicable(why)
        share = percent(median([share for _, share in state.recent]))
        return Check.ok(f"The targets of a step have {share} of the scatter of all so far.")


def _finding(episode: Episode[float]) -> Finding:
    step = episode.first_step
    return episode.finding(
        kind="data.unmixed",
        severity="warning",
        title=f"The targets of a batch are alike since step {step}",
        stage="batch",
        cause=(
            f"The classes in a step have {percent(episode.facts)} of the entropy of those in all "
            "steps so far; batches that are drawn at random have 100 %. The data are sorted and "
            "not shuffled, come from one source at a time, or the loader has got stuck in a part "
            "of them: the model learns one class after the other and forgets those before."
        ),
        remedy=(
            "Shuffle (`shuffle=True`, a shuffle buffer larger than a class or file), and look at "
            f"the labels of the batches from step {step} on. Nothing, if classes are meant to "
            "follow each other (continual learning)."
        ),
        evidence={"target_share": episode.facts},
    )


def _one_class(episode: Episode[float], state: UnmixedState) -> Finding:
    seen = count(state.judged, "checked step")
    return episode.finding(
        kind="data.unmixed",
        key="one class",
        severity="info" if state.inputs and not state.other_inputs else "warning",
        title="Every target is of one and the same class",
        stage="batch",
        cause=(
            f"At all of {seen} every target was of the same class, and the loss has fallen to "
            f"{number(episode.facts)}: an answer that is always this class is right, and the model "
            "learns nothing of its inputs. Usual causes: labels that are read or computed wrongly "
            "(a column that is constant, a wrong cast, a default value), data that are sorted by "
            "class and not shuffled, a filter that leaves one class over."
        ),
        remedy=(
            "Count the classes of the data set and of some batches, and look at what lies between "
            "them: the data set's labels, its transforms, the collate function."
        ),
        evidence={"target_share": 0.0, "loss": episode.facts, "samples": state.judged},
    )
