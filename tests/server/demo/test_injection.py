"""Each fault does to the training what the table says, and nothing else: on real gloo ranks."""

from pathlib import Path

import pytest
import torch

from rankscope.server.demo.faults import FAULTS, Injection
from rankscope.server.demo.injection import INJECTORS
from tests.support.jobs.ranks import run_ranks

RANK, STEP, TENSOR = 1, 3, "hidden.weight"
TRAINED = ("none", "skipped-allreduce", "bitflip", "unsynced-start")
OTHERS = (0, 2)


def injector(name, rank=RANK):
    injection = Injection(FAULTS[name], rank=RANK, step=STEP, tensor=TENSOR)
    return INJECTORS[name](injection, rank=rank, seed=7)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Fault -> rank -> what `faulty_steps.py` wrote down."""
    folder = tmp_path_factory.mktemp("injection")
    run_ranks(
        Path(__file__).with_name("faulty_steps.py"),
        *(str(folder), str(RANK), str(STEP), TENSOR, *TRAINED),
        ranks=3,
        folder=folder,
        environment={"RANKSCOPE_MODE": "disabled"},
    ).check()
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(3)] for name in TRAINED
    }


def differing(one, other):
    """Names of the tensors that are not equal to the last bit."""
    return [name for name in one if not torch.equal(one[name], other[name])]


def test_without_a_fault_all_ranks_stay_equal(trained):
    ranks = trained["none"]
    for step in range(6):
        for rank in (1, 2):
            assert not differing(ranks[0]["after"][step], ranks[rank]["after"][step])


def test_a_skipped_allreduce_parts_one_tensor_of_one_rank_from_its_step_on(trained):
    ranks, healthy = trained["skipped-allreduce"], trained["none"]
    for step in range(6):
        expected = [TENSOR] if step >= STEP else []
        assert differing(ranks[RANK]["after"][step], ranks[0]["after"][step]) == expected
        assert not differing(ranks[2]["after"][step], ranks[0]["after"][step])
    at_fault = [rank["before"][STEP]["gradients"] for rank in ranks]
    assert differing(at_fault[RANK], at_fault[0]) == [TENSOR]
    # The others got the true mean (rounded elsewhere, in a hook): the rank did take part.
    torch.testing.assert_close(at_fault[0], healthy[0]["before"][STEP]["gradients"])


def test_a_bitflip_changes_one_bit_of_one_weight_before_its_step(trained):
    ranks = trained["bitflip"]
    broken, sound = (ranks[rank]["before"][STEP]["parameters"] for rank in (RANK, 0))
    assert differing(broken, sound) == [TENSOR]
    changed = broken[TENSOR].view(torch.int32).view(-1) ^ sound[TENSOR].view(torch.int32).view(-1)
    bits = [int(word) & 0xFFFFFFFF for word in changed if word]
    assert len(bits) == 1
    assert bits[0].bit_count() == 1
    assert not differing(ranks[RANK]["after"][STEP - 1], ranks[0]["after"][STEP - 1])
    assert all(
        differing(rank["after"][STEP], ranks[RANK]["after"][STEP]) == [TENSOR]
        for rank in (ranks[0], ranks[2])
    )


def test_an_unsynced_start_parts_every_tensor_of_one_rank_before_the_first_step(trained):
    first = [rank["before"][0]["parameters"] for rank in trained["unsynced-start"]]
    assert differing(first[RANK], first[0]) == list(first[0])
    assert not differing(first[0], first[2])
    # The random numbers of the training itself are not touched.
    assert not differing(first[0], trained["none"][0]["before"][0]["parameters"])


@pytest.mark.parametrize(
    ("name", "suspects", "rank", "factor"),
    [
        ("high-lr", None, 0, 30.0),
        ("high-lr", None, RANK, 30.0),
        ("lr-mismatch", RANK, RANK, 0.5),
        ("lr-mismatch", RANK, 0, 1.0),
    ],
)
def test_a_rate_is_changed_once_and_stays(name, suspects, rank, factor):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.25)
    fault = INJECTORS[name](Injection(FAULTS[name], rank=suspects, step=STEP), rank=rank, seed=7)
    rates = []
    for step in range(6):
        fault.before_step(step, None, optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.25] * STEP + [0.25 * factor] * (6 - STEP)


@pytest.mark.parametrize("rank", [RANK, *OTHERS])
def test_bad_labels_are_the_same_labels_in_another_order_on_one_rank(rank):
    fault = injector("bad-labels", rank)
    images, labels = torch.zeros(32, 1, 8, 8), torch.arange(32)
    for step in range(6):
        same_images, found = fault.batch(step, images, labels)
        assert same_images is images
        assert sorted(found.tolist()) == labels.tolist()
        assert torch.equal(found, labels) == (rank != RANK or step < STEP)


@pytest.mark.parametrize("rank", [RANK, *OTHERS])
def test_one_pixel_of_one_batch_is_nan(rank):
    fault = injector("nan", rank)
    images, labels = torch.zeros(4, 1, 8, 8), torch.arange(4)
    for step in range(6):
        found, same_labels = fault.batch(step, images, labels)
        assert same_labels is labels
        assert int(found.isnan().sum()) == (rank == RANK and step == STEP)
    assert not images.isnan().any()
