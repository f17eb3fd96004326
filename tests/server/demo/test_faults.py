"""The table of faults, and where a seed puts them."""

import pytest

from rankscope.server.demo.faults import DEFAULT_FAULT, FAULTS, TENSORS, decide
from rankscope.server.demo.injection import INJECTORS
from rankscope.server.demo.training import DigitsNet
from rankscope.server.detectors.registry import KINDS

BROKEN = [fault for fault in FAULTS.values() if fault.kinds]


def test_every_fault_has_an_injector_and_every_injector_a_fault():
    assert list(INJECTORS) == list(FAULTS)
    assert DEFAULT_FAULT in FAULTS


def test_the_faults_of_the_issue_are_there():
    assert set(FAULTS) >= {
        "none",
        "skipped-allreduce",
        "bitflip",
        "high-lr",
        "bad-labels",
        "dead-rank",
    }


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_expected_kinds_are_kinds(fault):
    assert set(fault.kinds) <= set(KINDS)
    # One that is compared bit by bit has no excuse.
    if any(kind.startswith("desync.") for kind in fault.kinds):
        assert fault.tolerance == 0


def test_tensors_are_parameters_of_the_model():
    assert set(TENSORS) <= {name for name, _ in DigitsNet().named_parameters()}


@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.name)
def test_a_seed_decides_all_and_different_seeds_differ(fault):
    decided = [decide(fault, ranks=4, steps=600, seed=seed) for seed in range(20)]
    assert decided == [decide(fault, ranks=4, steps=600, seed=seed) for seed in range(20)]
    assert fault.at_start or len({d.step for d in decided}) > 5
    assert {d.rank for d in decided} == ({0, 1, 2, 3} if fault.names_rank else {None})
    assert {d.tensor for d in decided} == (set(TENSORS) if fault.names_tensor else {None})


@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.name)
def test_the_fault_comes_midway(fault):
    for steps in (fault.min_steps, 600, 601):
        for seed in range(20):
            step = decide(fault, ranks=4, steps=steps, seed=seed).step
            assert step == 0 if fault.at_start else 0.4 * steps <= step <= 0.6 * steps


def test_no_fault_decides_nothing():
    injection = decide(FAULTS["none"], ranks=4, steps=600, seed=3)
    assert (injection.rank, injection.step, injection.tensor) == (None, None, None)


def test_two_ranks_are_both_named_where_nothing_distinguishes_them():
    flip = decide(FAULTS["bitflip"], ranks=2, steps=600, seed=0)
    assert flip.expected_ranks(2) == (0, 1)
    dead = decide(FAULTS["dead-rank"], ranks=2, steps=600, seed=0)
    assert dead.expected_ranks(2) == (dead.rank,)
