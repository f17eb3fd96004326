"""Which recorded series are asked what, by their names."""

from __future__ import annotations

import re
from functools import cache

# What the agent records of the job's settings, counts and times, and of itself. Settings and counts
# are what they are set to, and are compared where they matter (`desync.hyperparameters`,
# `schedule.mismatch`, `desync.config`, `update.missing`); times have tails that are no outliers,
# and `rank.straggler`, `rank.starved` and `collective.slow` judge them. Memory moves in steps, on
# each rank at a time of its own, and `memory.growing` judges it. How a GPU is stands as evidence
# beside what is found of its rank.
_AGENTS = re.compile(
    r"rankscope/.*|hyperparameters/.*|lr|lr/.*|.*_seconds|samples|tokens|samples_per_second"
    r"|tokens_per_second|optimizer_steps|micro_steps|steps_skipped|scheduler_steps|amp_scale"
    r"|parameters_written|modules_in_eval|autocast|passes_discarded|loss_divisor|losses_summed"
    r"|loss_(broadcast|negated|subtracted)"
    r"|gradients_unreduced"
    r"|buffers_nonfinite|gradient_carried.*|tensors_.*|push_.*|outputs_compared|task|loss_classes|label_smoothing"
    r"|rng_repeats|first_layer_input_rms|initial_gain"
    r"|process_(resident_memory|mapped_file)_bytes|cuda_(max_)?memory_(allocated|reserved)_bytes"
    r"|gpu_(temperature_celsius|sm_clock_mhz|throttle_reasons|ecc_(un)?corrected)"
)
# What it records of the training: their own past is judged by kinds of their own (`loss.*`,
# `accuracy.*`, `gradient.*`, `update.ratio`, `clipping.saturated`, `generalization.gap`), by rules
# that know how such a series falls. Ranks are compared in them all the same.
_TRAINING = re.compile(
    r"loss|accuracy|accuracy_counted|grad_norm|grad_norm_(local|preclip|canary)|clip_coefficient|grad_cosine"
    r"|grad_cosine_local|weight_norm|update_norm|update_ratio|eval/(.*/)?(loss|accuracy)"
    r"|output_spread"
)
# Words in a user's names that indicate clock readings and rates. The first step of an epoch, a
# checkpoint or a busy machine makes single ones a hundred times as large.
_CLOCK = re.compile(
    r"(^|[/_.\s-])(time|times|timing|timer|seconds|secs?|ms|duration|elapsed|eta|latency|fps|sps"
    r"|throughput|qps|it_s|wait|.*_per_s(ec(ond)?)?)($|[/_.\s-])",
    re.IGNORECASE,
)


@cache
def is_asked(name: str) -> bool:
    """Whether a series is no setting, count, time or bookkeeping of the agent's."""
    return _AGENTS.fullmatch(name) is None


@cache
def is_logged(name: str) -> bool:
    """Whether it is a user's own: nothing else judges its past."""
    return is_asked(name) and _TRAINING.fullmatch(name) is None


@cache
def is_clock(name: str) -> bool:
    """Whether its name indicates a time or a rate: of these only what lasts counts."""
    return _CLOCK.search(name) is not None
