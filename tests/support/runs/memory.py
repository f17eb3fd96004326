"""Runs of which it matters how much memory their processes use."""

import numpy as np

from tests.support.runs.traces import Trace

_FILES = "process_mapped_file_bytes"
_RESIDENT, _DEVICE = "process_resident_memory_bytes", "cuda_memory_allocated_bytes"


def memory(
    seed: int,
    *,
    course: str = "healthy",
    ranks: int = 4,
    rank: int = -1,
    at: int = 0,
    until: int = 100_000,
    leak: float = 3e6,
    level: float = 6e8,
    noise: float = 1e7,
    steps: int = 600,
    every: int = 1,
    limit: float = 0.0,
    epoch: int = 0,
    device: bool = False,
    hosts: int = 1,
    posted: bool = True,
    mapped: bool = False,
    length: float = 0.0,
    elements: int = 0,
) -> Trace:
    """Memory of each process, in bytes.

    Args:
        course: what it does but for the leak: `healthy` fills its pools at first and then goes up
            and down with the batches; `evaluates` takes a step up at some evaluations; `peaks`
            keeps the most that any batch needed; `fills` approaches a limit ever more slowly;
            `root` grows as the square root of the steps; `walks` without an aim; `collects` gives
            back now and then what had gathered.
        rank: whose memory grows by `leak` a step from `at` to `until`; -1: that of all.
        every: posted at one step in this number.
        limit: what the machine, or the device, has; 0: nobody says.
        epoch: batches that the loader gives.
        device: it is the device's, that of the process stays.
        mapped: what grows are pages of a file that is read through its mapping.
        length: seconds of a step; 0: not known.
        elements: numbers in each of the 32 samples of a step; 0: not known.
    """
    random = np.random.default_rng(seed)
    now = np.arange(steps)
    batches = noise * np.abs(random.standard_normal((ranks, steps)))
    base = level * (1 - 0.5 * np.exp(-now / 8.0))
    if course == "evaluates":
        base = base + 1e8 * (now > 120) + 6e7 * (now > 250) + 4e7 * (now > 400)
    elif course == "peaks":
        batches = np.maximum.accumulate(2e8 * random.lognormal(0, 0.7, (ranks, steps)), axis=1)
    elif course == "fills":
        base = base + 4e8 * (1 - np.exp(-now / 100.0))
    elif course == "root":
        base = base + 3e7 * np.sqrt(now)
    elif course == "walks":
        batches = np.cumsum(1e7 * random.standard_normal((ranks, steps)), axis=1)
    elif course == "collects":
        base = base + 4e6 * (now % 90)
    values = base + batches
    grown = leak * np.clip(np.minimum(now, until) - at, 0, None)
    values[slice(None) if rank < 0 else [rank]] += grown
    series = {_RESIDENT: values, "loss": random.random((ranks, steps))}
    if device:
        series = {**series, _RESIDENT: values - grown * (rank < 0), _DEVICE: values}
        if rank >= 0:
            series[_RESIDENT] = values.copy()
            series[_RESIDENT][rank] -= grown
    if mapped:
        series[_FILES] = 1e8 + grown + np.zeros((ranks, 1))
    if epoch:
        series["loader_batches"] = np.full((ranks, steps), float(epoch))
    if length:
        series["step_seconds"] = length * random.uniform(0.9, 1.1, (ranks, steps))
    if elements:
        series["samples"] = np.full((ranks, steps), 32.0)
        series["sample_elements"] = np.full((ranks, steps), float(elements))
    if not posted:
        series.pop(_RESIDENT)
    present = np.zeros((ranks, steps), dtype=bool)
    present[:, ::every] = True
    return Trace(
        f"memory-{course}",
        seed,
        now,
        series,
        present={name: present for name in (_RESIDENT, _DEVICE, _FILES) if name in series},
        configs={r: {"memory_limits": {"process": limit, "cuda": limit}} for r in range(ranks)}
        if limit
        else {},
        hosts=tuple(f"node{r * hosts // ranks}" for r in range(ranks)),
    )
