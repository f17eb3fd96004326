"""The table of what follows from what: one line for each thing that an alert does to others."""

from __future__ import annotations

from dataclasses import dataclass

# Onsets that are told by statistics, or dated back, are known to about this many steps. A root is
# never said to have begun more than this after what follows from it.
BLUR = 20
# Disturbances of the loss that begin this close to each other are one episode.
EPISODE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of the table. A name that ends with a dot stands for all kinds that begin so.

    Attributes:
        why: what the one does to the other: "because ...".
        stages: stages at which the root has to have broken; empty: any.
        earliest: how many steps after the root the consequence begins at the earliest; negative:
            before it. The root has begun with its `first_step`, or after the last look that found
            nothing wrong.
        latest: the same at the latest; None: as long as the root lasts, and until it would have
            resolved.
        same_ranks: whether they have to have a rank in common, where both name ranks.
        key: what the consequence's key begins with, where a kind has findings of several sorts.
        root_key: the same of the root's key.
    """

    root: tuple[str, ...]
    consequence: tuple[str, ...]
    why: str
    stages: tuple[str, ...] = ()
    earliest: int = 0
    latest: int | None = None
    same_ranks: bool = True
    key: str = ""
    root_key: str = ""


# Where several lines fit, the upper one holds.
RULES = (
    Rule(
        root=("desync.",),
        consequence=("loss.nonfinite",),
        stages=("start", "outside_optimizer"),
        same_ranks=False,
        why="the ranks were apart before the step whose loss is not finite",
    ),
    Rule(
        root=("desync.",),
        consequence=("loss.nonfinite",),
        earliest=1,
        same_ranks=False,
        why="the ranks were apart in the steps before the loss was no longer finite",
    ),
    Rule(
        root=("loss.nonfinite",),
        consequence=("desync.",),
        same_ranks=False,
        why="a loss that is not finite makes gradients and parameters that are not finite",
    ),
    Rule(
        root=("desync.progress",),
        consequence=(
            "desync.parameters",
            "desync.gradients",
            "desync.optimizer",
            "desync.hyperparameters",
            "desync.buffers",
            "update.missing",
        ),
        same_ranks=False,
        why="ranks that do not take the same steps do not hold the same",
    ),
    Rule(
        root=("desync.config",),
        consequence=("desync.", "rank.loss_outlier", "mode.evaluation"),
        same_ranks=False,
        why="ranks that were started differently do not train the same",
    ),
    Rule(
        root=("mode.evaluation",),
        consequence=(
            "desync.buffers",
            "desync.rng",
            "rank.loss_outlier",
            "rank.gradient_outlier",
            "accuracy.mismatch",
        ),
        earliest=-BLUR,
        why="a rank in evaluation mode computes another function than the others",
    ),
    Rule(
        root=("desync.batch",),
        consequence=("desync.", "rank.loss_outlier", "rank.gradient_outlier", "reduction.wrong"),
        same_ranks=False,
        why="ranks that compute one result together had the parts of different batches",
    ),
    Rule(
        root=("update.missing",),
        root_key="held",
        consequence=(
            "gradient.accumulating",
            "reduction.wrong",
            "clipping.saturated",
            "gradient.exploding",
            "gradient.oscillating",
            "lr.too_high",
            "loss.plateau",
            "accuracy.stalled",
            "lr.too_low",
            "layer.dead",
        ),
        same_ranks=False,
        why="no optimizer holds these tensors: they learn nothing, and their gradients add up",
    ),
    Rule(
        root=("gradient.accumulating",),
        consequence=(
            "reduction.wrong",
            "clipping.saturated",
            "loss.spike",
            "loss.diverging",
            "loss.oscillating",
            "loss.nonfinite",
            "gradient.nonfinite",
        ),
        earliest=-BLUR,
        same_ranks=False,
        why="gradients that add up are no longer those of their step",
    ),
    Rule(
        root=("reduction.wrong",),
        consequence=(
            "loss.spike",
            "loss.diverging",
            "loss.oscillating",
            "loss.nonfinite",
            "gradient.nonfinite",
            "clipping.saturated",
        ),
        same_ranks=False,
        why="every rank applies a gradient that is not the mean of the ranks' own",
    ),
    Rule(
        root=("update.missing",),
        consequence=("desync.parameters",),
        latest=BLUR,
        why="a rank that does not move does not stay with the others",
    ),
    Rule(
        root=("schedule.mismatch",),
        consequence=("update.missing",),
        same_ranks=False,
        why="without a learning rate nothing moves",
    ),
    Rule(
        root=("loss.nonfinite",),
        consequence=("amp.scale_collapse",),
        earliest=-BLUR,
        same_ranks=False,
        why="every step of a loss that is not finite overflows, at any scale",
    ),
    Rule(
        root=("amp.scale_collapse",),
        consequence=("update.missing", "gradient.nonfinite"),
        earliest=-BLUR,
        same_ranks=False,
        why="steps are skipped or spoilt by overflows",
    ),
    Rule(
        root=("clipping.saturated",),
        consequence=("update.missing", "loss.spike", "loss.diverging", "gradient.exploding"),
        earliest=-BLUR,
        same_ranks=False,
        why="gradients are shortened to next to nothing, and momentum goes on without them",
    ),
    Rule(
        root=("loss.nonfinite",),
        consequence=("gradient.nonfinite", "reduction.wrong", "update.missing"),
        same_ranks=False,
        why="the gradient of a loss that is not finite is not finite either",
    ),
    Rule(
        root=("gradient.nonfinite",),
        consequence=("loss.", "rank.loss_outlier", "reduction.wrong", "desync.", "update.missing"),
        same_ranks=False,
        why="parameters are not finite after a gradient that is not",
    ),
    Rule(
        root=("loss.nonfinite", "gradient.nonfinite"),
        consequence=("buffers.nonfinite", "eval.nonfinite"),
        earliest=-BLUR,
        same_ranks=False,
        why="what is not finite goes into running statistics, parameters and evaluations",
    ),
    Rule(
        root=("buffers.nonfinite",),
        consequence=("eval.nonfinite", "desync.buffers"),
        earliest=-BLUR,
        same_ranks=False,
        why="an evaluation uses the buffers as they are",
    ),
    Rule(
        root=("data.duplicated",),
        consequence=("rank.loss_outlier",),
        why="ranks with the same batches have the same losses",
    ),
    Rule(
        root=("desync.",),
        consequence=("gradient.nonfinite", "reduction.wrong", "update.missing"),
        same_ranks=False,
        why="the ranks were apart before",
    ),
    Rule(
        root=("desync.",),
        consequence=("desync.",),
        why="ranks that are apart stay apart in every later link of the chain",
    ),
    Rule(
        root=("desync.",),
        consequence=(
            "rank.loss_outlier",
            "rank.gradient_outlier",
            "loss.spike",
            "loss.diverging",
            "loss.oscillating",
        ),
        why="ranks that hold different parameters train different models",
    ),
    Rule(
        root=("loss.nonfinite",),
        consequence=("loss.spike",),
        earliest=-BLUR,
        same_ranks=False,
        why="the loss rose on its way to being no longer finite",
    ),
    Rule(
        root=("loss.nonfinite",),
        consequence=(
            "loss.diverging",
            "loss.oscillating",
            "rank.loss_outlier",
            "rank.gradient_outlier",
        ),
        same_ranks=False,
        why="after a loss that is not finite, the parameters may not be finite either",
    ),
    Rule(
        root=("rank.loss_outlier",),
        consequence=("loss.spike", "loss.diverging", "loss.oscillating"),
        earliest=-BLUR,
        why="the loss of that rank alone moves the mean over the ranks",
    ),
    Rule(
        root=("rank.loss_outlier", "data.", "reduction.wrong"),
        consequence=("rank.gradient_outlier",),
        earliest=-BLUR,
        why="what is odd about that rank's data or loss is odd about its gradient, too",
    ),
    Rule(
        root=("rank.straggler", "rank.starved"),
        consequence=("rank.straggler", "rank.starved", "collective.slow"),
        earliest=-BLUR,
        same_ranks=False,
        why="ranks that wait for a late one are late themselves at the next meeting",
    ),
    Rule(
        root=("loss.diverging",),
        consequence=("loss.oscillating", "loss.spike"),
        earliest=-BLUR,
        why="they belong to the same rise of the loss",
    ),
    Rule(
        root=("loss.oscillating",),
        consequence=("loss.spike",),
        earliest=-BLUR,
        why="each swing of the loss is like a spike",
    ),
    Rule(
        root=("loss.diverging",),
        consequence=("loss.nonfinite",),
        why="the loss rose until it was no longer finite",
    ),
    Rule(
        root=("loss.oscillating", "loss.spike"),
        consequence=("loss.nonfinite", "loss.diverging", "loss.oscillating"),
        latest=EPISODE,
        why="the loss was disturbed first in this way, and then more",
    ),
    Rule(
        root=("loss.spike",),
        consequence=("loss.spike",),
        latest=50,
        why="spikes that follow each other closely have one cause",
    ),
    Rule(
        root=("rank.silent", "rank.stalled"),
        consequence=("rank.failed",),
        earliest=-EPISODE,
        latest=EPISODE,
        same_ranks=False,
        key="collective",
        why="a collective to which a rank does not come ends in an error on the others",
    ),
    Rule(
        root=("rank.failed",),
        consequence=("rank.silent", "rank.stalled"),
        earliest=-EPISODE,
        latest=EPISODE,
        same_ranks=False,
        why="the other ranks wait for a rank that has failed, or are ended by their launcher",
    ),
    Rule(
        root=("rank.silent",),
        consequence=("rank.silent", "rank.stalled"),
        earliest=-EPISODE,
        latest=EPISODE,
        same_ranks=False,
        why="the other ranks wait for a rank that no longer takes part, or are stopped with it",
    ),
    Rule(
        root=(
            "loss.diverging",
            "loss.oscillating",
            "loss.spike",
            "loss.nonfinite",
            "gradient.accumulating",
        ),
        consequence=("gradient.exploding", "gradient.oscillating", "lr.too_high"),
        earliest=-EPISODE,
        latest=EPISODE,
        same_ranks=False,
        why="loss and gradient leave what they had reached together",
    ),
    Rule(
        root=("desync.", "reduction.wrong", "rank.loss_outlier", "data.", "gradient.accumulating"),
        consequence=(
            "gradient.exploding",
            "gradient.oscillating",
            "lr.too_high",
            "generalization.gap",
            "loss.plateau",
            "accuracy.stalled",
        ),
        earliest=-BLUR,
        same_ranks=False,
        why="what is trained on, or what comes of it, is not what it should be",
    ),
    Rule(
        root=("lr.batch_mismatch",),
        consequence=("loss.", "gradient.", "lr.too_high", "update.ratio", "accuracy.stalled"),
        earliest=-BLUR,
        same_ranks=False,
        why="steps are too large for the batch",
    ),
    Rule(
        root=("update.missing", "schedule.mismatch", "lr.too_low", "amp.scale_collapse"),
        consequence=("loss.plateau", "accuracy.stalled", "lr.too_low"),
        earliest=-EPISODE,
        same_ranks=False,
        why="steps that change next to nothing teach next to nothing",
    ),
    Rule(
        root=("gradient.oscillating", "gradient.exploding"),
        consequence=("gradient.exploding", "gradient.oscillating", "lr.too_high"),
        earliest=-BLUR,
        same_ranks=False,
        why="the gradient had begun to leave its usual size before",
    ),
    Rule(
        root=("layer.dead",),
        consequence=(
            "layer.dead",
            "gradient.vanishing",
            "loss.plateau",
            "accuracy.stalled",
            "lr.too_low",
            "update.ratio",
        ),
        earliest=-10 * EPISODE,
        same_ranks=False,
        why="layers that get no gradient, or pass none back, learn nothing",
    ),
    Rule(
        root=("layer.dead",),
        consequence=("loss.spike", "loss.diverging", "loss.oscillating"),
        same_ranks=False,
        why="what dead layers pass on is not what the others learned from",
    ),
    Rule(
        root=("gradient.vanishing",),
        consequence=("loss.plateau", "accuracy.stalled", "lr.too_low"),
        earliest=-EPISODE,
        same_ranks=False,
        why="the first layers get too little of the gradient to learn anything",
    ),
    Rule(
        root=(
            "loss.diverging",
            "loss.nonfinite",
            "loss.oscillating",
            "loss.spike",
            "lr.too_high",
            "gradient.exploding",
            "gradient.accumulating",
            "reduction.wrong",
        ),
        consequence=("update.ratio", "update.drift", "layer.dead"),
        earliest=-EPISODE,
        same_ranks=False,
        why="steps are as large as the rates and gradients that they are made of",
    ),
    Rule(
        root=("accuracy.mismatch",),
        consequence=("accuracy.stalled",),
        same_ranks=False,
        why="an accuracy of something else does not rise with what is learned",
    ),
    Rule(
        root=("update.drift",),
        consequence=("loss.", "gradient.vanishing", "accuracy.stalled", "lr.too_low", "layer.dead"),
        earliest=-EPISODE,
        same_ranks=False,
        why="parameters that fade away, or grow without end, learn nothing more",
    ),
    Rule(
        root=("update.ratio",),
        consequence=(
            *("layer.dead", "loss.plateau", "accuracy.stalled", "loss.diverging"),
            "update.drift",
        ),
        earliest=-EPISODE,
        same_ranks=False,
        why="steps of that size write over what was learned",
    ),
    Rule(
        root=("data.outlier",),
        consequence=("rank.gradient_outlier",),
        # Bursts of the gradient stand out sooner than those of the loss, and add up.
        earliest=-10 * EPISODE,
        key="bursts:",
        why="a batch whose loss is like no other's has such a gradient, too",
    ),
    Rule(
        root=("data.outlier",),
        consequence=("loss.spike", "loss.diverging", "gradient.exploding", "rank.gradient_outlier"),
        earliest=-BLUR,
        latest=EPISODE,
        same_ranks=False,
        why="the batch of one rank is in the mean, and in the step",
    ),
    Rule(
        root=("rank.loss_outlier", "desync.", "loss.nonfinite"),
        consequence=("data.outlier",),
        earliest=-BLUR,
        why="what that rank reads or computes is off as a whole",
    ),
    Rule(
        root=("compression.error",),
        consequence=("loss.plateau", "loss.diverging", "accuracy.stalled", "lr.too_low"),
        earliest=-EPISODE,
        same_ranks=False,
        why="steps that are not along the gradient do not make the loss fall",
    ),
    Rule(
        root=("loss.plateau", "layer.dead", "gradient.vanishing", "update.missing", "data."),
        consequence=("batch.noise",),
        earliest=-10 * EPISODE,
        same_ranks=False,
        why="where nothing can be learned, gradients are noise",
    ),
    Rule(
        root=(
            "loss.diverging",
            "rank.loss_outlier",
            "desync.",
            "reduction.wrong",
            "gradient.accumulating",
        ),
        consequence=("loss.plateau",),
        earliest=-10 * EPISODE,
        same_ranks=False,
        why="a loss that rose again is where it began",
    ),
    Rule(
        root=("loss.diverging", "loss.spike"),
        consequence=("generalization.gap",),
        earliest=-EPISODE,
        same_ranks=False,
        why="the training turned away from what it had reached",
    ),
)
