"""Ranks that hold shards of one gradient and clip each by the norm of their own shard.

Of shards the norm is the root of the sum of squares over all ranks, and the factor that follows
from it is the same everywhere. Where each rank takes the norm of what it holds, each multiplies its
shard by a factor of its own, and the gradient as a whole points elsewhere. Two traces show it: the
factors themselves, where torch's functions apply them, and shards that are cut down to one and the
same norm on several ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.wording import count, listing, number, ranks
from rankscope.server.window import Float64, Window

# Consecutive samples at which it has to be so.
_HELD = 3
# Factors, and norms that were cut to one limit, are the same within rounding of float32; torch adds
# 1e-6 to the norm that it divides by, which is 1e-4 of a norm of 0.01.
_SAME = 1e-4
# What is not the limit is another by this: a gradient of signs has a norm that never changes.
_OTHER = 1e-3


@dataclass(slots=True)
class OwnClips:
    """What was seen at the first of the samples.

    Attributes:
        ranks: that hold the shards.
        factors: rank -> what it multiplied its shard by; empty where only the norms show it.
        limit: norm to which several of them cut their shards; 0 where the factors show it.
    """

    ranks: tuple[int, ...]
    factors: Mapping[int, float]
    limit: float = 0.0


@dataclass(slots=True)
class ShardClipping(Condition[OwnClips]):
    """Follows the shards of a run.

    Attributes:
        run: consecutive samples at which it was so, and the first of them.
        limit: norm that was that of several ranks at the last sample; 0 for none.
        varies: ranks whose norm, or that of one of whose tensors, was seen to be another one.
        norms: rank -> norm at the last sample.
        layers: rank -> norms of its tensors at the last sample.
    """

    run: int = 0
    since: int = 0
    limit: float = 0.0
    varies: set[int] = field(default_factory=set)
    norms: dict[int, float] = field(default_factory=dict)
    layers: dict[int, Float64] = field(default_factory=dict)
    watch: Watch[OwnClips] = field(default_factory=lambda: Watch(clear_after=16))

    def take(self, window: Window) -> None:
        """Goes through the steps at which all ranks that share shards say what they hold."""
        groups = _groups(window)
        if not groups:
            return
        for made in window.layers:
            if made.metric == "grad_norm":
                before = self.layers.get(made.rank)
                if before is not None and before.shape == made.values.shape:
                    with np.errstate(invalid="ignore"):
                        other = np.abs(made.values - before) > _OTHER * np.abs(before)
                    if other.any():
                        self.varies.add(made.rank)
                self.layers[made.rank] = made.values
        for column, step in enumerate(window.steps.tolist()):
            self._step(window, groups, column, int(step))

    def finding(self, episode: Episode[OwnClips]) -> Finding:
        """What is reported of an episode."""
        return _finding(episode)

    def _step(self, window: Window, groups: list[tuple[int, ...]], column: int, step: int) -> None:
        found: OwnClips | None = None
        judged = False
        for members in groups:
            factors = _values(window, "clip_coefficient", members, column)
            if factors is not None:
                judged = True
                if np.ptp(factors) > _OTHER * float(factors.max()):
                    said = dict(zip(members, factors.tolist(), strict=True))
                    found = found or OwnClips(members, said)
            norms = _values(window, "grad_norm", members, column)
            if norms is not None:
                judged = True
                found = found or self._of_norms(members, norms)
        if not judged:
            return
        if found is None:
            self.run, self.limit = 0, 0.0
            self.watch.good(step)
            return
        self.since = self.since if self.run else step
        self.run += 1
        if self.run >= _HELD:
            self.watch.bad(step, found, first_step=self.since)

    def _of_norms(self, members: tuple[int, ...], norms: Float64) -> OwnClips | None:
        """Whether several ranks' shards have the norm that they had at the sample before."""
        limit = float(norms.max())
        at_limit = norms >= (1 - _SAME) * limit
        for rank, norm in zip(members, norms.tolist(), strict=True):
            before = self.norms.get(rank)
            if before is not None and abs(norm - before) > _OTHER * before:
                self.varies.add(rank)
            self.norms[rank] = norm
        alike = [rank for rank, at in zip(members, at_limit.tolist(), strict=True) if at]
        same = not self.limit or abs(limit / self.limit - 1.0) <= _SAME
        self.limit = limit
        if limit > 0 and len(alike) > 1 and same and sum(r in self.varies for r in alike) > 1:
            return OwnClips(members, {}, limit)
        return None


def _groups(window: Window) -> list[tuple[int, ...]]:
    """Ranks over which one replica is dealt out, as they report at attach."""
    found: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank in window.ranks.tolist():
        said = (window.configs.get(rank) or {}).get("sharded_over")
        if not isinstance(said, Mapping):
            continue
        first, step, many = (said.get(key) for key in ("first", "step", "count"))
        if isinstance(first, int) and isinstance(step, int) and isinstance(many, int):
            found[first, step, many].append(rank)
    return [tuple(r) for (_, _, many), r in sorted(found.items()) if len(r) == many > 1]


def _values(window: Window, metric: str, members: tuple[int, ...], column: int) -> Float64 | None:
    """Finite numbers of all of some ranks at a step; None where one has none."""
    series = window.series.get(metric)
    if series is None:
        return None
    rows = np.flatnonzero(np.isin(window.ranks, members))
    values: Float64 = series.values[rows, column]
    if not series.present[rows, column].all() or not np.isfinite(values).all():
        return None
    return values


def _finding(episode: Episode[OwnClips]) -> Finding:
    facts, step = episode.facts, episode.first_step
    if facts.factors:
        said = listing([f"{value:.4g} on rank {r}" for r, value in facts.factors.items()], most=4)
        seen = f"at step {step + _HELD - 1} gradients were multiplied by {said}"
    else:
        seen = (
            f"the shards of several ranks had a norm of {number(facts.limit)} at consecutive "
            "samples, and theirs varies otherwise"
        )
    return episode.finding(
        kind="reduction.wrong",
        key="shards",
        severity="warning",
        title=f"Each rank clips its shard of the gradient by that shard's norm since step {step}",
        ranks=facts.ranks,
        stage="clipped_gradient",
        cause=(
            f"{ranks(facts.ranks).capitalize()} hold shards of one gradient, and {seen}: each "
            "clips by the norm of what it holds, and not by that of the whole gradient. Parts of "
            "one gradient are scaled differently, so that it points elsewhere, and its norm "
            f"exceeds the limit. It was seen at {count(episode.seen + _HELD - 1, 'sample')}."
        ),
        remedy=(
            "Under FSDP2 call `clip_grad_norm_` on the sharded parameters themselves (DTensors), "
            "under FullyShardedDataParallel its own `clip_grad_norm_`. By hand, all-reduce the "
            "sum of squares over the ranks that hold the shards before the root."
        ),
        evidence={
            "pattern": "shards",
            "factors": {str(rank): value for rank, value in facts.factors.items()},
            "limit": facts.limit,
            "observed": episode.seen,
        },
    )
