"""Recorded trainings and the windows they make."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rankscope.agent import wire
from rankscope.server.window import (
    Baselines,
    Comparison,
    GradientProducts,
    LayerNumbers,
    Occurrence,
    RankLiveness,
    Reduction,
    Series,
    Window,
)


@dataclass(frozen=True)
class Trace:
    """One training, as its ranks reported it.

    Attributes:
        steps: int64 [S].
        series: metric -> float64 [R, S]; what no rank posted at a step is masked by `present`.
        present: metric -> bool [R, S]; a metric that is not in it was posted everywhere.
        facts: what was done to the training, for example `onset` and `rank`.
        layers: numbers of single tensors, in the order of their steps.
        reductions: what came out of the steps' reductions; of a recorded one the cosine alone.
        products: where the ranks' own gradients point; not saved.
        config: what rank 0 said of itself.
        words: name -> uint64 [R, S], posted everywhere; not saved.
        hosts: the machine of each rank, where that is known; not saved.
        events: what ranks reported once; not saved.
        configs: what each rank said of itself; not saved.
        baselines: earlier runs that it is held against; not saved.
    """

    name: str
    seed: int
    steps: np.ndarray
    series: Mapping[str, np.ndarray]
    present: Mapping[str, np.ndarray] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[LayerNumbers, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    products: tuple[GradientProducts, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, np.ndarray] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    events: tuple[Occurrence, ...] = ()
    configs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    baselines: Baselines | None = None

    @property
    def ranks(self) -> int:
        return max((len(values) for values in self.series.values()), default=0)

    def save(self, path: Path) -> None:
        """Writes it with 9 bits of precision, which squeezes to a few kilobytes."""
        arrays = {f"series/{name}": _rounded(values) for name, values in self.series.items()}
        for name, mask in self.present.items():
            arrays[f"present/{name}"] = np.packbits(mask, axis=1)
        told = dict(self.facts)
        if self.config:
            told["config"] = dict(self.config)
        if self.layers:
            told["tables"] = _pack_layers(self.layers, arrays)
        if self.reductions:
            found = np.array([[made.step, made.cosine] for made in self.reductions])
            arrays["reductions"] = found.astype(np.float32)
        facts = np.frombuffer(json.dumps(told).encode(), dtype=np.uint8)
        np.savez_compressed(
            path, steps=self.steps.astype(np.int32), seed=self.seed, facts=facts, **arrays
        )

    @classmethod
    def load(cls, path: Path) -> Trace:
        with np.load(path) as stored:
            series = {
                name.removeprefix("series/"): _aligned(_together(stored[name]))
                for name in stored.files
                if name.startswith("series/")
            }
            ranks = max(len(values) for values in series.values())
            count = len(stored["steps"])
            present = {
                name.removeprefix("present/"): np.unpackbits(
                    stored[name], axis=1, count=count
                ).astype(bool)[:ranks]  # series that all ranks share are kept once
                for name in stored.files
                if name.startswith("present/")
            }
            facts = json.loads(stored["facts"].tobytes())
            tables = facts.pop("tables", {})
            reductions = stored["reductions"].tolist() if "reductions" in stored.files else []
            everyone = np.arange(ranks)
            return cls(
                name=path.stem,
                seed=int(stored["seed"]),
                steps=stored["steps"].astype(np.int64),
                series={
                    name: np.broadcast_to(values, (ranks, values.shape[1])).copy()
                    for name, values in series.items()
                },
                present=present,
                config=facts.pop("config", {}),
                facts=facts,
                layers=_unpack_layers(tables, stored),
                reductions=tuple(
                    Reduction(step=int(step), ranks=everyone, tensor_count=0, cosine=cosine)
                    for step, cosine in reductions
                ),
            )

    # ------------------------------------------------------------------------------- variations

    def scaled(self, factor: float) -> Trace:
        """The same training with another unit of the loss (and so of the gradients)."""
        scaled = {
            name: values * factor
            if name in ("loss", "eval/loss") or name.startswith("grad_norm")
            else values
            for name, values in self.series.items()
        }
        layers = tuple(
            replace(made, values=made.values * factor) if made.metric == "grad_norm" else made
            for made in self.layers
        )
        return replace(self, series=scaled, layers=layers)

    def permuted(self, order: Iterable[int]) -> Trace:
        """Rank i of the result is rank order[i] of this one."""
        rows = list(order)
        number = {old: new for new, old in enumerate(rows)}

        def moved(comparison: Comparison) -> Comparison:
            return replace(
                comparison,
                clusters=comparison.clusters[rows],
                distance=comparison.distance[rows],
                relative=comparison.relative[rows],
                tensors=tuple(
                    replace(t, ranks=tuple(sorted(number[r] for r in t.ranks)))
                    for t in comparison.tensors
                ),
            )

        return replace(
            self,
            comparisons=tuple(moved(c) for c in self.comparisons),
            layers=tuple(
                sorted(
                    (replace(made, rank=number[made.rank]) for made in self.layers),
                    key=lambda made: (made.step, made.metric, made.rank),
                )
            ),
            series={name: values[rows] for name, values in self.series.items()},
            present={name: mask[rows] for name, mask in self.present.items()},
            words={name: values[rows] for name, values in self.words.items()},
            hosts=tuple(self.hosts[row] for row in rows) if self.hosts else (),
            configs={number[rank]: held for rank, held in self.configs.items()},
        )

    def thinned(self, every: int) -> Trace:
        """Logged at one step in a number only."""
        kept = np.flatnonzero(self.steps % every == 0)
        return replace(
            self,
            steps=self.steps[kept],
            series={name: values[:, kept] for name, values in self.series.items()},
            present={name: mask[:, kept] for name, mask in self.present.items()},
            words={name: values[:, kept] for name, values in self.words.items()},
            comparisons=tuple(c for c in self.comparisons if c.step % every == 0),
            layers=tuple(made for made in self.layers if made.step % every == 0),
            reductions=tuple(made for made in self.reductions if made.step % every == 0),
            products=tuple(made for made in self.products if made.step % every == 0),
        )

    # ---------------------------------------------------------------------------------- windows

    def windows(self, cuts: Iterable[int] = ()) -> Iterator[Window]:
        """Windows that end before the given column numbers, and one with the rest.

        Times go by at a tenth of a second a step, and every rank is heard of all the time.
        """
        edges = [0, *sorted(set(cuts) - {0, len(self.steps)}), len(self.steps)]
        ranks = np.arange(self.ranks, dtype=np.int64)
        hosts = self.hosts or ("",) * self.ranks
        position, before = 0, -1
        for low, high in zip(edges, edges[1:], strict=False):
            steps = self.steps[low:high]
            last = int(steps[-1]) if len(steps) else -1
            upper = position
            while upper < len(self.comparisons) and self.comparisons[upper].step <= last:
                upper += 1
            now = 1000.0 + 0.1 * (last + 1)
            yield Window(
                world_size=self.ranks,
                ranks=ranks,
                steps=steps,
                series={
                    name: Series(
                        values[:, low:high].copy(),
                        self.present.get(name, np.ones(values.shape, dtype=bool))[:, low:high],
                    )
                    for name, values in self.series.items()
                },
                comparisons=self.comparisons[position:upper],
                liveness=tuple(
                    RankLiveness(int(r), 1000.0, now, last, host=hosts[r]) for r in ranks
                ),
                now=now,
                last_step=last,
                # What is reported of a step that never ends comes with the last window.
                events=tuple(
                    e
                    for e in self.events
                    if before < e.step and (e.step <= last or high == len(self.steps))
                ),
                layers=_between(self.layers, before, last),
                reductions=_between(self.reductions, before, last),
                gradient_products=_between(self.products, before, last),
                config=self.config,
                configs=self.configs,
                baselines=self.baselines,
                digests={
                    name: Series(
                        values[:, low:high].copy(), np.ones_like(values[:, low:high], bool)
                    )
                    for name, values in self.words.items()
                },
            )
            position, before = upper, max(before, last)


Made = TypeVar("Made", LayerNumbers, Reduction, GradientProducts)


def _between(made: tuple[Made, ...], before: int, last: int) -> tuple[Made, ...]:
    low, high = (bisect_right(made, step, key=lambda one: one.step) for step in (before, last))
    return made[low:high]


def _pack_layers(layers: tuple[LayerNumbers, ...], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Puts the numbers of each metric among the arrays; returns whose they are."""
    tables = {}
    for metric in sorted({made.metric for made in layers}):
        rows = [made for made in layers if made.metric == metric]
        table = rows[0].table
        tables[metric] = {"names": table.names, "shapes": table.shapes, "dtypes": table.dtypes}
        arrays[f"layers/{metric}/at"] = np.array(
            [[made.step, made.rank] for made in rows], np.int32
        )
        arrays[f"layers/{metric}"] = _rounded(np.stack([made.values for made in rows], axis=1))
    return tables


