"""What the agent costs a training on a CUDA device, and how fast it reads tensors there.

    python -m benchmarks.device [--blocks N] [--steps N] [--batch N] [--json FILE]

A transformer of 124 M parameters (12 blocks of width 768, sequences of 1,024 tokens) is trained in
bf16 with a fused AdamW, as it is and compiled, by one process. Blocks of steps with and without the
agent come in pairs, in an order drawn for each; of each pair the ratio of the two times is taken,
from one synchronisation to the next, so that both the host and the device are in it. `default` is
the agent at its steady pace, after its allowance; `every step` samples everything at every step.

Figures: median of the ratios with a 95 % bootstrap interval; milliseconds that a full sample adds;
and, beside torch's sum and copy of the same tensor, GB a second of digests and sketches.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.agent.arms import Agent, Plain
from benchmarks.fingerprint import on_cuda
from tests.support.language_model import LanguageModel, counting, loss_of

LENGTH, TOKENS = 1024, 50304
_SETTLING = 3
# In the first 20 s of a run the agent takes more than later, by its plan.
_STEADY_SECONDS = 40.0
_RESAMPLED = 2000
_ALWAYS = 10**9


class Trainer:
    """One training."""

    def __init__(self, batch: int, *, compiled: bool) -> None:
        torch.manual_seed(0)
        self.inner = LanguageModel(768, 12, 12, TOKENS, LENGTH).to("cuda")
        self.model: Any = torch.compile(self.inner) if compiled else self.inner
        self.tensors = len(list(self.inner.parameters()))
        self.optimizer = torch.optim.AdamW(self.inner.parameters(), lr=3e-4, fused=True)
        generator = torch.Generator("cuda").manual_seed(0)
        self.batches = [counting(batch, LENGTH + 1, TOKENS, generator) for _ in range(4)]
        self._taken = 0

    def step(self) -> torch.Tensor:
        """One step; its loss, on the device."""
        self._taken += 1
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss: torch.Tensor = loss_of(self.model, self.batches[self._taken % 4])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.inner.parameters(), 1.0)
        self.optimizer.step()
        return loss


def block(arm: Any, steps: int) -> float:
    """Seconds a step."""
    arm.begin()
    for _ in range(_SETTLING):
        arm.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        arm.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def compared(plain: Any, agent: Any, blocks: int, steps: int) -> dict[str, Any]:
    """Ratio of the two, and milliseconds of a plain step."""
    order, pairs = random.Random(0), []
    # Where something looked unusual to the agent it samples the next steps as well.
    sampled: list[int] = []
    monitor: Any = agent.monitor
    for number in range(blocks + 1):
        taken: dict[int, float] = {}
        before = monitor._sampled_steps
        for place in (0, 1) if order.random() < 0.5 else (1, 0):
            taken[place] = block((plain, agent)[place], steps)
        if number:
            pairs.append((taken[0], taken[1]))
            sampled.append(monitor._sampled_steps - before)
    times = np.array(pairs)
    ratios = times[:, 1] / times[:, 0]
    drawn = np.random.default_rng(0).integers(0, len(ratios), (_RESAMPLED, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), [0.025, 0.975])
    return {
        "plain_ms": 1e3 * float(np.median(times[:, 0])),
        "ratio": float(np.median(ratios)),
        "low": float(low),
        "high": float(high),
        "added_ms": 1e3 * float(np.median(times[:, 1] - times[:, 0])),
        "sampled": sum(sampled) / (len(sampled) * (steps + _SETTLING)),
        "blocks": [{"ratio": float(r), "sampled": n} for r, n in zip(ratios, sampled, strict=True)],
    }


@contextmanager
def sink() -> Iterator[str]:
    """Takes what is posted; its URL."""
    command = [sys.executable, str(Path(__file__).parent / "agent" / "sink.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def measured(
    batch: int, blocks: int, steps: int, url: str, *, compiled: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of a row -> figures."""
    # Two, and the hooks stay on the modules of the one: a compiled model would be compiled anew.
    alone, followed = (Trainer(batch, compiled=compiled) for _ in range(2))
    how = "compiled" if compiled else "eager"
    for _ in range(2 * _SETTLING):
        alone.step()
    watched = Agent(followed, url, f"device-{how}")
    plain = Plain(alone, watched)
    watched.begin()
    until = time.perf_counter() + _STEADY_SECONDS
    while time.perf_counter() < until:
        watched.step()
    yield f"{how}, default", compared(plain, watched, blocks, steps)
    monitor: Any = watched.monitor
    monitor._schedule.ask_dense(_ALWAYS)
    yield f"{how}, every step", compared(plain, watched, max(blocks // 3, 3), steps)
    watched.close()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--only", choices=("eager", "compiled", "reading"), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    parts = options.only or ["reading", "eager", "compiled"]
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(f"{found['device']}, torch {found['torch']}")
    if "reading" in parts:
        found["reading"] = on_cuda(1 << 28, 15)
    with sink() as url:
        for how in ("eager", "compiled"):
            if how not in parts:
                continue
            compiled = how == "compiled"
            for name, row in measured(
                options.batch, options.blocks, options.steps, url, compiled=compiled
            ):
                found[name] = row
                print(
                    f"{name:24} plain step {row['plain_ms']:7.2f} ms, ratio {row['ratio']:.4f} "
                    f"[{row['low']:.4f}, {row['high']:.4f}], {row['added_ms']:+.2f} ms a step; "
                    f"{row['sampled']:.0%} of the steps sampled in full",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
