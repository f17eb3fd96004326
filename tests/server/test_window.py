"""Which ranks read batches of their own."""

import numpy as np
import pytest

from rankscope.server.window import Window


def over(first, step, count):
    return {"sharded_over": {"first": first, "step": step, "count": count}}


def sets(classes, configs):
    ranks = sorted(rank for members in classes for rank in members)
    return Window(
        world_size=len(ranks),
        ranks=np.array(ranks),
        steps=np.zeros(0, np.int64),
        series={},
        classes=classes,
        configs=configs,
    ).data_parallel


PAIRS = ((0, 2), (1, 3))
ALONE = ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("classes", "configs", "expected"),
    [
        (PAIRS, {}, PAIRS),
        (ALONE, {rank: over(0, 1, 4) for rank in range(4)}, ((0, 1, 2, 3),)),
        # HSDP: shards inside pairs, replicas across them.
        (PAIRS, {rank: over(rank // 2 * 2, 1, 2) for rank in range(4)}, ((0, 1, 2, 3),)),
        # FSDP beside tensor parallelism: pairs share a batch.
        (ALONE, {rank: over(rank % 2, 2, 2) for rank in range(4)}, PAIRS),
        (ALONE, {0: over(0, 1, 2)}, ((0, 1), (2,), (3,))),
        (ALONE, {0: over(0, 0, 4), 1: {"sharded_over": "all"}}, ALONE),
        (((0, 1),), {0: over(0, 1, 4)}, ((0, 1),)),
    ],
    ids=["replicas", "FSDP", "HSDP", "beside tensors", "one told", "nonsense", "not seen"],
)
def test_sets_of_ranks_with_batches_of_their_own(classes, configs, expected):
    assert sets(classes, configs) == expected
