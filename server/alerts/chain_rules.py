"""What follows from a broken link of a step: batch, loss, gradient, reduction, update, parameters.

What one link passes on is wrong in those after it, on the same ranks or on all of them.
"""

from __future__ import annotations

from rankscope.server.detectors.effects import BLUR, EPISODE, Rule

# Steps in which a training shows what it begins with: a loss that never moves is told after 200,
# and dated to the first.
_BEGINNING = 300

# Where several lines fit, the upper one holds.
CHAIN_RULES = (
    Rule(
        root=("desync.",),
        consequence=("loss.nonfinite",),
        stages=("start", "outside_optimizer"),
        same_ranks=False,
        why="the ranks differed before the step whose loss is not finite",
    ),
    Rule(
        root=("desync.",),
        consequence=("loss.nonfinite",),
        earliest=1,
        same_ranks=False,
        why="the ranks differed in the steps before the loss was no longer finite",
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
            # Batches between two steps are more where a step is left out.
            "data.imbalanced",
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
        why="a rank in evaluation mode computes a different function",
    ),
    Rule(
        root=("loss.mismatch",),
        consequence=(
            *("loss.plateau", "loss.oscillating", "accuracy.", "lr."),
            *("gradient.vanishing", "gradient.exploding", "clipping.saturated", "batch.noise"),
            "layer.dead",
        ),
        earliest=-BLUR,
        same_ranks=False,
        why="a loss that is given the wrong numbers asks for something else, or for nothing",
    ),
    Rule(
        root=("data.unscaled", "weights.unscaled"),
        consequence=(
            *("layer.dead", "lr.too_high", "lr.too_low", "update.ratio", "clipping.saturated"),
            *("gradient.exploding", "gradient.vanishing", "gradient.oscillating"),
            *("loss.plateau", "loss.diverging", "loss.oscillating", "loss.nonfinite"),
            *("gradient.nonfinite", "accuracy.stalled", "batch.noise"),
        ),
        # What a training begins with is no cause of what happens to it when it has long learned.
        latest=_BEGINNING,
        same_ranks=False,
        why="what is far too large or small saturates or kills units, and so are the first steps",
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
            "compression.error",
            "clipping.saturated",
            "loss.spike",
            "loss.diverging",
            "loss.oscillating",
            "loss.nonfinite",
            "gradient.nonfinite",
            "gradient.vanishing",
        ),
        earliest=-BLUR,
        same_ranks=False,
        why="gradients that add up are no longer those of their step",
    ),
    Rule(
        root=("clipping.saturated",),
        consequence=("compression.error", "reduction.wrong"),
        earliest=-10 * EPISODE,
        same_ranks=False,
        why="what clipping cuts off, element by element, is missing from the mean",
    ),
    Rule(
        root=("compression.error",),
        consequence=("reduction.wrong",),
        earliest=-BLUR,
        same_ranks=False,
        why="what a compression leaves out is missing from the mean",
    ),
    Rule(
        root=("layer.dead",),
        root_has="lost",
        consequence=("reduction.wrong",),
        earliest=-BLUR,
        same_ranks=False,
        why="gradients that are zero when the step is taken are no mean of those computed",
    ),
    Rule(
        root=("data.imbalanced",),
        consequence=("reduction.wrong",),
        key="means",
        earliest=-10 * EPISODE,
        same_ranks=False,
        why="the same rank has the most, or the fewest, at each step",
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
            "update.drift",
        ),
        same_ranks=False,
        why="every rank applies a gradient, or an average, that is not the mean of the ranks' own",
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
        root=("schedule.mismatch",),
        root_key="alternates",
        consequence=("loss.", "gradient.", "lr.too_high", "update.ratio", "layer.dead"),
        earliest=-BLUR,
        same_ranks=False,
        why="each step at the higher rate undoes what those at the lower one have reached",
    ),
    Rule(
        root=("update.drift",),
        root_key="faded",
        consequence=("update.ratio", "lr.too_high"),
        earliest=-EPISODE,
        same_ranks=False,
        why="parameters that fade away are changed by a large share of what is left of them",
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
        consequence=(
            *("update.missing", "loss.spike", "loss.diverging", "gradient.exploding"),
            *("lr.too_low", "loss.plateau", "gradient.vanishing"),
        ),
        earliest=-BLUR,
        same_ranks=False,
        why="gradients are scaled down to almost nothing, and momentum goes on without them",
    ),
    Rule(
        root=("loss.nonfinite",),
        consequence=("gradient.nonfinite", "reduction.wrong", "update.missing"),
        same_ranks=False,
        why="the gradient of a loss that is not finite is not finite either",
    ),
    Rule(
        root=("gradient.nonfinite",),
        # Not steps that were skipped: nothing was applied.
        stages=("local_gradient", "reduced_gradient"),
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
        same_ranks=False,
        why="ranks with the same batches have the same losses, and learn these twice as fast",
    ),
    Rule(
        root=("desync.",),
        consequence=("gradient.nonfinite", "reduction.wrong", "update.missing"),
        same_ranks=False,
        why="the ranks differed before",
    ),
    Rule(
        root=("desync.",),
        consequence=("desync.",),
        why="ranks that differ keep differing in every later link of the chain",
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
)
