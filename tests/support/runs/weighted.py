"""Reductions in which ranks have any weights, posted link by link, through the server's aligner."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.runs.posted import SHAPES, Posted, Said, config_of, model_word, table_of, word

SAMPLES = 16


def weighted(
    seed: int,
    *,
    fault: str = "none",
    times: float = 1.0,
    by: str = "",
    posted: tuple[str, ...] = ("samples",),
    ragged: bool = False,
    short: bool = False,
    sums: bool = False,
    ranks: int = 4,
    rank: int = 2,
    at: int = 24,
    steps: int = 60,
    every: int = 4,
    recurs: int = 1,
    groups: int = 1,
    micro: int = 1,
    predivided: bool = False,
) -> Posted:
    """A job of which every step's gradients are drawn afresh, and reduced in float32.

    Args:
        fault: from step `at` on, `factor`: the result is a multiple of what it should be; `rank`:
            what one rank puts in is; `replaced`: it is that of the rank after it; `frozen`: the
            result is that of step `at`. From the first step on, `fixed`: ranks have weights of
            their own; `drawn`: at each step others. From step `at` on `clipped`: each rank's
            gradient is clipped to the norm `times` before; `late`: `rank` puts in what it had at
            the step before.
        times: see `fault`.
        recurs: the fault is there at one of so many steps.
        by: `tokens` or `samples` that ranks count by; empty for 1/N each.
        posted: which of these are posted.
        ragged: ranks have unequal numbers of them, others at each step.
        short: `rank` has an eighth of the others.
        sums: each rank's gradient is a sum over its samples, and no mean.
        groups: parts of every tensor, one on each of this number of consecutive ranks, that have
            the same gradients: each is reduced over the ranks that hold it.
        micro: backward passes of a step.
        predivided: losses are cross entropies divided by the number of ranks.
    """
    random = np.random.default_rng(seed)
    signal = [random.standard_normal(s) / 4 for s in SHAPES]
    fixed = random.uniform(0.5, 1.5, ranks)
    run: list[list[Said]] = []
    frozen: dict[int, list[np.ndarray]] = {}
    old: list[list[np.ndarray]] = []
    for step in range(steps):
        hit = step >= at and (step - at) % recurs == 0
        samples = np.full(ranks, float(SAMPLES))
        if ragged:
            samples = random.integers(2, SAMPLES + 1, ranks).astype(float)
        if short:
            samples[rank] = SAMPLES // 8
        counts = {"samples": samples, "tokens": np.round(samples * random.uniform(20, 60, ranks))}
        if not ragged:
            counts["tokens"] = 32 * samples
        local = []
        for r in range(ranks):
            draw = np.random.default_rng((seed, step, r // groups))
            size = samples[r - r % groups]
            noise = [draw.standard_normal(s) / np.sqrt(size) for s in SHAPES]
            scale = size if sums else 1.0
            local.append(
                [(scale * (g + n)).astype(np.float32) for g, n in zip(signal, noise, strict=True)]
            )
        row = [Said() for _ in range(ranks)]
        for part in range(groups):
            members = range(part, ranks, groups)
            held = counts[by][list(members)] if by else np.ones(len(members))
            if fault in ("fixed", "drawn"):
                held = fixed[list(members)] if fault == "fixed" else random.uniform(1, 9, len(held))
            shares = dict(zip(members, held / held.sum(), strict=True))
            if hit and fault == "clipped":
                shares = {r: w * min(1.0, times / _norm(local[r])) for r, w in shares.items()}
            if hit and fault == "rank" and rank in shares:
                shares[rank] *= times
            if hit and fault == "replaced" and rank in shares:
                after = members[(members.index(rank) + 1) % len(members)]
                shares[after], shares[rank] = shares[after] + shares[rank], 0.0
            reduced = [np.zeros(s, np.float32) for s in SHAPES]
            for r in members:
                put_in = old[r] if hit and fault == "late" and r == rank else local[r]
                for total, gradient in zip(reduced, put_in, strict=True):
                    total += np.float32(shares[r]) * gradient
            if hit and fault == "factor":
                reduced = [g * np.float32(times) for g in reduced]
            if hit and fault == "frozen":
                reduced = frozen.setdefault(part, reduced)
            for r in members:
                said = row[r]
                said.scalars |= {name: float(counts[name][r]) for name in posted}
                said.scalars |= {
                    "loss": float(2 * np.exp(-0.02 * step)),
                    "lr": 0.05,
                    "micro_steps": float(micro),
                    "optimizer_steps": float(step + 1),
                    "grad_norm": _norm(reduced),
                    "grad_norm_local": _norm(local[r]),
                }
                if predivided:
                    loss = said.scalars["loss"]
                    said.scalars |= {
                        "loss": loss / ranks,
                        "explained_deviance": 1 - loss / 2.3,
                        "target_deviance": 2.2,
                        "target_share": 2.2 / 2.3,
                    }
                said.words |= {"batch": word(step, r), "parameters": model_word(reduced)}
                if step < 10 or step % every == 0:
                    said.print(step, "local_gradient", local[r])
                    said.print(step, "reduced_gradient", reduced)
        run.append(row)
        old = local
    tables = [
        {"parameters": table_of("" if groups == 1 else f"Shard(0)@{r % groups}/{groups}")}
        for r in range(ranks)
    ]
    configs: list[dict[str, Any]] = [config_of() for _ in range(ranks)]
    return Posted(run, configs, tables)


def _norm(tensors: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in tensors)))
