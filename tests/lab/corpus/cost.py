"""What judging a step costs: `python -m tests.lab.corpus.cost [ranks] [steps a window] [steps]`.

All detectors, on what an agent posts by default: losses with noise, learning rates, norms, times,
digests of batches, and a comparison of digests at every step, one of eight tensors at every 16th.
Time is that of the processor, so that a busy machine does not count.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np

from rankscope.agent.wire import SAMPLE_DIGESTS
from rankscope.server.comparison import compare
from rankscope.server.detectors import build
from rankscope.server.detectors.runner import Evaluation
from rankscope.server.window import Comparison
from tests.support.runs.traces import Trace


def run(ranks: int, steps: int) -> Trace:
    random = np.random.default_rng(0)
    course = 2.3 * np.exp(-0.01 * np.arange(steps)) + 0.05
    loss = course * np.exp(0.2 * random.standard_normal((ranks, steps)))
    everyone = np.arange(ranks)
    comparisons: list[Comparison] = []
    for step in range(steps):
        for stage in ("outside_optimizer", "reduced_gradient", "hyperparameters", "parameters"):
            count = 8 if step % 16 == 0 else 0
            comparisons.append(compare.agreed(step, stage, everyone, count))
    shape = loss.shape
    noise = random.random(shape)
    return Trace(
        "cost",
        0,
        np.arange(steps),
        {
            "loss": loss,
            "accuracy": np.full(shape, 0.9),
            "grad_norm": np.broadcast_to(random.random(steps), shape).copy(),
            "grad_norm_local": 1.0 + noise,
            "lr": np.full(shape, 0.1),
            "update_ratio": np.full(shape, 1e-3),
            "samples": np.full(shape, 32.0),
            "step_seconds": 0.1 + 0.001 * noise,
            "compute_seconds": 0.08 + 0.001 * noise,
            "wait_seconds": 0.01 * noise,
            "data_seconds": 0.001 * noise,
            "queued_seconds": 0.0001 * noise,
            "processor_seconds": 0.07 + 0.001 * noise,
        },
        comparisons=tuple(comparisons),
        words={
            name: random.integers(0, 2**64, shape, dtype=np.uint64)
            for name in ("batch", *SAMPLE_DIGESTS)
        },
    )


def main(arguments: Sequence[str]) -> None:
    ranks = int(arguments[0]) if arguments else 64
    block = int(arguments[1]) if len(arguments) > 1 else 16
    steps = int(arguments[2]) if len(arguments) > 2 else 1024
    trace = run(ranks, steps)
    evaluation = Evaluation(build(), strict=True, clock=time.process_time)
    windows = list(trace.windows(range(0, steps, block)))
    began = time.process_time()
    for window in windows:
        evaluation.advance(window)
    total = time.process_time() - began
    print(f"{ranks} ranks, {block} steps a window: {1e6 * total / steps:.0f} us a step")
    for name, seconds in sorted(evaluation.seconds.items(), key=lambda item: -item[1]):
        print(f"    {name:18} {1e6 * seconds / steps:7.1f} us a step")


if __name__ == "__main__":
    main(sys.argv[1:])
