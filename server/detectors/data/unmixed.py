"""Batches that are no random sample of the data: the targets in each are alike."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

from rankscope.server.detectors.base import LASTS, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.policy import Observations, Policy, Share
from rankscope.server.detectors.walking import median, together
from rankscope.server.detectors.wording import count, percent
from rankscope.server.window import Check, Status, Window


@dataclass(frozen=True, slots=True)
class UnmixedPolicy(Policy):
    """Thresholds of `data.unmixed`.

    Attributes:
        size: samples that the median is of.
        share: of the scatter of all targets so far. Of random batches it is 1, of tasks of two
            classes that follow each other, of ten classes, 0.3: what is drawn from one class at a
            time has almost nothing of it.
    """

    size: Observations = 32
    share: Share = 0.25


@dataclass(slots=True)
class UnmixedState:
    """What `data.unmixed` remembers: the newest shares, with their steps."""

    recent: deque[tuple[int, float]]
    judged: int = 0
    watch: Watch[float] = field(default_factory=lambda: Watch(clear_after=32))


class Unmixed(Detector[UnmixedState]):
    """The targets of a batch are alike, while those of all batches so far are not.

    Data that are sorted by class and not shuffled, a loader that gives one file after the other, or
    one that has got stuck in a part of the data: each step forgets what the steps before taught.

    Statistic:
        The median of the last 32 `target_share` (mean over the ranks) is below 0.25: the entropy of
        the classes in a step is less than a quarter of that of the classes in all steps so far.
        Over after 32 steps without.

    Severity:
        Warning.

    Evidence:
        `target_share`.

    Source:
        Of batches that are drawn at random the entropy is that of the data, less (classes - 1) /
        (2 N) for N targets (Miller & Madow 1955), which is corrected for.
    """

    kinds: ClassVar[tuple[str, ...]] = ("data.unmixed",)
    policies: ClassVar[type[Policy]] = UnmixedPolicy
    wants: ClassVar[tuple[str, ...]] = ("target_share",)

    policy: UnmixedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Samples that outweigh the others among those that the median is of."""
        return (Reach(self.wants, self.policy.size // 2, LASTS),)

    def start(self) -> UnmixedState:
        """Nothing seen yet."""
        return UnmixedState(deque(maxlen=self.policy.size))

    def advance(self, window: Window, state: UnmixedState) -> Outcome:
        """Takes the shares step by step."""
        for step, row in together(window, *self.wants):
            state.judged += 1
            state.recent.append((step, row["target_share"]))
            shares = [share for _, share in state.recent]
            if len(shares) < self.policy.size or median(shares) >= self.policy.share:
                state.watch.good(step)
                continue
            first = next(at for at, share in state.recent if share < self.policy.share)
            episode = state.watch.bad(step, median(shares), first_step=first)
            episode.facts = min(episode.facts, median(shares))
        findings = tuple(_finding(e) for e in state.watch.take(window.last_step))
        return Outcome({"data.unmixed": self._check(window, state)}, findings)

    def _check(self, window: Window, state: UnmixedState) -> Check:
        episode = state.watch.open(window.last_step)
        if episode is not None:
            return Check(Status.OPEN, f"{_finding(episode).title}.")
        if not state.judged:
            why = "No loss over classes was seen, so nothing shows how alike targets are."
            return Check(Status.MISSING_INPUT, why)
        if state.judged < self.policy.size:
            why = f"{count(state.judged, 'sampled step')} of {self.policy.size} needed."
            return Check(Status.INSUFFICIENT_DATA, why)
        share = percent(median([share for _, share in state.recent]))
        return Check(Status.OK, f"The targets of a step have {share} of the scatter of all so far.")


def _finding(episode: Episode[float]) -> Finding:
    step = episode.first_step
    return Finding(
        kind="data.unmixed",
        severity="warning",
        title=f"The targets of a batch are alike since step {step}",
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=step,
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
        clear_after=episode.clear_after,
        evidence={"target_share": episode.facts},
    )
