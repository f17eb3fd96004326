"""Runs whose ranks read a data set: digests as the agent makes them, posted to a real ingest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import numpy as np
import torch

from rankscope.agent.probes.data.rows import RowHashes, packed
from rankscope.agent.wire import codec
from rankscope.agent.wire.batch import Batch, Column
from tests.support.runs.fixture_run import SyntheticRun


@dataclass(frozen=True)
class ReadRun:
    """Ranks that deal a data set among themselves, shuffled anew in each epoch.

    Attributes:
        steps: of batches of `size` samples.
        epoch: steps in which all of the data are read once.
        same: rank -> rank whose part it reads instead of its own.
        own_seeds: each rank shuffles by a seed of its own, so that parts overlap.
    """

    run: str
    ranks: int
    steps: int
    epoch: int
    size: int = 8
    same: tuple[tuple[int, int], ...] = ()
    own_seeds: bool = False

    @property
    def posted(self) -> SyntheticRun:
        """The run without what it read."""
        return SyntheticRun(run=self.run, ranks=self.ranks, steps=self.steps, buckets=4)

    def read(self, rank: int) -> list[list[int]]:
        """[steps][size]: which samples a rank reads."""
        source = dict(self.same).get(rank, rank)
        total = self.ranks * self.size * self.epoch
        found: list[list[int]] = []
        for epoch in range(-(-self.steps // self.epoch)):
            seed = [epoch, source] if self.own_seeds else [epoch]
            part = np.random.default_rng(seed).permutation(total)[source :: self.ranks]
            found += part.reshape(self.epoch, self.size).tolist()
        return found[: self.steps]

    def batches(self) -> Iterator[Batch]:
        """What the ranks post, one batch each."""
        data = torch.from_numpy(
            np.random.default_rng(1)
            .standard_normal((self.ranks * self.size * self.epoch, 6))
            .astype(np.float32)
        )
        hashes = RowHashes()
        steps = np.arange(self.steps)
        for batch in self.posted.batches(size=self.steps):
            words: dict[str, list[int]] = {}
            for rows in self.read(batch.rank):
                known = packed([hashes.begin(data[rows])])
                known["batch"] = hash(tuple(rows)) % 2**64
                for name, value in known.items():
                    words.setdefault(name, []).append(value)
            columns = {"samples": Column(steps, np.full(self.steps, float(self.size)))}
            read = {name: Column(steps, np.array(v, np.uint64)) for name, v in words.items()}
            yield replace(batch, columns=batch.columns | columns, words={**batch.words, **read})

    def post(self, server: str) -> None:
        """Posts all of it to a running server."""
        headers = {"Content-Type": codec.CONTENT_TYPE}
        with httpx.Client(base_url=server, headers=headers, timeout=60) as client:
            for batch in self.batches():
                answer = client.post("/api/v1/ingest", content=codec.encode(batch))
                answer.raise_for_status()
