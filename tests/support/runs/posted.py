"""What the ranks of `chain` post of a training, and the windows that the server makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rankscope.agent import wire
from rankscope.server import detectors
from rankscope.server.detectors.runner import Evaluation
from rankscope.server.evaluation.align import Aligner
from rankscope.server.window import (
    Columns,
    FingerprintPart,
    LivenessPart,
    NewData,
    Occurrence,
    RankLiveness,
    Window,
)
from tests.support.runs.columns import of_rank

NAMES = ("embed.weight", "first.weight", "second.weight", "first.bias", "head.weight", "head.bias")
SHAPES = ((20, 8), (8, 8), (8, 8), (8,), (10, 8), (10,))
BUCKETS = 32
_RANDOM = np.random.default_rng(11)
_SIGNS = _RANDOM.choice([-1.0, 1.0], 4096)
_PLACES = _RANDOM.integers(0, BUCKETS, 4096)
_WEIGHTS = _RANDOM.integers(0, 2**63, 4096, dtype=np.uint64) | np.uint64(1)

Tensors = list[np.ndarray]


def word(*parts: Any) -> int:
    """A digest of something."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def digests(values: Tensors) -> np.ndarray:
    return np.array(
        [
            (
                v.astype(np.float32).ravel().view(np.uint32).astype(np.uint64) * _WEIGHTS[: v.size]
            ).sum(dtype=np.uint64)
            for v in values
        ],
        dtype=np.uint64,
    )


def model_word(values: Tensors) -> int:
    return int((digests(values) * _WEIGHTS[: len(values)]).sum(dtype=np.uint64))


def sketches(values: Tensors) -> np.ndarray:
    """The same random numbers for every tensor, as the agent's are."""
    return np.stack(
        [
            np.bincount(
                _PLACES[: v.size],
                weights=_SIGNS[: v.size] * v.astype(np.float32).ravel().astype(np.float64),
                minlength=BUCKETS,
            )
            for v in values
        ]
    )


@dataclass
class Said:
    """What one rank says of one step."""

    scalars: dict[str, float] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    prints: list[wire.Fingerprint] = field(default_factory=list)
    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def print(self, step: int, stage: str, values: Tensors, table: str = "parameters") -> None:
        known = digests(values)
        self.prints.append(
            wire.Fingerprint(
                step=step,
                stage=stage,
                table=table,
                digests=np.zeros_like(known) if stage == "local_gradient" else known,
                sketches=sketches(values),
            )
        )


@dataclass(frozen=True)
class Posted:
    """A run as its ranks posted it.

    Attributes:
        said: said[step][rank].
        configs: of each rank.
        tables: of each rank.
        began: first step of each process of the ranks.
    """

    said: list[list[Said]]
    configs: list[Mapping[str, Any]]
    tables: list[Mapping[str, wire.TensorTable]]
    began: tuple[int, ...] = (0,)

    @property
    def ranks(self) -> int:
        return len(self.configs)

    def permuted(self, order: Iterable[int]) -> Posted:
        """Rank i of the result is rank order[i] of this one."""
        rows = list(order)
        return replace(
            self,
            said=[[step[r] for r in rows] for step in self.said],
            configs=[self.configs[r] for r in rows],
            tables=[self.tables[r] for r in rows],
        )

    def without(self, *names: str) -> Posted:
        """The same run, of which some scalars, digests and stages were not posted."""
        return replace(
            self,
            said=[
                [
                    Said(
                        {k: v for k, v in said.scalars.items() if k not in names},
                        {k: v for k, v in said.words.items() if k not in names},
                        [p for p in said.prints if p.stage not in names],
                        said.events,
                    )
                    for said in step
                ]
                for step in self.said
            ],
        )

    def windows(self, cuts: Iterable[int] = ()) -> Iterator[Window]:
        """Windows that end before the given steps, and one with the rest."""
        aligner = Aligner(Evaluation(detectors.build()).needs)
        edges = [0, *sorted({c for c in cuts if 0 < c < len(self.said)}), len(self.said)]
        for low, high in zip(edges, edges[1:], strict=False):
            aligner.add(self._data(low, high))
            yield from aligner.windows(1000.0 + high)

    def _data(self, low: int, high: int) -> NewData:
        columns: list[Columns] = []
        words: list[Columns] = []
        prints: list[FingerprintPart] = []
        events: list[Occurrence] = []
        attempt = sum(b <= high - 1 for b in self.began) - 1
        for rank in range(self.ranks):
            for number in range(len(self.began)):
                until = self.began[number + 1] if number + 1 < len(self.began) else len(self.said)
                span = range(max(low, self.began[number]), min(high, until))
                said = [(step, self.said[step][rank]) for step in span]
                for target, kind, dtype in (
                    (columns, "scalars", np.float64),
                    (words, "words", np.uint64),
                ):
                    series: dict[str, list[tuple[int, Any]]] = {}
                    for step, one in said:
                        for name, value in getattr(one, kind).items():
                            series.setdefault(name, []).append((step, value))
                    target += [
                        of_rank(
                            rank,
                            number,
                            name,
                            np.array([s for s, _ in points], np.int64),
                            np.array([v for _, v in points], dtype),
                        )
                        for name, points in series.items()
                    ]
                prints += [FingerprintPart(rank, number, p) for _, one in said for p in one.prints]
                events += [Occurrence(rank, s, *e) for s, one in said for e in one.events]
        through = high - 1
        return NewData(
            arrival=high,
            more=False,
            columns=tuple(columns),
            digests=tuple(words),
            fingerprints=tuple(prints),
            liveness=tuple(
                LivenessPart(
                    RankLiveness(r, 1000.0, 1000.0 + high, through, attempt=attempt),
                    attempt,
                    through,
                    1000.0,
                )
                for r in range(self.ranks)
            ),
            tables=dict(enumerate(self.tables)),
            world_size=self.ranks,
            config=self.configs[0],
            configs=dict(enumerate(self.configs)),
            events=tuple(events),
        )


def config_of(**more: Any) -> dict[str, Any]:
    """What a rank says of itself."""
    return {
        "script": "train.py",
        "git_commit": "3f5a9c",
        "model": "Net",
        "parameters_digest": "aa",
        "trainable_digest": "bb",
        "frozen_tensors": 0,
        "frozen": [],
        "modules": {"Net": 1, "Linear": 3, "Dropout": 2},
        "module_settings": {"Dropout.p": {"0.1": 2}, "Net().width": {"8": 1}},
        "parameter_tensors": len(NAMES),
        "optimizer": "SGD",
        "optimizer_tensors": {
            "count": len(NAMES),
            "of_the_model": 1.0,
            "share_of_trainable": 1.0,
            "missing": [],
            "missing_count": 0,
            "order_digest": "cc",
        },
        "parameter_groups": [{"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}],
        "data_parallel": {"communication_hooks": [], "group_size": 4, "backend": "gloo"},
        "torch": "2.13.0",
        "python": "3.11.9",
        "numpy": "2.1.0",
        "threads": 1,
    } | more


def table_of(shards: str = "", whole: Collection[str] = ()) -> wire.TensorTable:
    parts = tuple("" if name in whole else shards for name in NAMES)
    return wire.TensorTable(NAMES, SHAPES, ("float32",) * len(NAMES), parts)
