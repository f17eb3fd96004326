"""The data ledger, against going through the samples one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.agent.wire import NO_SAMPLE, SAMPLES_REPORTED
from rankscope.server.comparison.ledger import CLASSES, ledger
from rankscope.server.window import BatchesRead


def read_of(batches: dict[tuple[int, int], list[int]]) -> BatchesRead:
    """batches[rank, step]: its samples."""
    keys = sorted(batches)
    samples = np.full((len(keys), SAMPLES_REPORTED), NO_SAMPLE, np.uint32)
    for row, key in enumerate(keys):
        samples[row, : len(batches[key])] = batches[key]
    digests = np.array([hash(tuple(batches[key])) % 2**63 for key in keys], np.uint64)
    ranks, steps = np.array(keys, np.int64).reshape(-1, 2).T
    return BatchesRead(ranks, steps, digests, samples)


def dealt(ranks: int, steps: int, epoch: int, size: int = 4) -> dict[tuple[int, int], list[int]]:
    """Ranks that deal the data among themselves, shuffled anew in each epoch."""
    found = {}
    total = ranks * epoch * size
    for n in range(-(-steps // epoch)):
        order = np.random.default_rng(n).permutation(total)
        for rank in range(ranks):
            part = order[rank::ranks].reshape(epoch, size)
            found |= {(rank, n * epoch + step): part[step].tolist() for step in range(epoch)}
    return {key: value for key, value in found.items() if key[1] < steps}


def counts(found) -> dict[str, int]:
    return dict(zip(CLASSES, found.of_ranks.sum(axis=0).tolist(), strict=True))


def test_parts_of_one_rank_each_meet_in_later_passes_only():
    found = ledger(read_of(dealt(ranks=4, steps=120, epoch=40)))
    assert found.passes == (0, 40, 80)
    assert counts(found) == {"new": 640, "earlier_pass": 1280, "own_again": 0, "other_rank": 0}
    assert np.nanmax(found.shared) == 0
    assert np.isnan(np.diagonal(found.shared)).all()
    # Over the steps: new in the first epoch, all known afterwards.
    assert found.of_steps[:40, 0].tolist() == [16] * 40
    assert found.of_steps[40:, 1].tolist() == [16] * 80


def test_two_ranks_with_one_part_share_all_of_it():
    batches = dealt(ranks=4, steps=40, epoch=40)
    batches |= {(2, step): batches[1, step] for step in range(40)}
    found = ledger(read_of(batches))
    assert found.shared[1, 2] == found.shared[2, 1] == 1
    assert np.nansum(found.shared) == 2
    # The lower rank counts as the one that had it first.
    assert found.of_ranks[:, CLASSES.index("other_rank")].tolist() == [0, 0, 160, 0]
    assert found.same_step.tolist() == [0, 40, 40, 0]


def test_a_rank_that_reads_its_batches_again_within_a_pass():
    batches = dealt(ranks=2, steps=40, epoch=40)
    batches |= {(1, step): batches[1, step - 1] for step in range(1, 40, 2)}
    found = ledger(read_of(batches))
    assert found.of_ranks[:, CLASSES.index("own_again")].tolist() == [0, 80]


def test_sparse_samples_take_their_passes_from_the_loader():
    batches = {k: v for k, v in dealt(ranks=4, steps=400, epoch=100).items() if k[1] % 10 == 0}
    read = read_of(batches)
    assert len(ledger(read).passes) == 1
    known = ledger(read, epoch=100)
    assert known.passes == (0, 100, 200, 300)
    assert np.nanmax(known.shared) == 0


def test_whole_batches_count_where_no_sample_is_known():
    batches = dealt(ranks=2, steps=40, epoch=20)
    read = read_of(batches)
    read.samples[:] = NO_SAMPLE
    found = ledger(read)
    assert not found.by_samples
    assert counts(found) == {"new": 80, "earlier_pass": 0, "own_again": 0, "other_rank": 0}


def test_nothing_was_read():
    found = ledger(BatchesRead())
    assert found.passes == ()
    assert found.of_ranks.shape == (0, 4)
    assert found.shared.shape == (0, 0)


def test_of_too_many_samples_some_are_gone_through(monkeypatch):
    batches = dealt(ranks=4, steps=60, epoch=60)
    batches |= {(3, step): batches[2, step] for step in range(30)}
    spread = np.random.default_rng(5).integers(0, NO_SAMPLE, 4 * 60 * 4).tolist()
    read = read_of({key: [spread[i] for i in items] for key, items in batches.items()})
    whole = ledger(read)
    monkeypatch.setattr("rankscope.server.comparison.ledger._MOST", 300)
    some = ledger(read)
    assert some.halvings == 2
    assert some.of_ranks.sum() < whole.of_ranks.sum() / 2
    assert some.shared[2, 3] == pytest.approx(whole.shared[2, 3], abs=0.15)


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 3), st.integers(0, 12)),
        st.lists(st.integers(0, 30), min_size=1, max_size=4),
        min_size=1,
    )
)
def test_one_by_one(batches):
    found = ledger(read_of(batches))
    ranks = sorted({rank for rank, _ in batches})
    ever, expected = set(), {rank: [0, 0, 0, 0] for rank in ranks}
    owners: dict[tuple[int, int], set[int]] = {}
    for rank, step in sorted(batches, key=lambda key: (key[1], key[0])):
        number = sum(begin <= step for begin in found.passes)
        for item in batches[rank, step]:
            held = owners.setdefault((number, item), set())
            kind = 2 if rank in held else 3 if held else 1 if item in ever else 0
            expected[rank][kind] += 1
            held.add(rank)
            ever.add(item)
    assert found.of_ranks.tolist() == [expected[rank] for rank in ranks]
    for a, one in enumerate(ranks):
        for b, other in enumerate(ranks):
            sizes = [sum(rank in held for held in owners.values()) for rank in (one, other)]
            both = sum({one, other} <= held for held in owners.values())
            if a != b:
                assert found.shared[a, b] == pytest.approx(both / min(sizes))
