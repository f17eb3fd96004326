"""Which ranks read batches of their own."""

import numpy as np
import pytest

from rankscope.server.window import Window, is_wanted


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
    ids=["replicas", "FSDP", "HSDP", "beside tensors", "one reported", "nonsense", "not seen"],
)
def test_sets_of_ranks_with_batches_of_their_own(classes, configs, expected):
    assert sets(classes, configs) == expected


def test_ranks_that_nobody_could_count_are_not_counted():
    many = {rank: over(0, 1, 10**15) for rank in range(4)}
    assert sets(ALONE, many) == ((0, 1, 2, 3),)
    assert sets(ALONE, {0: over(1, 2, 10**30)}) == ((0, 1, 3), (2,))
    assert sets(ALONE, {0: over(-(10**18), 10**9, 10**15)}) == ALONE
    # As many sayings as ranks.
    ranks = 2000
    alone = tuple((rank,) for rank in range(ranks))
    found = sets(alone, {rank: over(rank % 2, 2, 10**12 + rank) for rank in range(ranks)})
    assert found == (tuple(range(0, ranks, 2)), tuple(range(1, ranks, 2)))


def test_a_star_in_a_name_stands_for_any_characters():
    among = ("loss", "eval/*", "*_loss")
    wanted = ["loss", "eval/loss", "eval/a/b", "val_loss"]
    others = ["losses", "evaluation", "a.loss"]
    assert [name for name in [*wanted, *others] if is_wanted(name, among)] == wanted
