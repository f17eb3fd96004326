"""Axis titles, with units, of the series that the agent posts by itself."""

from __future__ import annotations

_TITLES = {
    "loss": "loss",
    "accuracy": "accuracy (fraction)",
    "grad_norm": "gradient norm (L2)",
    "grad_norm_local": "local gradient norm (L2)",
    "grad_norm_canary": "norm of some local gradients (L2)",
    "grad_norm_preclip": "norm before clipping (L2)",
    "lr": "learning rate",
    "step_seconds": "step time (s)",
    # As the agent measures it: collectives are a part of the backward pass.
    "compute_seconds": "compute and waiting (s)",
    "wait_seconds": "wait for other ranks (s)",
    "data_seconds": "wait for data (s)",
    "samples_per_second": "throughput (samples/s)",
    "process_resident_memory_bytes": "resident memory (bytes)",
    "process_mapped_file_bytes": "pages of files (bytes)",
    "cuda_memory_allocated_bytes": "device memory allocated (bytes)",
    "cuda_memory_reserved_bytes": "device memory reserved (bytes)",
    "cuda_max_memory_allocated_bytes": "device memory, peak (bytes)",
    "eval/loss": "evaluation loss",
    "eval/accuracy": "evaluation accuracy (fraction)",
    "rankscope/overhead": "agent overhead (share of step)",
    "rankscope/sampled": "sampled in full (share of steps)",
    "rankscope/interval/basic": "losses and times, every (steps)",
    "rankscope/interval/signals": "norms, sampled every (steps)",
    "rankscope/interval/word": "words, sampled every (steps)",
    "rankscope/interval/full": "fingerprints, every (steps)",
    "rankscope/interval/state": "optimizer state, every (steps)",
}

# Of what there is by tensor, too.
_FAMILIES = {
    "weight_norm": "weight norm (L2)",
    "update_ratio": "update norm / weight norm",
}

_MAX_LENGTH = 36


def axis_title(metric: str) -> str:
    """What the y axis of a metric says; the metric's own name where it is the user's."""
    if metric in _TITLES:
        return _TITLES[metric]
    family, _, rest = metric.partition("/")
    if not rest:
        return metric
    title = _TITLES.get(family) or _FAMILIES.get(family)
    # The axis of a small chart has no room for more; its heading has the whole name.
    whole = f"{title}, {rest}" if title else metric
    return whole if len(whole) <= _MAX_LENGTH else title or family
