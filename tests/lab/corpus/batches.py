"""What agents would post of the batches that a run of the corpus was made of.

It is not recorded: which samples each rank gets at which step follows from the family and the seed
alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from rankscope.agent.probes.data import rows
from rankscope.agent.wire import SAMPLE_DIGESTS
from tests.lab.corpus.training import Recipe
from tests.support.runs.traces import Trace


def fed(trace: Trace, recipe: Recipe) -> Trace:
    """A recorded run with the digests `batch` and `rows/0` to `rows/3` of what its ranks were
    given.

    Args:
        recipe: as it was before the training: what spoils its batches may count them.
    """
    inputs, targets = recipe.data
    source = recipe.batches(np.random.default_rng(trace.seed))
    hashes = rows.RowHashes()
    shape = recipe.ranks, recipe.steps
    digests = {name: np.zeros(shape, dtype=np.uint64) for name in ("batch", *SAMPLE_DIGESTS)}
    for step in range(recipe.steps):
        micro = [next(source) for _ in range(recipe.micro)]
        for rank in range(recipe.ranks):
            digest = hashlib.blake2b(digest_size=8)
            found = []
            for chosen in micro:
                batch = inputs[chosen[rank]], targets[chosen[rank]]
                if recipe.spoil is not None:
                    batch = recipe.spoil(step, rank, batch)
                given = batch[0].contiguous()
                digest.update(given.numpy().tobytes())
                found.append(hashes.begin(given, here=True))
            digests["batch"][rank, step] = int.from_bytes(digest.digest(), "little")
            for name, packed_digest in rows.packed(
                [one for one in found if one is not None]
            ).items():
                digests[name][rank, step] = packed_digest
    return replace(trace, words={**trace.words, **digests})
