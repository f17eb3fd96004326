"""Trainings that report single tensors, batches and gradients, in which something is off.

What is posted is computed from arrays: gradients of a signal and its noise, sketches of what a
compression leaves, norms tensor by tensor.
"""

from __future__ import annotations

import math

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison import compressed_shares, fidelity
from rankscope.server.window import LayerNumbers, Reduction
from tests.support.runs.traces import Trace

NAMES = ("inner.weight", "inner.bias", "hidden.weight", "hidden.bias", "head.weight", "head.bias")
SHAPES = ((32, 64), (32,), (32, 32), (32,), (10, 32), (10,))
TENSORS = wire.TensorTable(NAMES, SHAPES, ("float32",) * 6, ("",) * 6)
MODULES = wire.TensorTable(
    ("act1", "act2", "gate"), ((),) * 3, ("ReLU", "ReLU", "Sigmoid"), ("",) * 3
)


def layered(
    seed: int,
    *,
    fault: str = "none",
    at: int = 120,
    steps: int = 300,
    ranks: int = 2,
    every: int = 4,
    without: tuple[str, ...] = (),
    stands: bool = False,
    barred: int = -1,
) -> Trace:
    """Layers that have gradients, or get none from step `at` on.

    Args:
        fault: `cut` (all before the head), `cut-for-a-while`, `one` (the first weight), `all` (no
            gradient, and a loss), `learned` (no gradient, and no loss), `never` (the first layer),
            `unused-head` (the last one), `experts` (one of the layers has none now and then),
            `missing` (cut, as NaN), `dead`, `some-dead` and `half-dead` (units), `saturated`,
            `batches` (units idle by chance), `fading` (a hundredth from layer to layer),
            `faded` (since that step), `fading-and-learning` and `fading-surrogate`, `large`,
            `one-large` and `cold` (updates).
        every: steps from one sample of single tensors to the next.
        without: metrics that are not posted.
        stands: the loss falls no further from `at` on.
        barred: tensors of modules that are called without gradients; -1: not posted.
    """
    random = np.random.default_rng(seed)
    at_step = np.arange(steps)
    falls = 0.0 if fault in ("fading", "faded", "fading-surrogate") else 0.01
    course = 2.3 * np.exp(-falls * np.minimum(at_step, at if stands else steps)) + 0.05
    loss = course * np.exp(0.1 * random.standard_normal((ranks, steps)))
    if fault == "learned":
        loss[:, at:] = 0.0
    if fault == "fading-surrogate":
        loss -= 2.4
    missing = np.zeros(steps)
    made: list[LayerNumbers] = []
    ratios = np.zeros(steps)
    rate = np.full(steps, 0.01)
    if fault == "cold":
        rate[150:] = 1e-4
    for step in range(steps):
        hit = step >= at
        norms = np.exp(0.2 * random.standard_normal(6)) * course[step]
        if fault.startswith("fading") or (fault == "faded" and hit):
            norms *= np.repeat([1e-5, 3e-3, 1.0], 2)
        gone = {
            "cut": range(4) if hit else (),
            "missing": range(4) if hit else (),
            "cut-for-a-while": range(4) if at <= step < at + 60 else (),
            "one": (0,) if hit else (),
            "all": range(6) if hit else (),
            "learned": range(6) if hit else (),
            "never": (0, 1),
            "unused-head": (4, 5),
            "experts": (2, 3) if random.random() < 0.2 else (),
        }.get(fault, ())
        norms[list(gone)] = np.nan if fault == "missing" else 0.0
        missing[step] = len(gone)
        size = {"large": 0.08 if hit else 2e-3, "cold": 0.5 if step >= 150 else 2e-3}.get(
            fault, 2e-3
        )
        updates = size * np.exp(0.3 * random.standard_normal(6))
        if fault == "one-large":
            updates[2] *= 200
        ratios[step] = float(np.median(updates))
        if step % every:
            continue
        tell = [("grad_norm", norms), ("update_ratio", updates), ("weight_norm", np.ones(6))]
        for rank in range(ranks):
            made += [
                LayerNumbers(step=step, rank=rank, metric=m, table=TENSORS, values=v.copy())
                for m, v in tell
            ]
            made += _units(fault, step, rank, hit, random)
    made.sort(key=lambda one: (one.step, one.metric, one.rank))
    counts = np.broadcast_to(missing, (ranks, steps)).copy()
    looked = np.zeros((ranks, steps), dtype=bool)
    looked[:, ::every] = True
    series = {
        "loss": loss,
        "tensors_without_gradient": counts,
        "update_ratio": np.where(looked, ratios, 0.0),
        "lr": np.broadcast_to(rate, (ranks, steps)).copy(),
    }
    if barred >= 0:
        series["tensors_called_without_gradient"] = np.full((ranks, steps), float(barred))
    sampled = {"update_ratio", "tensors_called_without_gradient"} & (series.keys() - {*without})
    return Trace(
        "layered",
        seed,
        at_step,
        {name: values for name, values in series.items() if name not in without},
        dict.fromkeys(sampled, looked),
        layers=tuple(one for one in made if one.metric not in without),
    )


