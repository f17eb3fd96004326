"""Trainings whose batch changes its size on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.lab.corpus.basics import (
    Family,
    Source,
    adam,
    epochs,
    noisy_labels,
    on_digits,
    plain,
    sgd,
)


def resized(count: int, sizes: dict[int, int], ranks: int) -> Source:
    """Shuffled epochs, whose batches have another size from some steps on.

    Args:
        sizes: first step -> samples of a rank's batch.
    """

    def source(random: np.random.Generator) -> Iterator[list[torch.Tensor]]:
        firsts = sorted(sizes)
        for place, first in enumerate(firsts):
            batches = epochs(count, sizes[first], ranks)(random)
            last = firsts[place + 1] if place + 1 < len(firsts) else None
            step = first
            while last is None or step < last:
                yield next(batches)
                step += 1

    return source


def _on_digits(seed: int, sizes: dict[int, int], **options: Any) -> Any:
    return on_digits(seed, batches=resized(1437, sizes, 4), **options)


def healthy() -> dict[str, Family]:
    return {
        # The batch grows in place of a rate that falls (Smith et al. 2018): it may be meant.
        "H70-batch-for-rate": plain(
            lambda s: _on_digits(s, {0: 8, 200: 32, 400: 128}, optimizer=sgd(0.1))
        ),
        "H71-batch-and-rate": plain(
            lambda s: _on_digits(
                s,
                {0: 8, 250: 64},
                optimizer=sgd(0.05),
                rate=lambda t: 0.05 if t < 250 else 0.05 + 0.35 * min((t - 250) / 60, 1),
            )
        ),
        "H72-smaller-adam": plain(
            lambda s: _on_digits(
                s,
                {0: 64, 300: 16},
                optimizer=adam(2e-3),
                rate=lambda t: 2e-3 if t < 300 else 1e-3,
            )
        ),
    }


def faulty() -> dict[str, Family]:
    """What `expected` names has to be found at step `by` at the latest."""
    return {
        "F70-smaller-batch": lambda s: (
            _on_digits(
                s,
                {0: 64, 300: 8},
                hidden=16,
                data=noisy_labels(s, 0.3),
                held_out=None,
                optimizer=sgd(1.0),
            ),
            {"expected": "lr.batch_mismatch", "by": 400, "onset": 300},
        ),
    }
