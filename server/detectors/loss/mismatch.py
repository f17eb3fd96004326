"""Loss functions that are given something else than they are made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.effects import EPISODE, Rule
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import rows_by_step
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import count, number, percent, ranks
from rankscope.server.detectors.policy import Observations, Policy
from rankscope.server.detectors.profiles import TURNS
from rankscope.server.window import Bool, Check, Window

# From here on the label itself is the smaller part of what is asked for; 0.1 is usual.
_SMOOTHED = 0.5

# Series -> the value that is as it should be.
_RIGHT: Mapping[str, float] = {
    "loss_broadcast": 1.0,
    "scores_softmaxed": 0.0,
    "scores_unnormalised": 0.0,
    "scores_positive": 0.0,
    "labels_outside": 0.0,
    "loss_negated": 0.0,
    "loss_subtracted": 0.0,
    "targets_blank": 0.0,
    "next_token_distance": 1.0,
    "label_smoothing": _SMOOTHED,
}
# Where a loss is known at all, by which it is seen whether all ranks have the same one.
_LOSS = "loss"


@dataclass(frozen=True, slots=True)
class InputsPolicy(Policy):
    """Thresholds of `loss.mismatch`.

    Attributes:
        in_a_row: consecutive samples at which the loss was given the wrong thing. What a program
            does it does every time; one sample may be of a batch of one, or of another loss.
    """

    in_a_row: Observations = 8


@dataclass(slots=True)
class Given:
    """What was seen of one series: its value, at consecutive samples since a step.

    Attributes:
        ranks: that had a wrong one at any of these: not all of them post every sample.
    """

    since: int = -1
    ranks: frozenset[int] = frozenset()
    run: int = 0
    value: float = 0.0
    judged: int = 0
    watch: Watch[float] = field(default_factory=lambda: Watch(clear_after=8))


@dataclass(slots=True)
class InputsState:
    """What `loss.mismatch` remembers, by series, and whether optimizers step in turns."""

    given: dict[str, Given] = field(default_factory=lambda: {name: Given() for name in _RIGHT})
    turns: bool = False
    ranks: frozenset[int] = frozenset()  # that compute a loss


class LossInputs(Detector[InputsState]):
    """The loss function is given scores of the wrong kind, or shapes that do not match.

    It computes a number all the same, which falls, and the training learns slowly or something
    else: a softmax before `cross_entropy`, which takes it once more, leaves a loss that cannot come
    near 0 and gradients that vanish where an answer is wrong; probabilities in place of their
    logarithms make `nll_loss` and `kl_div` losses without a floor; outputs of the shape [N, 1] and
    targets of the shape [N] make N x N differences, and the best answer is then the mean of all
    targets; with labels of -1 and 1, or of images that were normalised, a binary cross entropy has
    no floor; and the negative of an error never has one, nor has a sum from which a loss is taken
    away; a smoothing of the labels above a half leaves hardly anything to learn; and labels that
    the program shifts and the model shifts once more ask for the token after the next.

    Statistic:
        At 8 consecutive samples `scores_softmaxed`, `scores_unnormalised`, `scores_positive`,
        `labels_outside`, `loss_negated`, `loss_subtracted` or `targets_blank` above 0, or
        `loss_broadcast` or `next_token_distance` above 1, or `label_smoothing` above 0.5, on any
        rank. Over after 8 steps without.

    Severity:
        Warning; info for a loss that is taken away where another optimizer of the process steps in
        turns with this one: the players of a game undo what the other one learns.

    Evidence:
        `series` and `value` (its mean over the ranks), `samples` (consecutive ones).

    Source:
        The warnings in the documentation of these functions; torch's own warning of
        target sizes that differ, which is given once and not at all by losses written by hand.
    """

    kinds = ("loss.mismatch",)
    wants = (*_RIGHT, _LOSS)
    effects = (
        Rule(
            root=("loss.mismatch",),
            consequence=("rank.loss_outlier", "rank.gradient_outlier", "accuracy.mismatch"),
            earliest=-EPISODE,
            why="what a rank's loss asks for is something else",
        ),
    )

    policy: InputsPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Samples of any of them: a run has the losses of one sort or the other."""
        return (Reach(tuple(_RIGHT), self.policy.in_a_row, TO_THE_END),)

    def advance(self, window: Window, state: InputsState) -> Outcome:
        """Goes through the samples step by step."""
        state.turns |= any(event.kind == TURNS for event in window.events)
        rows = {name: rows_by_step(window, name) for name in self.wants}
        for step in sorted(set().union(*rows.values())):
            for name in self.wants:
                row = rows[name].get(step)
                if row is None:
                    continue
                there = np.isfinite(row)
                if name == _LOSS:
                    state.ranks |= _named(window, there)
                elif there.any():
                    wrong = _named(window, there & (row > _RIGHT[name]))
                    self._take(step, float(row[there].mean()), wrong, state.given[name])
        findings = tuple(
            _finding(name, e, given, turns=state.turns, of=state.ranks)
            for name, given in state.given.items()
            for e in given.watch.take(window.last_step)
        )
        return Outcome({"loss.mismatch": self._check(state)}, findings)

    def _take(self, step: int, value: float, wrong: frozenset[int], given: Given) -> None:
        given.judged += 1
        if not wrong:
            given.run = 0
            given.watch.good(step)
            return
        given.ranks = given.ranks | wrong if given.run else wrong
        given.since = given.since if given.run else step
        given.run, given.value = given.run + 1, value
        if given.run >= self.policy.in_a_row:
            given.watch.bad(step, value, first_step=given.since).facts = value

    def _check(self, state: InputsState) -> Check:
        judged = max(given.judged for given in state.given.values())
        if not judged:
            why = "No loss function of torch's was seen whose scores or shapes can be checked."
            return Check.missing(why)
        if judged < self.policy.in_a_row:
            return too_few(judged, "sampled loss", self.policy.in_a_row)
        return Check.ok(f"Scores and shapes were right at {count(judged, 'sampled step')}.")