def _units(
    fault: str, step: int, rank: int, hit: bool, random: np.random.Generator
) -> list[LayerNumbers]:
    lasting = random.uniform(0.0, 0.1, 3)
    if fault == "dead" and hit:
        lasting[0] = 1.0
    if fault == "some-dead" and hit:
        lasting[1] = 0.6
    if fault == "half-dead" and hit:
        lasting[1] = 0.55 if step // 40 % 2 else 0.45
    if fault == "batches":
        # Idle on one rank alone.
        lasting[0] = 0.7 if rank == step // 4 % 2 else 0.2
    if fault == "saturated" and hit:
        lasting[2] = 0.8
    relu = np.array([True, True, False])
    return [
        LayerNumbers(
            step=step, rank=rank, metric=m, table=MODULES, values=np.where(mine, lasting, np.nan)
        )
        for m, mine in (("dead_units_lasting", relu), ("saturated_units_lasting", ~relu))
    ]


def odd_batches(
    seed: int,
    *,
    at: tuple[int, ...] = (),
    rank: int = 1,
    ranks: int = 4,
    steps: int = 500,
    size: float = 30.0,
    lasts: int = 1,
    together: bool = False,
    same: str = "",
    sigma: float = 0.25,
    start: float = 2.4,
) -> Trace:
    """Losses of ranks in step, of which one is odd at some steps.

    Args:
        sigma: standard deviation of the losses' logarithm.
        start: the loss before anything is learned.
        lasts: for this number of consecutive steps.
        together: whether all ranks' are.
        same: what the odd batches have in common: the whole `batch`, or a `sample`.
    """
    random = np.random.default_rng(seed)
    course = (start - 0.1) * np.exp(-0.02 * np.arange(steps)) + 0.1
    loss = course * np.exp(sigma * random.standard_normal((ranks, steps)))
    words = random.integers(0, 2**63, (ranks, steps)).astype(np.uint64)
    rows = random.integers(0, 2**63, (ranks, steps)).astype(np.uint64)
    for step in at:
        loss[slice(None) if together else rank, step : step + lasts] *= size
        if same == "batch":
            words[rank, step] = 77
        if same == "sample":
            rows[rank, step] = (rows[rank, step] >> np.uint64(32) << np.uint64(32)) | np.uint64(
                4242
            )
    return Trace(
        "odd_batches",
        seed,
        np.arange(steps),
        {"loss": loss},
        words={"batch": words, "rows/0": rows},
    )


def noisy_gradients(
    seed: int,
    *,
    scale: float,
    batch: int = 16,
    ranks: int = 4,
    steps: int = 300,
    falls: float = 0.0,
    how: str = "mean",
    without: tuple[str, ...] = (),
) -> Trace:
    """Gradients of a signal of length 1 and noise of which the scale is given, in 4,000 dimensions.

    Args:
        falls: by what share the loss falls in a step; the accuracy is that of guessing, without.
        how: the reduced gradient is the `mean`, the `sum`, or `clipped` by hand to a tenth; each
            rank's `own`, where nothing is reduced; or there are `parts`: each rank has another one,
            and the same batch.
    """
    random = np.random.default_rng(seed)
    size = 4000
    signal = np.zeros(size)
    signal[0] = 1.0
    own = np.empty((ranks, steps))
    whole = np.empty((ranks, steps))
    for step in range(steps):
        sigma = np.sqrt(scale / size / batch)
        gradients = signal + sigma * random.standard_normal((ranks, size))
        own[:, step] = np.linalg.norm(gradients, axis=1)
        factor = {"sum": ranks, "clipped": 0.1}.get(how, 1.0)
        whole[:, step] = factor * np.linalg.norm(gradients.mean(axis=0))
        if how in ("own", "parts"):
            # Batches differ in how well they are known, parts of a model in size.
            lengths = np.exp(0.3 * random.standard_normal(ranks))
            own[:, step] *= np.arange(1, ranks + 1) if how == "parts" else lengths
            whole[:, step] = own[:, step]
    loss = (
        2.0
        * np.exp(-falls * np.arange(steps))
        * np.exp(0.05 * random.standard_normal((ranks, steps)))
    )
    series = {
        "loss": loss,
        "grad_norm": whole,
        "grad_norm_local": own,
        "samples": np.full((ranks, steps), float(batch)),
        "accuracy": np.full((ranks, steps), 0.9 if falls else 0.1),
    }
    return Trace(
        "noisy_gradients",
        seed,
        np.arange(steps),
        {name: values for name, values in series.items() if name not in without},
    )


