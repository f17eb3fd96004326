"""Hashes of rows: the same samples have the same ones, wherever they lie."""

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.agent.probes.data.batch import Batch
from rankscope.agent.probes.data.rows import RowHashes, packed
from rankscope.agent.wire import NO_SAMPLE, SAMPLE_DIGESTS, SAMPLES_REPORTED
from tests.support.probe_harness import Harness


def ids(*tensors):
    hashes = RowHashes()
    digests = packed([hashes.begin(t) for t in tensors])
    assert tuple(digests) == SAMPLE_DIGESTS
    both = [half for w in digests.values() for half in (w >> 32, w & NO_SAMPLE)]
    return [i for i in both if i != NO_SAMPLE]


def samples(kind, count, seed=0):
    random = torch.Generator().manual_seed(seed)
    if kind == "image":
        return torch.rand(count, 3, 20, 30, generator=random)
    if kind == "digits":
        return torch.randint(0, 17, (count, 64), generator=random).float()
    if kind == "half":
        return torch.rand(count, 40, generator=random).half()
    if kind == "tokens":
        return torch.randint(1, 500, (count, 400), generator=random)
    if kind == "octets":
        return torch.randint(0, 256, (count, 9, 9), generator=random).to(torch.uint8)
    return torch.rand(count, generator=random)


KINDS = ("image", "digits", "half", "tokens", "octets", "numbers")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_samples_in_another_order_have_the_same_hashes(kind):
    batch = samples(kind, 30)
    turned = batch[torch.randperm(30, generator=torch.Generator().manual_seed(1))]
    assert ids(batch) == ids(turned)
    assert len(set(ids(batch))) == SAMPLES_REPORTED


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_batches_share_is_reported_of_both_more_often_than_not(kind):
    # A row among the smallest half of 32 is among those of another batch 4 times in 5.
    data = samples(kind, 32 * 60)
    reported = shared = 0
    for begin in range(0, 32 * 40, 32):
        first = data[begin : begin + 32]
        # Two ninths are the same samples.
        other = torch.cat([first[::2], data[32 * 40 + begin // 2 :][:16]])
        mine, theirs = set(ids(first)), set(ids(other))
        common = set(ids(*first[::2].split(1))) & mine
        reported += len(common)
        shared += len(common & theirs)
    assert reported > 100
    assert shared > 0.7 * reported


def test_which_samples_are_taken_depends_on_no_place_in_the_batch():
    data = samples("digits", 4096)
    hashes = RowHashes()
    places = np.zeros(64)
    for batch in data.split(64):
        mine = hashes.begin(batch)
        places += [int(hashes.begin(row[None])[0] in mine) for row in batch]
    # 64 batches' rows over 64 places, give or take four standard deviations.
    assert places.sum() == 64 * SAMPLES_REPORTED
    assert places.max() < SAMPLES_REPORTED + 4 * SAMPLES_REPORTED**0.5


def test_memory_of_other_strides_is_the_same_sample():
    batch = samples("image", 12)
    assert ids(batch.contiguous(memory_format=torch.channels_last)) == ids(batch)
    assert ids(torch.cat([batch, batch], 3)[..., :30]) == ids(batch)


def test_padding_after_the_tokens_and_rows_of_zeros_are_not_seen():
    short = samples("tokens", 5)[:, :50]
    longer = torch.zeros(7, 90, dtype=torch.int64)
    longer[:5, :50] = short
    assert ids(short) == ids(longer)
    assert ids(torch.zeros(3, 5)) == []


def test_micro_batches_are_one_batch():
    batch = samples("digits", 40)
    assert ids(*batch.split(7)) == ids(batch)


def test_what_has_no_rows_reports_nothing():
    hashes = RowHashes()
    assert hashes.begin(torch.ones(())) is None
    assert hashes.begin(torch.ones(0, 3)) is None
    assert hashes.begin(torch.ones(3, 2, dtype=torch.complex64)) is None


def test_devices_compute_the_same():
    for kind in KINDS:
        batch = samples(kind, 20)
        here = RowHashes().begin(batch)
        there = RowHashes().begin(batch, here=False)
        assert here.tolist() == there.result().astype(np.int64).tolist()


def test_a_step_reports_its_samples():
    model = nn.Linear(64, 2)
    harness = Harness(model, torch.optim.SGD(model.parameters(), lr=0.1), probes=[Batch])
    batch = samples("digits", 16)
    try:
        for part in batch.split(4):
            model(part).sum().backward()
        harness.optimizer.step()
    finally:
        harness.close()
    digests = harness.steps[0].digests
    assert {name: digests[name] for name in SAMPLE_DIGESTS} == packed([RowHashes().begin(batch)])