def _named(window: Window, which: Bool) -> frozenset[int]:
    """Ranks of a row, bool [R]."""
    return frozenset(window.ranks[which].tolist())


def _finding(
    name: str, episode: Episode[float], given: Given, *, turns: bool, of: frozenset[int]
) -> Finding:
    # A rank that computes none of its own is another stage of a pipeline.
    who = tuple(sorted(given.ranks)) if given.ranks < of else ()
    if name == "loss_broadcast":
        title = f"The loss compares each output with {number(episode.facts)} targets"
        cause = (
            "Outputs and targets have shapes of different length, such as [N, 1] and [N], and are "
            f"broadcast against each other: {number(episode.facts)} times as many differences are "
            "taken as there are elements. Each output is drawn to the mean of all targets, so the "
            "model learns almost nothing from the inputs."
        )
        remedy = "Give both one shape: `outputs.squeeze(-1)`, or `targets.unsqueeze(-1)`."
    elif name == "scores_softmaxed":
        title = "The loss function is given probabilities where it takes scores"
        cause = (
            "`cross_entropy` takes the softmax itself (`binary_cross_entropy_with_logits` the "
            "sigmoid; before `nll_loss`, `log_softmax` does), and what it is given has one behind "
            "it already: all numbers lie between 0 and 1 and those of a sample sum to 1. Taken "
            "twice it flattens every answer, so that the loss cannot come near 0 and the gradient "
            "is small where an answer is wrong."
        )
        remedy = (
            "Return the scores from the model and take the softmax (sigmoid) in evaluation only; "
            "or keep it and take `nll_loss` of the logarithm (`binary_cross_entropy`)."
        )
    elif name == "scores_positive":
        title = "`kl_div` is not given logarithms of probabilities"
        cause = (
            "Its first argument is the logarithm of what the model thinks likely, which is never "
            "above 0; here no number is below 0: these are the probabilities themselves. The loss "
            "falls below 0 then, and is lowest where all of it is given to one answer, whatever "
            "the targets say."
        )
        remedy = (
            "Take `log_softmax` of the scores before (`log_target=True` where the targets are "
            "logarithms, too), and mind the order: the model's comes first."
        )
    elif name == "loss_negated":
        title = "The loss is the negative of an error, which it makes as large as it can"
        cause = (
            "The backward pass begins at the negative of a mean or sum of squared or absolute "
            "differences. An error is never below 0 and has no largest value, so its negative has "
            "no floor: the outputs are driven away from the targets."
        )
        remedy = (
            "Take the minus sign away. A score that is to be maximised (a return, a likelihood) is "
            "negated, an error is not. Nothing, if the outputs are meant to leave the targets."
        )
    elif name == "loss_subtracted":
        title = "A loss with targets of its own is taken away from the sum that is minimised"
        cause = (
            "In the sum that the backward pass begins from, a cross entropy or an error counts "
            "with a minus sign: the answers are driven away from its targets, and it has no "
            "largest value. The other terms may hide that: the sum falls."
        )
        remedy = (
            "Look at the sign, and at the sign of the weight, of each term of the loss, and log "
            "them one by one. Nothing, if it is meant, as of a discriminator that is to be misled, "
            "or of data that are to be unlearned."
        )
    elif name == "next_token_distance":
        places = number(episode.facts)
        title = f"The targets are the tokens {places} places on, and not the next ones"
        cause = (
            f"At each place the model is asked for the token {places} places later: labels that "
            "are shifted where the batch is made, and once more within the model or its loss, "
            "which shift them by themselves. The loss falls, to more than the next token costs, "
            "and what the model generates skips every token that it was not asked for."
        )
        remedy = (
            "Shift once: give a model that shifts by itself (`labels=input_ids`) labels that are "
            "not, or take the shift out of the loss. Nothing, if the token after the next is meant."
        )
    elif name == "label_smoothing":
        share = percent(episode.facts)
        title = f"The labels are smoothed by {share}"
        cause = (
            f"`label_smoothing` of `cross_entropy` spreads {share} of each target over all "
            "classes alike: what is asked for is hardly an answer any more. The loss cannot come "
            "far below that of guessing, and the gradients of what distinguishes the classes are "
            "as much smaller."
        )
        remedy = (
            "It is the share that is taken from the label, not the one left to it; 0.1 is usual."
        )
    elif name == "targets_blank":
        title = "Targets of `ctc_loss` hold the blank"
        cause = (
            "The blank stands for no symbol at all: a target that holds it asks for something that "
            "no output can mean. The loss may fall below 0, and decoding drops these symbols."
        )
        remedy = (
            "Number the symbols from 1 where the blank is 0, or give `ctc_loss` another `blank`: "
            "the number of symbols, as the last of the outputs."
        )
    elif name == "labels_outside":
        title = "A binary cross entropy is given labels below 0 or above 1"
        cause = (
            "Its labels are probabilities. With others, such as -1, counts, or images that were "
            "normalised, the loss has no floor: it falls, below 0, by making the scores larger, "
            "and no answer is the right one."
        )
        remedy = (
            "Bring the labels to 0 and 1 (`(y + 1) / 2`; pixels divided by their largest value, "
            "not normalised), or take a loss for numbers (`mse_loss`)."
        )
    else:
        title = "`nll_loss` is not given logarithms of probabilities"
        cause = (
            "Their exponentials do not sum to 1 for each sample: the model returns scores or "
            "probabilities. The loss has no floor then: it falls by making one number larger."
        )
        remedy = "Take `log_softmax` of the scores before, or `cross_entropy`, which does."
    return episode.finding(
        kind="loss.mismatch",
        key=name,
        severity="info" if name == "loss_subtracted" and turns else "warning",
        title=title if not who else f"{title} (on {ranks(who)})",
        ranks=who,
        cause=cause if not who else f"On {ranks(who)} alone: {cause}",
        remedy=remedy,
        evidence={"series": name, "value": episode.facts, "samples": given.run},
    )
