"""Runs that are held against earlier ones of their project, of other seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rankscope.server.window import Baselines, SettingBeside
from rankscope.server.window.baselines import BUCKETS, widths
from tests.support.runs.traces import Trace


def in_curves(courses: Sequence[np.ndarray], which: str = "mean") -> dict[int, np.ndarray]:
    """Values at the steps from 0 on of several runs, in buckets as the server keeps them."""
    pick = {"mean": np.nanmean, "low": np.nanmin, "high": np.nanmax}[which]
    shortest = min(map(len, courses))
    found = {}
    for width in widths(shortest - 1):
        whole = np.full((len(courses), BUCKETS * width), np.nan)
        for row, values in zip(whole, courses, strict=True):
            row[: len(values)] = values[: len(row)]
        each = whole.reshape(len(courses), BUCKETS, width)
        some = np.isfinite(each).any(axis=2)
        made = np.full(some.shape, np.nan, np.float32)
        made[some] = pick(each[some], axis=1)
        found[width] = made
    return found


def baselines_of(
    courses: Mapping[str, Sequence[np.ndarray]],
    *,
    differing: Mapping[str, tuple[object, object]] | None = None,
    established: bool = True,
    elsewhere: bool = False,
) -> Baselines:
    """Baselines whose means over the ranks are known, by series.

    Args:
        differing: settings that were chosen otherwise: own value and theirs.
    """
    losses = courses["loss"]
    last = min(map(len, losses)) - 1
    top = widths(last)[-1]
    curves = {"loss": in_curves(losses)}
    for name, values in courses.items():
        if name != "loss":
            which = "high" if "memory" in name else "mean"
            curves[name] = {top: in_curves(values, which)[top]}
    if "step_seconds" in courses:
        curves["step_seconds/shortest"] = {top: in_curves(courses["step_seconds"], "low")[top]}
    settings = differing or {}
    return Baselines(
        of="candidate",
        runs=tuple(f"main-{n}" for n in range(len(losses))),
        last=last,
        curves=curves,
        elsewhere=(elsewhere,) * len(losses),
        differing=tuple(SettingBeside(k, own, theirs) for k, (own, theirs) in settings.items()),
        unlike=tuple(settings),
        established=established,
    )


def beside(
    seed: int,
    *,
    baselines: int = 10,
    worse: float = 0.0,
    since: int = 0,
    until: int = 10_000,
    spread: float = 0.005,
    metric: str = "",
    factor: float = 1.0,
    hiccups: float = 0.0,
    rate: float = 0.1,
    steps: int = 600,
    lasts: int = 600,
    ranks: int = 2,
    differing: bool = False,
    established: bool = True,
    elsewhere: bool = False,
) -> Trace:
    """A run of one seed, and as many of others.

    Args:
        baselines: number of the others, which have `lasts` steps.
        worse: share by which the loss is higher from step `since` until another.
        spread: standard deviation of the logarithm of the loss between seeds.
        metric: a series that is `factor` times as large from step `since` until another.
        hiccups: share of the steps that take three times as long.
        rate: learning rate of the run; that of the others is 0.1.
        differing: the rate is a setting that differs.
        established: all others of the model have the same.
        elsewhere: the others ran on another machine.
    """
    drawn = np.random.default_rng(seed)

    def training(count: int) -> dict[str, np.ndarray]:
        each = np.arange(count)
        level = np.exp(spread * drawn.standard_normal())
        loss = (0.5 + 2 * np.exp(-each / 60)) * level
        noise = np.exp(0.05 * drawn.standard_normal((ranks, count)))
        norm = np.exp(0.1 * drawn.standard_normal() + 0.2 * drawn.standard_normal(count))
        seconds = 0.1 * (1 + 0.02 * drawn.random((ranks, count)))
        return {
            "loss": loss * noise,
            "grad_norm": np.tile(norm, (ranks, 1)),
            "update_ratio": np.tile(1e-3 * norm, (ranks, 1)),
            "step_seconds": seconds,
            "process_resident_memory_bytes": np.full((ranks, count), 2e9),
            "lr": np.full((ranks, count), 0.1),
        }

    others = [training(lasts) for _ in range(baselines)]
    own = training(steps)
    own["lr"][:] = rate
    own["loss"][:, since:until] *= 1 + worse
    slow = drawn.random(own["loss"].shape[1]) < hiccups
    own["step_seconds"][:, slow] *= 3
    if metric:
        own[metric][:, since:until] *= factor
    means = {
        name: [
            one[name].max(axis=0) if "memory" in name else one[name].mean(axis=0) for one in others
        ]
        for name in own
    }
    return Trace(
        "beside",
        seed,
        np.arange(steps),
        own,
        baselines=baselines_of(
            means,
            differing={"parameter_groups.0.lr": (rate, 0.1)} if differing else None,
            established=established,
            elsewhere=elsewhere,
        ),
    )