def _unpack_layers(tables: Mapping[str, Any], stored: Any) -> tuple[LayerNumbers, ...]:
    found = []
    for metric, told in tables.items():
        table = wire.TensorTable(
            names=tuple(told["names"]),
            shapes=tuple(tuple(shape) for shape in told["shapes"]),
            dtypes=tuple(told["dtypes"]),
            shards=("",) * len(told["names"]),
        )
        values = _together(stored[f"layers/{metric}"]).astype(np.float64)
        values = np.broadcast_to(values, (len(table.names), values.shape[1]))
        for (step, rank), column in zip(
            stored[f"layers/{metric}/at"].tolist(), values.T, strict=True
        ):
            found.append(
                LayerNumbers(step=step, rank=rank, metric=metric, table=table, values=column.copy())
            )
    return tuple(sorted(found, key=lambda made: (made.step, made.metric, made.rank)))


def _rounded(values: np.ndarray) -> np.ndarray:
    """Bytes of float32 values of which 9 bits after the point are kept, plane by plane.

    A series that all ranks share is kept once.
    """
    shared = len(values) > 1 and all(
        np.array_equal(values[0], row, equal_nan=True) for row in values[1:]
    )
    with np.errstate(over="ignore"):
        words = np.ascontiguousarray(values[:1] if shared else values, dtype=np.float32)
    bits = words.view(np.uint32)
    kept = np.where(np.isfinite(words), (bits + 0x2000) & np.uint32(0xFFFFC000), bits)
    # Bytes of one significance side by side: signs and exponents then squeeze to nearly nothing.
    return kept.astype("<u4").view(np.uint8).reshape(*kept.shape, 4).transpose(2, 0, 1)


def _together(planes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(planes.transpose(1, 2, 0)).view("<f4")[..., 0]


def _aligned(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64)
