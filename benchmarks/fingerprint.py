"""How fast digests and sketches are, beside the memory they are read from.

    python -m benchmarks.fingerprint [--rounds N] [--elements N] [--json FILE]

One thread. Everything is timed in turns, round after round, so that a machine that drifts drifts
for all; the figures are medians of the rounds, and the ratios are medians of the ratios within a
round. GB are of the tensor's bytes, read once; `copy` reads and writes them.

1. One large tensor (64 M fp32, 256 MB): digest, digest and sketch together, what the sketch adds
   to the digest; beside it torch's sum and copy of the same tensor, and the same results by numpy,
   which is what an installation without a C compiler gets.
2. The same for other types.
3. Small models: microseconds a call.
4. Where there is CUDA: the same large tensor there, by CUDA's own events, beside a copy.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rankscope.agent.fingerprint import FingerprintPlan, kernel, portable

MILLION = 1 << 20
SMALL = {
    "10 tensors, 100 k parameters": [(128, 256), (256,), (256, 200), (200,)]
    + [(64, 64), (64,), (64, 100), (100,), (100, 50), (50,)],
    "62 tensors of 1,000": [(10, 100)] * 62,
    "2 tensors of 10": [(10,)] * 2,
}

Times = dict[str, list[float]]


def in_turns(subjects: dict[str, Callable[[], object]], rounds: int, calls: int = 1) -> Times:
    """Seconds a call of each subject, one a round; a first round is not counted."""
    times: Times = {name: [] for name in subjects}
    for counted in [False] + [True] * rounds:
        for name, call in subjects.items():
            start = time.thread_time()
            for _ in range(calls):
                call()
            if counted:
                times[name].append((time.thread_time() - start) / calls)
    return times


def ratio(times: Times, one: str, other: str) -> float:
    """Median over the rounds of how much longer `other` takes than `one`."""
    return statistics.median(b / a for a, b in zip(times[one], times[other], strict=True))


def plan_of(tensors: list[torch.Tensor]) -> FingerprintPlan:
    return FingerprintPlan([str(i) for i in range(len(tensors))], tensors)


def report(times: Times, size: int) -> dict[str, dict[str, float]]:
    """Prints a table of GB/s, with ratios to sum and copy."""
    rows = {}
    print(f"{'':24}{'ms':>9}{'GB/s':>9}{'of sum':>9}{'of copy':>9}")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        rows[name] = {
            "seconds": middle,
            "gb_per_s": size / middle / 1e9,
            "of_sum": ratio(times, name, "sum"),
            "of_copy": ratio(times, name, "copy"),
        }
        row = rows[name]
        print(
            f"{name:24}{1e3 * middle:9.2f}{row['gb_per_s']:9.2f}"
            f"{row['of_sum']:9.2f}{row['of_copy']:9.2f}"
        )
    return rows


def large(dtype: torch.dtype, elements: int, rounds: int, *, with_numpy: bool) -> dict[str, object]:
    tensor = torch.randn(elements).to(dtype)
    plan = plan_of([tensor])
    target = torch.empty_like(tensor)
    words = tensor.view(torch.int64)
    subjects: dict[str, Callable[[], object]] = {
        "digest": lambda: plan.compute([tensor], sketches=False),
        "digest and sketch": lambda: plan.compute([tensor], sketches=True),
        "sum": lambda: tensor.sum() if dtype is torch.float32 else words.sum(),
        "copy": lambda: target.copy_(tensor),
    }
    if with_numpy:
        subjects["both by numpy"] = lambda: (portable.digest(tensor), portable.sketch(tensor))
    times = in_turns(subjects, rounds)
    both = zip(times["digest and sketch"], times["digest"], strict=True)
    times["sketch (both - digest)"] = [max(b - d, 1e-9) for b, d in both]
    size = tensor.numel() * tensor.element_size()
    print(f"\n{str(dtype).removeprefix('torch.')}, {elements / MILLION:g} M elements, one thread")
    return dict(report(times, size))


def small(rounds: int) -> dict[str, object]:
    found: dict[str, object] = {}
    print(f"\n{'microseconds a call':34}{'digest':>9}{'both':>9}{'sums':>9}")
    for name, shapes in SMALL.items():
        tensors = [torch.randn(shape) for shape in shapes]
        plan = plan_of(tensors)
        times = in_turns(
            {
                "digest": lambda p=plan, t=tensors: p.compute(t, sketches=False),
                "both": lambda p=plan, t=tensors: p.compute(t, sketches=True),
                "sums": lambda t=tensors: [x.sum() for x in t],
            },
            rounds,
            calls=200,
        )
        row = {key: 1e6 * statistics.median(seconds) for key, seconds in times.items()}
        found[name] = row
        print(f"{name:34}{row['digest']:9.1f}{row['both']:9.1f}{row['sums']:9.1f}")
    return found


def on_cuda(elements: int, rounds: int) -> dict[str, object]:
    tensor = torch.randn(elements, device="cuda")
    plan = plan_of([tensor])
    target = torch.empty_like(tensor)
    subjects: dict[str, Callable[[], object]] = {
        "digest": lambda: plan.begin([tensor], sketches=False),
        "digest and sketch": lambda: plan.begin([tensor], sketches=True),
        "sum": tensor.sum,
        "copy": lambda: target.copy_(tensor),
    }
    times: Times = {name: [] for name in subjects}
    for counted in [False] * 3 + [True] * rounds:
        for name, call in subjects.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if counted:
                times[name].append(start.elapsed_time(end) / 1e3)
    print(f"\n{torch.cuda.get_device_name()}, float32, {elements / MILLION:g} M elements")
    return dict(report(times, 4 * elements))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--elements", type=int, default=64 * MILLION)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    library = kernel.load()
    names = ["plain C", "AVX2", "AVX-512"]
    used = "numpy" if library is None else names[library.rankscope_choose(2)]
    print(f"{platform.machine()}, torch {torch.__version__}, inner loops: {used}")
    found: dict[str, object] = {"inner_loops": used}
    found["float32"] = large(torch.float32, options.elements, options.rounds, with_numpy=True)
    for best in range(names.index(used) if used in names else 0):
        assert library is not None
        library.rankscope_choose(best)
        print(f"\nwith {names[best]}:", end="")
        found[f"float32, {names[best]}"] = large(
            torch.float32, options.elements, options.rounds, with_numpy=False
        )
        library.rankscope_choose(2)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found[str(dtype).removeprefix("torch.")] = large(
            dtype, options.elements // 4, options.rounds, with_numpy=False
        )
    found["small"] = small(options.rounds)
    if torch.cuda.is_available():
        found["cuda"] = on_cuda(4 * options.elements, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
