"""The names that both ends, the documentation and outside scripts rely on."""

SEVERITIES = ("info", "warning", "critical")

# The links of the chain within one optimizer step, in the order in which they can break.
STAGES = (
    "start",
    # Between two steps: parameters that something else than the optimizer wrote.
    "outside_optimizer",
    "batch",
    "local_gradient",
    "reduced_gradient",
    "clipped_gradient",
    "optimizer_state",
    "hyperparameters",
    "parameters",
    # Beside the chain: what the model keeps besides its parameters, what else is watched,
    # parameters that no optimizer is to move, and by how much parameters were changed by what comes
    # back after steps without, as averages do.
    "buffers",
    "watched",
    "frozen",
    "average",
)

# What the loss of a run is; see `rankscope.server.detectors.profiles`.
PROFILES = ("descent", "adversarial", "reinforcement", "surrogate", "contrastive")

RANK_STATES = ("running", "finished", "failed")

# How the shard of a tensor begins of which each rank trains a copy of its own; the rank follows. It
# is compared with no other rank's, and says nothing of what else the ranks hold.
RANK_LOCAL = "own@"

# Samples of a batch that a rank reports, the digests that hold them, two in each, and what
# stands in place of a sample where a batch has fewer.
SAMPLES_REPORTED = 16
SAMPLE_DIGESTS = tuple(f"rows/{i}" for i in range(SAMPLES_REPORTED // 2))
NO_SAMPLE = 0xFFFF_FFFF

# Digests of a step beside `batch`: of a part of it, where all of it would cost too much at every
# step; and of the targets of its losses, which random augmentation leaves as they are.
BATCH_PART, LABELS = "batch/part", "labels"
