"""Targets that the model is given together with its inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.data import leaked_targets
from rankscope.server.detectors.data.leaked_targets import SamePlace, TargetColumn
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import together
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.detectors.policy import Number, Observations, Policy, Share
from rankscope.server.window import Check, Status, Window

_SEEN, _UNSEEN = "next_token_seen", "next_token_unseen"


@dataclass(frozen=True, slots=True)
class LeakedPolicy(Policy):
    """Thresholds of `data.leaked`.

    Attributes:
        recent: consecutive samples that have to find it: means over about as many are posted.
        share: mean cross entropy at the worst of the places whose target is in the input, over that
            at the last place, whose target is not, below which the one is known from the input. A
            model that does not look ahead errs by as much at both.
        margin: smallest difference of both, in nats: what is memorised is near 0 everywhere.
    """

    recent: Observations = 16
    share: Share = 0.85
    margin: Number = 0.3


@dataclass(frozen=True, slots=True)
class Ahead:
    """What was seen.

    Attributes:
        seen, unseen: mean cross entropies, in nats, where the target is in the input and where not.
        samples: how many there were so far.
    """

    seen: float
    unseen: float
    samples: int


@dataclass(slots=True)
class LeakedState:
    """What `data.leaked` remembers.

    Attributes:
        first_step: of the first sample; `judged`: how many there were; `others`: of other targets.
        in_a_row: consecutive samples that found it.
        same: the same of the target of a place in the input at that very place.
        column: of tables, a column that is the target.
    """

    first_step: int = -1
    judged: int = 0
    in_a_row: int = 0
    others: int = 0
    watch: Watch[Ahead] = field(default_factory=lambda: Watch(clear_after=8))
    same: SamePlace = field(default_factory=SamePlace)
    column: TargetColumn = field(default_factory=TargetColumn)


class TargetsLeaked(Detector[LeakedState]):
    """The model is given what it is to predict, and learns to copy it.

    Attention without a causal mask, or with one that is shifted, a convolution that is padded on
    both sides, a bidirectional layer: each place sees the ones after it, whose inputs are its
    targets. Or targets that were not shifted against the inputs, a decoder that gets its own
    targets, a column of a table that is the label. The loss falls lower than it can, in evaluations
    too, and the model is of no use where the answers do not exist yet.

    Statistic:
        Of sequences whose targets are their inputs one place on (checked token by token), the last
        place's target is the only one that the input does not hold. At 16 consecutive samples the
        mean cross entropy at the worst of 64 other places lies below 85 % of that at the last one,
        by more than 0.3 nats (means over the sequences of 16 samples). Over after 8 steps without.
        Where an input is the target token by token, and no other one that of the place before: the
        mean cross entropy of 16 consecutive samples, and that at the first place, which a model
        that shifts by itself does not know, lie below half of what the tokens' frequencies cost. Of
        tables: the squared correlation of one and the same column with the target is above
        1 - 1e-6 on all ranks at 16 consecutive samples.

    Severity:
        Warning.

    Evidence:
        `seen` (mean cross entropy, in nats, at the worst of the places whose targets are in the
        input), `unseen` (at the last place), `samples`; of the same place `error`, `first` (at the
        first place), `constant` (by the frequencies); of tables `column`, counted from 0.

    Source:
        The last place as control of the others: without a look ahead it has the most context of
        all, and errs no more than they do.
    """

    kinds: ClassVar[tuple[str, ...]] = ("data.leaked",)
    policies: ClassVar[type[Policy]] = LeakedPolicy
    wants: ClassVar[tuple[str, ...]] = (
        *(_SEEN, _UNSEEN),
        *(leaked_targets.ERROR, leaked_targets.FIRST, leaked_targets.EXPLAINED),
        leaked_targets.COLUMN,
    )

    policy: LeakedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Samples of next tokens."""
        return (
            Reach((_SEEN, _UNSEEN), self.policy.recent, TO_THE_END),
            Reach((leaked_targets.ERROR,), self.policy.recent, TO_THE_END),
            Reach((leaked_targets.COLUMN,), self.policy.recent, TO_THE_END),
        )

    def start(self) -> LeakedState:
        """Nothing seen yet."""
        return LeakedState()

    def advance(self, window: Window, state: LeakedState) -> Outcome:
        """Goes through the samples."""
        state.same.take(window)
        state.column.take(window)
        for step, row in together(window, _SEEN, _UNSEEN):
            if not (row.get(_SEEN, -1.0) >= 0 and row.get(_UNSEEN, -1.0) >= 0):
                state.others += 1
                continue
            if state.first_step < 0:
                state.first_step = step
            state.judged += 1
            facts = Ahead(row[_SEEN], row[_UNSEEN], state.judged)
            policy = self.policy
            apart = facts.unseen - facts.seen
            if facts.seen >= policy.share * facts.unseen or apart <= policy.margin:
                state.in_a_row = 0
                state.watch.good(step)
                continue
            state.in_a_row += 1
            if state.in_a_row >= policy.recent:
                # What a model may look at does not change in a run; it learns by and by to use it.
                state.watch.bad(step, facts, first_step=state.first_step).facts = facts
        findings = [_finding(e) for e in state.watch.take(window.last_step)]
        findings += [*state.same.findings(window), *state.column.findings(window)]
        return Outcome({"data.leaked": self._check(window, state)}, tuple(findings))

    def _check(self, window: Window, state: LeakedState) -> Check:
        step, recent = window.last_step, self.policy.recent
        episode = state.watch.open(step)
        titles = [
            "" if episode is None else _finding(episode).title,
            state.same.title(step),
            state.column.title(step),
        ]
        for title in filter(None, titles):
            return Check(Status.OPEN, f"{title}.")
        judged = {
            "places knew the token after them": state.judged,
            "places knew their own target": state.same.judged,
            "a column was the target": state.column.judged,
        }
        most = max(judged, key=lambda what: judged[what])
        if judged[most] >= recent:
            why = (
                f"At {count(judged[most], 'sample')} there were no {recent} in a row where {most}."
            )
            return Check(Status.OK, why)
        if not judged[most]:
            why = (
                "No cross entropy was seen whose targets are among the inputs, and no table with "
                "one target a row."
            )
            return Check(Status.NOT_APPLICABLE if state.others else Status.MISSING_INPUT, why)
        why = f"{count(judged[most], 'sample')} of {recent} needed."
        return Check(Status.INSUFFICIENT_DATA, why)


def _finding(episode: Episode[Ahead]) -> Finding:
    facts = episode.facts
    return episode.finding(
        kind="data.leaked",
        severity="warning",
        title="The model sees the tokens that it is to predict",
        cause=(
            "The targets are the inputs, one place on. At the last place of a sequence, whose "
            f"target is not among its inputs, the mean cross entropy is {number(facts.unseen)}; "
            f"wherever the target is among them it is {number(facts.seen)} or less. So places "
            "see the ones after them, and copy: the loss says nothing of how well the next token "
            "is predicted. Sequences that all end in what is hardest to predict, such as a random "
            "number after a fixed text, look the same."
        ),
        remedy=(
            "Look for what lets a place see later ones: attention without a causal mask "
            "(`is_causal=True`) or with a mask that is shifted, inverted or not passed on, a "
            "convolution padded on both sides, a bidirectional layer, a normalisation over the "
            "places. Change the input at one place and see which outputs before it change."
        ),
        evidence={"seen": facts.seen, "unseen": facts.unseen, "samples": facts.samples},
    )
