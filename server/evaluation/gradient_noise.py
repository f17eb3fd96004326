"""The gradient noise scale of a run over the steps, out of the database."""

from __future__ import annotations

import numpy as np
from sqlalchemy import Connection

from rankscope.agent.wire import Float64, Int64
from rankscope.server.detectors.mechanisms.noise_scale import SAME, NoiseCurve, moving
from rankscope.server.storage.reading import runs, series

# The mean of the squared norms of so many ranks, spread over all, stands for that of all of them:
# more would make the estimate of a step a little quieter, and moving means do that better.
_RANKS = 16
# Points of a rank: single steps where they fit, and else means of a few steps each, whose squares
# are a little smaller than the mean square.
_POINTS = 4_000


def read_noise(
    connection: Connection,
    *,
    run: int,
    world_size: int,
    from_step: int | None = None,
    to_step: int | None = None,
) -> NoiseCurve | None:
    """The noise scale over a range of steps, both ends included; None where it is not computable.

    It is where all ranks have posted the norms of their own gradients, at 50 steps or more, and
    agree on that of the reduced one.
    """
    seen = runs.ranks_seen(connection, runs=[run]).get(run, ())
    if world_size < 2 or len(seen) != world_size:
        return None
    ranks = sorted({seen[i] for i in np.linspace(0, world_size - 1, _RANKS).astype(int)})

    def read(metric: str, steps: Int64 | None = None) -> tuple[Int64, Float64]:
        """Steps [S], and values [R, S]; NaN where a rank has no point."""
        found = series.read_series(
            connection,
            run=run,
            metric=metric,
            ranks=ranks,
            from_step=from_step,
            to_step=to_step,
            max_points=_POINTS,
        )
        if steps is None:
            steps = np.unique(np.concatenate([s.steps for s in found] or [np.empty(0, np.int64)]))
        values = np.full((len(ranks), len(steps)), np.nan)
        for one in found:
            there = np.isin(one.steps, steps)
            at = np.searchsorted(steps, one.steps[there])
            values[ranks.index(one.rank), at] = one.values[there]
        return steps, values

    steps, own = read("grad_norm_local")
    if not len(steps):
        return None
    before, after = (read(name, steps)[1] for name in ("grad_norm_preclip", "grad_norm"))
    clip, scale, samples = (
        _mean(read(name, steps)[1]) for name in ("clip_coefficient", "amp_scale", "samples")
    )
    # Where nothing was clipped or scaled, nobody posts by how much.
    clip, scale = (np.where(np.isnan(factor), 1.0, factor) for factor in (clip, scale))
    with np.errstate(divide="ignore", invalid="ignore"):
        big, same = _one_norm(np.where(np.isnan(before), after / clip, before))
        small = (own**2).mean(axis=0) / scale**2
    counted = bool(np.isfinite(samples).any())
    part = samples if counted else np.ones(len(steps))
    usable = same & np.isfinite(small) & np.isfinite(big) & np.isfinite(part)
    return moving(
        steps[usable],
        small[usable],
        big[usable] ** 2,
        part[usable],
        ranks=world_size,
        counted=counted,
    )


def _one_norm(norms: Float64) -> tuple[Float64, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """The norm [S] of ranks that all have one, and where they have."""
    high, low = np.fmax.reduce(norms, axis=0), np.fmin.reduce(norms, axis=0)
    return high, high - low <= SAME * high


def _mean(values: Float64) -> Float64:
    """Means [S] over the ranks that have a value; NaN where none has."""
    there = np.isfinite(values)
    counts = there.sum(axis=0)
    sums: Float64 = np.where(there, values, 0.0).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
