"""Replicas that train a small model by momentum, and leave each other in one of many ways.

What is compared is computed from arrays that really differ, by the server's own `compare` module.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison import compare
from rankscope.server.window import Comparison
from tests.support.runs.traces import Trace

NAMES = ("embed.weight", "hidden.weight", "hidden.bias", "output.weight", "output.bias", "scale")
SHAPES = ((20, 16), (16, 16), (16,), (10, 16), (10,), (1,))
_TABLE = compare.LabelledTable(NAMES, SHAPES, ("parameters",) * len(NAMES))
_BUCKETS = 32
_COUNTS = tuple(int(np.prod(shape)) for shape in SHAPES)
_SIGNS = tuple(np.random.default_rng(n).choice([-1.0, 1.0], n) for n in _COUNTS)
_PLACES = tuple(np.arange(n) % _BUCKETS for n in _COUNTS)
_WEIGHTS = tuple(
    np.arange(1, 2 * n, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) for n in _COUNTS
)

Tensors = list[np.ndarray]


@dataclass
class _Model:
    """What one rank holds: parameters, momentum, and what it reports of them."""

    tensors: Tensors
    velocity: Tensors


def _words_of(values: Tensors) -> np.ndarray:
    return np.array(
        [
            (v.astype(np.float32).ravel().view(np.uint32).astype(np.uint64) * weight).sum()
            for v, weight in zip(values, _WEIGHTS, strict=True)
        ],
        dtype=np.uint64,
    )


def _print_of(step: int, stage: str, values: Tensors) -> wire.Fingerprint:
    sketches = np.zeros((len(values), _BUCKETS))
    for row, (tensor, signs) in enumerate(zip(values, _SIGNS, strict=True)):
        flat = tensor.astype(np.float32).astype(np.float64).ravel()
        sketches[row] = np.bincount(_PLACES[row], weights=signs * flat, minlength=_BUCKETS)
    return wire.Fingerprint(
        step=step, stage=stage, table="parameters", digests=_words_of(values), sketches=sketches
    )


def apart(
    seed: int,
    *,
    fault: str = "none",
    ranks: int = 4,
    rank: int = 2,
    at: int = 40,
    steps: int = 120,
    tensor: str = "hidden.weight",
    words_every: int = 1,
    prints_every: int = 16,
    dense: int = 8,
    synchronised_every: int = 0,
    repaired_at: int = -1,
    buffers: str = "",
    wrapped: bool = True,
) -> Trace:
    """Ranks that train a small model by momentum, and one of them (or all) leaves the others.

    With `buffers` each keeps running statistics, too: `alike`, of its `own` batches, or the `one`
    rank's are its own for ten steps. Where they are not `wrapped`, they say that nothing keeps them
    equal.

    Everything is a real float32 computation: gradients of noise around a quadratic, averaged unless
    the fault is that they are not.
    """
    random = np.random.default_rng(seed)
    target = NAMES.index(tensor)
    start = [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    models = [
        _Model([t.copy() for t in start], [np.zeros_like(t) for t in start]) for _ in range(ranks)
    ]
    everyone = np.arange(ranks, dtype=np.int64)
    statistics = [[np.zeros_like(t) for t in start] for _ in range(ranks)]
    found: list[Comparison] = []
    rates = np.full((ranks, steps), 0.05)
    norms = np.zeros((ranks, steps))

    def compare_now(step: int, stage: str, values: list[Tensors], *, tensorwise: bool) -> None:
        if tensorwise:
            prints = [_print_of(step, stage, v) for v in values]
            found.append(compare.compare_fingerprints(step, stage, everyone, prints, _TABLE))
        else:
            words = compare.fold(np.stack([_words_of(v) for v in values]))
            found.append(compare.compare_digests(step, stage, everyone, words))

    if fault == "start":
        models[rank].tensors = [
            random.standard_normal(shape).astype(np.float32) for shape in SHAPES
        ]
    compare_now(0, "start", [m.tensors for m in models], tensorwise=True)
    for step in range(steps):
        tensorwise = step < dense or step % prints_every == 0
        words = tensorwise or step % words_every == 0
        if fault in ("bitflip", "bitflip-unseen", "inside-bitflip") and step == at:
            flat = models[rank].tensors[target].view(np.uint32).ravel()
            flat[random.integers(flat.size)] ^= np.uint32(1 << 20)
        if fault == "written" and step == at:
            models[rank].tensors[target] *= np.float32(0.99)
        if fault != "bitflip-unseen" and words:
            touched = fault in ("bitflip", "inside-bitflip", "written") and step == at
            before = np.zeros(ranks, dtype=np.uint64)
            before[rank] = 12345 if touched else 0
            found.append(compare.compare_digests(step, "outside_optimizer", everyone, before))
        local = [
            [(0.05 * m + random.standard_normal(m.shape)).astype(np.float32) for m in model.tensors]
            for model in models
        ]
        mean = [np.mean([g[i] for g in local], axis=0, dtype=np.float32) for i in range(len(NAMES))]
        applied = [[g.copy() for g in mean] for _ in range(ranks)]
        if fault == "skipped" and step == at:
            applied[rank][target] = local[rank][target]
        if fault == "bypassed" and step >= at:
            applied = local
        if fault == "subgroups" and step >= at:
            half = ranks // 2
            for side in (range(half), range(half, ranks)):
                part = [
                    np.mean([local[r][i] for r in side], axis=0, dtype=np.float32)
                    for i in range(len(NAMES))
                ]
                for r in side:
                    applied[r] = [g.copy() for g in part]
        if synchronised_every and fault in ("none", "missed", "rate"):
            applied = local
        if fault == "rate" and step >= at:
            rates[rank, step:] = 0.02
        # An optimizer that reduces in its own step is given the ranks' own.
        given = local if fault.startswith("inside") else applied
        for r, model in enumerate(models):
            norms[r, step] = np.sqrt(
                sum(float((g.astype(np.float64) ** 2).sum()) for g in given[r])
            )
            for i, gradient in enumerate(applied[r]):
                model.velocity[i] = np.float32(0.9) * model.velocity[i] + gradient
                if fault == "state" and r == rank and step == at:
                    model.velocity[i] = np.zeros_like(gradient)
                update = np.float32(rates[r, step]) * model.velocity[i]
                if fault == "drift" and r == rank and step >= at:
                    update = update * np.float32(1 + 2e-7)
                if fault == "step-skipped" and r == rank and step == at:
                    update = np.zeros_like(update)
                model.tensors[i] = (model.tensors[i] - update).astype(np.float32)
        if synchronised_every and step % synchronised_every == synchronised_every - 1:
            together = [
                np.mean([m.tensors[i] for m in models], axis=0, dtype=np.float32)
                for i in range(len(NAMES))
            ]
            for r, model in enumerate(models):
                if not (fault == "missed" and r == rank and step >= at):
                    model.tensors = [t.copy() for t in together]
        if step == repaired_at:
            for model in models:
                model.tensors = [t.copy() for t in models[(rank + 1) % ranks].tensors]
                model.velocity = [t.copy() for t in models[(rank + 1) % ranks].velocity]
        if tensorwise:
            compare_now(step, "reduced_gradient", given, tensorwise=True)
        else:
            found.append(
                compare.compare_values(
                    step, "reduced_gradient", everyone, norms[:, step], tolerance=1e-6
                )
            )
        if fault == "state":
            words_of_state = compare.fold(np.stack([_words_of(m.velocity) for m in models]))
            found.append(compare.compare_digests(step, "optimizer_state", everyone, words_of_state))
        found.append(
            compare.compare_values(
                step, "hyperparameters", everyone, rates[:, step], tolerance=1e-12
            )
        )
        for r in range(ranks) if buffers else ():
            own = buffers == "own" or (buffers == "one" and r == rank and at <= step < at + 10)
            statistics[r] = [
                np.float32(0.9 if own else 0) * kept + np.float32(0.1) * new
                for kept, new in zip(statistics[r], local[r] if own else mean, strict=True)
            ]
        if words and buffers:
            compare_now(step, "buffers", statistics, tensorwise=tensorwise)
        if words:
            compare_now(step, "parameters", [m.tensors for m in models], tensorwise=tensorwise)
    course = (
        2.0
        * np.exp(-0.02 * np.arange(steps))
        * np.exp(0.1 * random.standard_normal((ranks, steps)))
    )
    return Trace(
        f"apart-{fault}",
        seed,
        np.arange(steps),
        {"loss": course, "lr": rates, "grad_norm": norms},
        comparisons=tuple(found),
        config={} if wrapped else {"data_parallel": {}},
    )
