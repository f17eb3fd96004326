"""What follows from what in the course of a training: losses, gradients, rates and layers.

One disturbance shows in several curves; these say which of them is it, and which only show it.
"""

from __future__ import annotations

from rankscope.server.detectors.effects import BLUR, EPISODE, Rule

# What makes steps large, or shows that they are.
_LARGE_STEPS = (
    *("loss.diverging", "loss.nonfinite", "loss.oscillating", "loss.spike"),
    *("lr.too_high", "gradient.exploding", "gradient.accumulating", "reduction.wrong"),
)
# More steps than any run has: before or after the root, whenever.
_ANY = 1 << 62
# Where several lines fit, the upper one holds.
COURSE_RULES = (
    Rule(
        root=("gradient.vanishing",),
        # Of gradients that are exactly zero.
        root_has="observed",
        consequence=("layer.dead",),
        key="units:",
        earliest=-BLUR,
        same_ranks=False,
        why="no step has changed anything since: what is silent has been so from the start",
    ),
    Rule(
        root=("gradient.vanishing",),
        root_has="observed",
        consequence=("update.drift", "update.ratio", "batch.noise"),
        earliest=-BLUR,
        same_ranks=False,
        why="where no gradient is left, weight decay and momentum alone move the parameters",
    ),
    Rule(
        root=("loss.plateau",),
        consequence=("layer.dead",),
        key="units:",
        has="enough_left",
        earliest=-EPISODE,
        same_ranks=False,
        why="nothing was learned before these units died either, and the others could learn",
    ),
    Rule(
        root=("lr.too_low",),
        root_has="below_rounding",
        consequence=("update.missing",),
        has="few",
        earliest=-EPISODE,
        same_ranks=False,
        why="steps that small are less than the last bit of the largest parameters",
    ),
    Rule(
        root=("loss.plateau",),
        root_has="grad_norm_first",
        consequence=("lr.too_low",),
        earliest=-EPISODE,
        same_ranks=False,
        why="the steps are small because the gradient is gone, and not for the rate",
    ),
    Rule(
        root=("rank.loss_outlier", "data.", "desync."),
        consequence=("rank.gradient_outlier",),
        key="opposed",
        # That ranks contradict each other shows as the rest is learned: it is dated to the start.
        earliest=-_ANY,
        latest=_ANY,
        why="ranks whose data or models differ pull against each other",
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
            # Activations that a stage of a pipeline is given.
            "data.replayed",
        ),
        same_ranks=False,
        why="after a loss that is not finite, the parameters may not be finite either",
    ),
    Rule(
        root=("data.outlier",),
        root_key="inputs:",
        consequence=(
            "rank.loss_outlier",
            "rank.gradient_outlier",
            "desync.buffers",
            "loss.",
            "data.outlier",
            "update.ratio",
            "layer.dead",
        ),
        earliest=-BLUR,
        why="the inputs are of another size or kind",
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
        why="ranks that wait for a late one are late themselves at the next synchronisation",
    ),
    *(
        Rule(
            root=("update.drift",),
            root_key=key,
            consequence=("loss.", "gradient.", "lr.", "accuracy.stalled", "layer.dead"),
            earliest=-EPISODE,
            same_ranks=False,
            why="a weight decay takes back what the gradients add",
        )
        for key in ("faded", "held")
    ),
    Rule(
        root=("update.drift",),
        root_key="faded",
        consequence=("update.drift",),
        key="held",
        earliest=-EPISODE,
        same_ranks=False,
        why="it is one weight decay",
    ),
    Rule(
        root=("loss.oscillating",),
        root_has="recurs",
        consequence=("loss.diverging", "loss.spike", "gradient.oscillating"),
        earliest=-EPISODE,
        same_ranks=False,
        why="what recurs in data or schedule makes the loss what it is",
    ),
    Rule(
        root=("loss.oscillating",),
        root_has="turns",
        consequence=("gradient.oscillating", "lr.too_high"),
        earliest=-EPISODE,
        same_ranks=False,
        why="tasks or sources that take turns have losses and gradients of their own size",
    ),
    Rule(
        root=("lr.too_high",),
        root_key="start",
        consequence=("loss.", "gradient.", "layer.dead", "accuracy.stalled", "update.ratio"),
        earliest=-BLUR,
        latest=None,
        same_ranks=False,
        why="first steps that wrote over the weights threw the loss up, and killed units",
    ),
    *(
        Rule(
            root=("lr.too_high",),
            consequence=("layer.dead",),
            key=key,
            earliest=-EPISODE,
            same_ranks=False,
            why="what steps that are too large write over gives one answer to everything",
        )
        for key in ("reconstruction", "collapsed")
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
        root=("loss.diverging",),
        root_has="power",
        consequence=("loss.nonfinite", "gradient.nonfinite"),
        same_ranks=False,
        why="what has no minimum outgrows what numbers hold",
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
        why="steps that change almost nothing teach almost nothing",
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
        root=_LARGE_STEPS,
        consequence=("update.ratio", "layer.dead"),
        earliest=-EPISODE,
        same_ranks=False,
        why="steps are as large as the rates and gradients that they are made of",
    ),
    Rule(
        root=(*_LARGE_STEPS, "update.ratio"),
        consequence=("update.drift",),
        key="grown",
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
        why="parameters that grow without end learn nothing more",
    ),
    Rule(
        root=("update.ratio",),
        consequence=("layer.dead", "loss.plateau", "accuracy.stalled", "loss.diverging"),
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
        root=("lr.too_high",),
        consequence=("loss.spike",),
        earliest=-BLUR,
        why="a step too far is a spike of the loss",
    ),
    Rule(
        root=("loss.diverging", "loss.spike"),
        consequence=("generalization.gap", "accuracy.stalled"),
        earliest=-EPISODE,
        same_ranks=False,
        why="the training turned away from what it had reached",
    ),
)