def compressed(
    seed: int,
    *,
    share: float,
    after: int = 0,
    hooks: tuple[str, ...] = ("powerSGD_hook",),
    feedback: bool = False,
    noise: float = 0.0,
    clip: float = 1.0,
    times: float = 1.0,
    at: int = 0,
    shrinks: bool = False,
    counts: float = 1.0,
    unlike: bool = False,
    ranks: int = 4,
    steps: int = 120,
    every: int = 4,
) -> Trace:
    """Reductions that keep the largest elements of the mean alone, seen by their sketches.

    Args:
        share: of the elements that is kept, from step `after` on.
        feedback: what is left out of a sample is added to the next one.
        noise: standard deviation of what is added to the gradient, in those of the mean.
        clip: coefficient that all gradients are multiplied by; it is posted.
        times: what comes out is multiplied by this from step `at` on.
        shrinks: what goes in is divided by `times` from step `at` on.
        counts: what the last rank counts from step `at` on.
        unlike: ranks count anything between a half and one, as unlike shards make of it.
    """
    random = np.random.default_rng(seed)
    weights = np.linspace(0.5, 1.0, ranks) if unlike else np.ones(ranks)
    norms = np.full((ranks, steps), np.nan)
    tensors, elements, buckets = 6, 2000, 64
    signs = random.choice([-1.0, 1.0], elements)
    places = random.integers(0, buckets, elements)
    turn = np.zeros((elements, buckets))
    turn[np.arange(elements), places] = signs
    made = []
    memory, before = np.zeros((tensors, elements)), None
    for step in range(0, steps, every):
        local = random.standard_normal((ranks, tensors, elements))
        if shrinks and step >= at:
            local /= times
        if step >= at:
            weights[-1] = counts
        sent = (weights[:, None, None] * local).mean(axis=0)
        whole = mean = sent + (memory if feedback else 0.0)
        if step >= after:
            floor = np.quantile(np.abs(mean), 1.0 - share, axis=1, keepdims=True)
            mean = np.where(np.abs(mean) >= floor, mean, 0.0)
        memory = whole - mean
        mean = clip * (mean + noise / math.sqrt(ranks) * random.standard_normal(mean.shape))
        if step >= at:
            mean = times * mean
        norms[:, step] = np.sqrt((mean**2).sum())
        made.append(
            Reduction(
                step=step,
                ranks=np.arange(ranks),
                tensor_count=tensors,
                known=0 if hooks else tensors,
                cosine=fidelity.cosine(local @ turn, mean @ turn),
                pattern="" if hooks else "other",
                kept=float("nan") if hooks else fidelity.kept(local @ turn, mean @ turn, 1.0),
                emptied=0 if hooks else fidelity.emptied(local @ turn, mean @ turn, before),
                shares=compressed_shares.of_ranks(local @ turn, mean @ turn),
            )
        )
        before = mean @ turn
    return Trace(
        "compressed",
        seed,
        np.arange(steps),
        {
            "loss": np.full((ranks, steps), 1.0),
            "clip_coefficient": np.full((ranks, steps), clip),
            "grad_norm": norms,
        },
        reductions=tuple(made),
        config={"data_parallel": {"communication_hooks": list(hooks)}} if hooks else {},
    )


def stages(
    seed: int,
    *,
    at: int = 80,
    until: int = 10**9,
    every: int = 1,
    idle: float = 0.0,
    loss: float = 0.5,
    apart: bool = False,
) -> Trace:
    """Two stages of a pipeline, each with parameters of its own; the first one gets no gradient.

    Args:
        at, until: steps between which that is so.
        every: steps from one observation to the next.
        idle: share of the steps at which it has none from the start on.
        loss: what the loss of both comes to.
        apart: the second one is sampled at every third step, and counts tensors without a gradient.
    """
    random = np.random.default_rng(seed)
    each = np.arange(0, 260, every)
    shape = (2, len(each))
    norms = 0.02 * np.exp(0.2 * random.standard_normal(shape))
    gone = (each >= at) & (each < until) | (random.random(len(each)) < idle)
    norms[0, gone] = 0.0
    course = loss + (1 - loss) * np.exp(-each / 20)
    losses = course * np.exp(0.05 * random.standard_normal(shape))
    if not loss:
        losses[0, gone] = 0.0
    series = {"loss": losses, "grad_norm": norms, "tensors_without_gradient": np.zeros(shape)}
    there = np.ones(shape, dtype=bool)
    if apart:
        there[1] = each % 3 == 0
        series["tensors_without_gradient"][0] = np.where(gone, 4.0, 0.0)
    sampled = {"grad_norm": there, "tensors_without_gradient": there}
    config = {"parameter_tensors": 4}
    return Trace("stages", seed, each, series, sampled, config=config)
