"""A loss that stays where it is: what is known of it, its cause and its remedy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.wording import count, number, percent

if TYPE_CHECKING:
    from rankscope.server.detectors.loss.plateau_policy import PlateauPolicy

# Scatter of a step's targets over that of all before, from which on it is no chance: of 64 targets
# it errs by some hundredths.
_WIDER = 1.25
# Spread of the directions of the outputs of a batch (1 less the square of their mean's length) up
# to which rounding made it: two steps of 32-bit numbers below 1.
_SAME_OUTPUTS = 1.3e-7


@dataclass(slots=True)
class Flat:
    """What was seen.

    Attributes:
        explained: share of the deviance explained by the last answers; NaN where it is not known.
        least: that share, less the errors that it may have; NaN where it is not known.
        knew: the largest share that ten losses before had; `lost_at`, -1 where nothing was known:
            since which step it is gone.
        nothing: the answers are not better than one that is always the same.
        rash: updates have been so large from the start that little could be learned.
        worse: the answers are far worse than one that is always the same.
        scale: size of the outputs over that of the targets, in the first steps; NaN where it is not
            known.
        inputs, inputs_first: root mean square of the inputs, the latest and the first ones; NaN
            where it is not known.
        inputs_spread, outputs_spread: of the samples of a batch: of the inputs, as a share of their
            size, and of the directions of the outputs; NaN where it is not known.
        nears: the answers are far worse than that, and become better.
        guessed: among how many answers guessing costs as much; 0 where that is not so.
        short: there are too few losses to be sure of more than that.
        path: all steps so far together, relative to the parameters; NaN where it is not known.
        steps: how many losses there were.
        turns: optimizers step in turns.
        resumed: the run began at a later step, with a model that may have learned all there is.
        overcome: the model has begun to learn since, of data that it had not seen often.
    """

    first: float
    last: float
    error: float
    accuracy: float
    update: float
    norm: float
    norm_first: float
    rate: float
    explained: float = math.nan
    least: float = math.nan
    knew: float = math.nan
    lost_at: int = -1
    nothing: bool = False
    rash: bool = False
    worse: bool = False
    scale: float = math.nan
    inputs: float = math.nan
    inputs_first: float = math.nan
    inputs_spread: float = math.nan
    outputs_spread: float = math.nan
    nears: bool = False
    guessed: int = 0
    short: bool = False
    path: float = math.nan
    steps: int = 0
    turns: bool = False
    resumed: bool = False
    overcome: bool = False

    @property
    def gain(self) -> float:
        """Share of the first loss that was gained."""
        return (self.first - self.last) / abs(self.first) if self.first else 0.0

    def certain(self, policy: PlateauPolicy) -> bool:
        """Whether something beside the loss says that it should have moved."""
        if self.short or self.unlearns(policy) or self.young(policy):
            return False
        # What guessing costs is no proof: a loss of another unit may be there by chance.
        if self.nothing or self.rash or self.worse or self.vanished(policy):
            return not self.got_over(policy)
        if math.isnan(self.accuracy):
            return self.update < policy.small_update or self.stands(policy)
        # A high share of right answers is that of one class where nothing else is explained.
        low = self.accuracy <= policy.learned or self.least <= policy.explained
        return low and not self.got_over(policy)

    def stands(self, policy: PlateauPolicy) -> bool:
        """Whether the loss of one optimizer is where it began after many steps of a usual size."""
        unknown = math.isnan(self.explained) and not (self.turns or self.resumed)
        still = self.steps >= policy.stands and abs(self.gain) <= policy.stands_gain
        return unknown and still and self.path >= policy.stands_path

    def young(self, policy: PlateauPolicy) -> bool:
        """Whether the model has learned frequencies, and not moved far enough yet for more."""
        wrong = self.rash or self.worse or self.lost_at >= 0 or self.vanished(policy)
        wrong |= self.update < policy.small_update or self.steps > policy.grown
        begun = self.nothing and self.gain > policy.min_gain
        return begun and not wrong and self.path < policy.young

    def vanished(self, policy: PlateauPolicy) -> bool:
        """Whether the loss is where it began, and the gradient that was there is gone."""
        gone = self.norm < policy.vanished * self.norm_first
        return gone and self.gain <= policy.min_gain and not self.accuracy > policy.learned

    def unlearns(self, policy: PlateauPolicy) -> bool:
        """Whether nothing is wrong but the size of the first outputs, which becomes smaller."""
        data = self.scale < policy.scale or self.inputs > policy.large_inputs
        return self.nears and not (data or self.nothing or self.rash or self.lost_at >= 0)

    def got_over(self, policy: PlateauPolicy) -> bool:
        """Whether it was the plateau at the beginning of a training that learns.

        Not where something else was wrong meanwhile: what was known before was lost, steps were too
        large or too small, targets were not scaled.
        """
        wrong = self.rash or self.worse or self.lost_at >= 0 or self.update > 3 * policy.rash
        return self.overcome and not wrong and not self.update < policy.small_update


def explained_now(row: dict[str, float]) -> float:
    """The share of the deviance explained at a step; NaN where it is not known.

    Where the targets scatter more than all before, as when further classes come in, against the
    best constant answer to them alone.
    """
    explained, scatter = row.get("explained_deviance", math.nan), row.get("target_share", 1.0)
    return 1 - (1 - explained) / scatter if scatter > _WIDER else explained


def nothing_of(facts: Flat) -> str:
    """What the answers are worth, as a clause."""
    if facts.worse:
        return "the same answer to every input would do better"
    if facts.nothing:
        return "the same answer to every input would do as well"
    if facts.guessed:
        return f"guessing among {facts.guessed:,} answers costs as much"
    return f"only {percent(facts.explained)} of the deviance is explained"


def cause_and_remedy(facts: Flat, policy: PlateauPolicy) -> tuple[str, str]:
    """Cause and remedy, the likeliest by what the other signals say."""
    moved = f"The loss came from {number(facts.first)} to {number(facts.last)}"
    if facts.got_over(policy):
        return (
            f"{moved}, and stood there until the model found out how the targets follow from the "
            "inputs. Many trainings begin with such a plateau: long dependences, groups of inputs "
            "that say something only together, weights that begin near a saddle.",
            "Nothing, if it does not take too long. Another initialisation, a warm-up to a higher "
            "learning rate, or easier samples first (a curriculum) shorten it.",
        )
    if facts.lost_at >= 0:
        return (
            f"Up to step {facts.lost_at} the model explained up to {percent(facts.knew)} of the "
            "deviance (1 - loss / loss of the best constant answer), since then nothing: its "
            "answers no longer depend on the inputs. What it had learned was destroyed by steps "
            "that were too large, or inputs and targets do not belong together any more.",
            f"Restart from a checkpoint before step {facts.lost_at} with a third of the learning "
            f"rate{f' ({number(facts.rate / 3)})' if facts.rate > 0 else ''} and gradients that "
            "are clipped; if it comes again at the same step, look at the data from there on.",
        )
    if facts.inputs_spread == 0:
        size = (
            f", with a root mean square of {number(facts.inputs)}"
            if math.isfinite(facts.inputs)
            else ""
        )
        return (
            f"{moved}. In all numbers that were compared, up to 64 from all over each sample, the "
            f"inputs of a batch are one and the same{size}: hardly anything in them tells one "
            "sample from another. They were read, decoded, masked or scaled to a constant, or "
            "features that are constant were chosen.",
            "Print some inputs as the model gets them, and follow them back through transforms and "
            "loader to where they become the same.",
        )
    if facts.outputs_spread <= _SAME_OUTPUTS and not math.isnan(facts.accuracy):
        return (
            f"{moved}. The scores of all samples of a batch have one and the same direction, to "
            "the last digits, while their inputs differ: the way from the inputs to the answers is "
            "cut. Possibly the last layer's weights are 0, or frozen while its bias is trained; "
            "all units before it are dead or saturated; or a mask leaves nothing.",
            "Follow two different inputs through the layers, and see where they begin to give the "
            "same. Look at the weights there, and at which of them require a gradient.",
        )
    if facts.worse and facts.scale < policy.scale:
        return (
            f"{moved}, {number(1 - facts.explained)} times what the mean of all targets would "
            f"cost: in the first steps the outputs were {number(facts.scale)} of the targets' size "
            "(root mean squares). The targets are not scaled, and the training is spent on "
            "reaching their mean.",
            "Subtract the mean of the training targets and divide by their standard deviation (and "
            "undo it in evaluation), or begin with the last layer's bias at their mean.",
        )
    if facts.worse and facts.inputs > policy.large_inputs:
        return (
            f"{moved}, {number(1 - facts.explained)} times what the best constant answer would "
            f"cost. The inputs have a root mean square of {number(facts.inputs)}, where networks "
            "are initialised for 1: they are not scaled, and the training is spent on shrinking "
            "what comes of them.",
            "Bring the inputs to mean 0 and standard deviation 1, with numbers from the training "
            "data (`transforms.Normalize`, `StandardScaler`), or put a normalisation first.",
        )
    if facts.unlearns(policy):
        return (
            f"{moved}, {number(1 - facts.explained)} times what the best constant answer would "
            "cost, and falls: the training has been spent so far on shrinking the first outputs"
            + (
                f", which were {number(facts.scale)} times as large as the targets."
                if math.isfinite(facts.scale)
                else "."
            ),
            "Nothing, if there is time. Smaller initial weights (embeddings of standard deviation "
            "0.01 to 0.1, a last layer of zeros) begin where this training will come to.",
        )
    if facts.rash or (facts.nothing and facts.update > 3 * policy.rash):
        return (
            f"{moved} and does not fall any more, though {nothing_of(facts)}. A step changes the "
            f"parameters by {number(facts.update)} of their size, where 1e-3 is usual: the "
            "learning rate has been too high from the start, without a warm-up.",
            f"Train anew with a learning rate of {number(facts.rate / 30)}, a thirtieth, and a "
            "warm-up of some hundred steps."
            if facts.rate > 0
            else "Train anew with a thirtieth of the learning rate and a warm-up.",
        )
    if facts.update == 0 and facts.norm > 0:
        return (
            f"{moved}: the steps change no parameter although there is a gradient of "
            f"{number(facts.norm)}. The optimizer holds other parameters than the model trains "
            "with (made before the model was moved, wrapped or copied), or its rate is 0.",
            "Make the optimizer from `model.parameters()` after the model is on its device and "
            "wrapped, and compare their ids.",
        )
    if facts.update < policy.small_update:
        raised = (
            f" from {number(facts.rate)} to {number(facts.rate * 1e-3 / facts.update)}"
            if facts.rate > 0 and facts.update > 0
            else ""
        )
        return (
            f"{moved}: a step changes the parameters by {number(facts.update)} of their size, far "
            "below the usual 1e-3.",
            f"Raise the learning rate{raised} tenfold at a time, until updates are near 1e-3 of "
            "the parameters.",
        )
    if facts.norm < policy.vanished * facts.norm_first:
        return (
            f"{moved}, and the gradient has shrunk from {number(facts.norm_first)} to "
            f"{number(facts.norm)}: nothing is left that asks for a change. Units are dead or "
            "saturated, or the answers have become the same for every input (of embeddings: one "
            "point), as where the targets do not belong to the inputs.",
            "Look at `dead_units`, `saturated_units` and the spread of the outputs, and try to "
            "memorise one batch: if that works, compare inputs and targets of some samples by eye; "
            "if not, lower the learning rate, initialise anew, normalise between the layers.",
        )
    if facts.nothing and facts.gain > policy.min_gain:
        return (
            f"{moved}, which is what the frequencies of the targets alone give: the same answer to "
            "every input would do as well. What the inputs say is not used: they are constant or "
            "wrong, the targets belong to other inputs (shuffled or shifted separately), the way "
            "from the inputs to the answers is cut (a mask, dead or saturated units), or the "
            "learning rate does not let the model go on from there.",
            "Print some inputs and their targets as the model gets them. Try to memorise one "
            "batch: if that works, the data are wrong; if not, follow one input through the "
            "layers, and see where two different ones begin to give the same.",
        )
    if facts.guessed:
        return (
            f"{moved}. The model gives {facts.guessed:,} answers, and guessing among them costs "
            f"{number(math.log(facts.guessed))} (the logarithm of their number): what the inputs "
            "say is not used. Inputs that are not normalised or are constant, targets that belong "
            "to other inputs, or a rate so high that the first steps threw the parameters away.",
            "Look at the first steps: a loss far above that of guessing points at inputs that are "
            "not scaled. Then try to memorise one batch: if that fails, it is the model or the "
            "rate; if it works, compare inputs and targets of some samples by eye.",
        )
    grown = facts.inputs / facts.inputs_first if facts.inputs_first > 0 else math.nan
    if grown >= policy.inputs_grown or grown <= 1 / policy.inputs_grown:
        way = "grown" if grown > 1 else "shrunk"
        return (
            f"{moved}. Meanwhile the inputs have {way} from a root mean square of "
            f"{number(facts.inputs_first)} to {number(facts.inputs)}: noise or an augmentation "
            "that gets stronger from step to step, a sum that is never taken back, a normalisation "
            "by numbers that run away. What holds for the earlier ones does not hold for these.",
            "Print mean and standard deviation of the first batch and of the latest one, before "
            "and after each transform. Where it is a schedule, let it grow more slowly, or hold "
            "what the model can learn beside it.",
        )
    timid = facts.update < policy.timid_update
    other = facts.rate * 10 if timid else facts.rate / 10
    return (
        f"{moved} although steps change the parameters"
        f"{f' by {number(facts.update)} of their size' if math.isfinite(facts.update) else ''}. "
        "The targets do not belong to the inputs (shuffled separately), the gradient does not "
        "reach the early layers (saturated or dead units), or the rate is so "
        + (
            "low that nothing has come of it yet (1e-3 of the parameters a step is usual)."
            if timid
            else "high that steps overshoot."
        ),
        "Try to memorise one batch: if that fails, it is the model or the rate (try "
        f"{'ten times' if timid else 'a tenth'}"
        f"{f', {number(other)}' if facts.rate > 0 else ''}); if it works, compare inputs "
        "and targets of some samples by eye.",
    )


def finding_of(episode: Episode[Flat], policy: PlateauPolicy) -> Finding:
    """What is reported of an episode."""
    facts = episode.facts
    evidence = {
        "first": facts.first,
        "last": facts.last,
        "gain": facts.gain,
        "standard_error": facts.error,
    }
    named = {
        "accuracy": facts.accuracy,
        "update_ratio": facts.update,
        "grad_norm": facts.norm,
        "lr": facts.rate,
        "output_scale": facts.scale,
    }
    if facts.norm < policy.vanished * facts.norm_first:
        named["grad_norm_first"] = facts.norm_first
    evidence |= {name: value for name, value in named.items() if math.isfinite(value)}
    cause, remedy = cause_and_remedy(facts, policy)
    at = f" and the accuracy at {percent(facts.accuracy)}" if math.isfinite(facts.accuracy) else ""
    if math.isfinite(facts.explained):
        evidence["explained_deviance"] = facts.explained
    title = (
        f"The loss stayed at {number(facts.last)} for "
        f"{count(episode.last_step - episode.first_step + 1, 'step')}, and falls since"
        if facts.got_over(policy)
        else f"Nothing is learned: the loss is still at {number(facts.last)}{at}"
        if facts.certain(policy) and facts.gain <= policy.min_gain
        else f"The loss stays at {number(facts.last)}{at}: {nothing_of(facts)}"
        if facts.certain(policy)
        else f"The loss falls, and at {number(facts.last)}{at} {nothing_of(facts)} still"
        if facts.unlearns(policy)
        else f"The loss is where it began ({number(facts.first)}, now {number(facts.last)})"
    )
    return episode.finding(
        kind="loss.plateau",
        severity="warning" if facts.certain(policy) else "info",
        title=title,
        cause=cause,
        remedy=remedy,
        evidence=evidence,
    )
