"""Recorded trainings and the windows they make."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.server.window import Comparison, RankLife, Series, Window


@dataclass(frozen=True)
class Trace:
    """One training, as its ranks reported it.

    Attributes:
        steps: int64 [S].
        series: metric -> float64 [R, S]; what no rank posted at a step is masked by `present`.
        present: metric -> bool [R, S]; a metric that is not in it was posted everywhere.
        facts: what was done to the training, for example `onset` and `rank`.
    """

    name: str
    seed: int
    steps: np.ndarray
    series: Mapping[str, np.ndarray]
    present: Mapping[str, np.ndarray] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return max((len(values) for values in self.series.values()), default=0)

    def save(self, path: Path) -> None:
        """Writes it with 9 bits of precision, which squeezes to a few kilobytes."""
        arrays = {f"series/{name}": _rounded(values) for name, values in self.series.items()}
        for name, mask in self.present.items():
            arrays[f"present/{name}"] = np.packbits(mask, axis=1)
        facts = np.frombuffer(json.dumps(dict(self.facts)).encode(), dtype=np.uint8)
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
                ).astype(bool)
                for name in stored.files
                if name.startswith("present/")
            }
            return cls(
                name=path.stem,
                seed=int(stored["seed"]),
                steps=stored["steps"].astype(np.int64),
                series={
                    name: np.broadcast_to(values, (ranks, values.shape[1])).copy()
                    for name, values in series.items()
                },
                present=present,
                facts=json.loads(stored["facts"].tobytes()),
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
        return replace(self, series=scaled)

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
            series={name: values[rows] for name, values in self.series.items()},
            present={name: mask[rows] for name, mask in self.present.items()},
        )

    def thinned(self, every: int) -> Trace:
        """Logged at every so many steps only."""
        kept = np.flatnonzero(self.steps % every == 0)
        return replace(
            self,
            steps=self.steps[kept],
            series={name: values[:, kept] for name, values in self.series.items()},
            present={name: mask[:, kept] for name, mask in self.present.items()},
            comparisons=tuple(c for c in self.comparisons if c.step % every == 0),
        )

    # ---------------------------------------------------------------------------------- windows

    def windows(self, cuts: Iterable[int] = ()) -> Iterator[Window]:
        """Windows that end before the given column numbers, and one with the rest.

        Times go by at a tenth of a second a step, and every rank is heard of all the time.
        """
        edges = [0, *sorted(set(cuts) - {0, len(self.steps)}), len(self.steps)]
        ranks = np.arange(self.ranks, dtype=np.int64)
        position = 0
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
                lives=tuple(RankLife(int(r), 1000.0, now, last) for r in ranks),
                now=now,
                last_step=last,
            )
            position = upper


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
