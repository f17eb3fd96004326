"""What a user declares tensors to be parts of."""

import inspect

import pytest

from rankscope.agent.model.parts import part_of
from rankscope.agent.null_monitor import NullMonitor
from rankscope.agent.steps.array_monitor import ArrayMonitor
from rankscope.agent.steps.torch_monitor import TorchMonitor
from rankscope.agent.wire import RANK_LOCAL


def test_a_copy_of_a_rank_s_own_is_like_no_other_rank_s():
    reported = [part_of(None, rank) for rank in range(12)]
    assert all(text.startswith(RANK_LOCAL) for text in reported)
    assert len(set(reported)) == 12


@pytest.mark.parametrize("key", ["stage 1", "own", "half@2", "=", "=stage", ""])
def test_a_key_is_reported_as_it_is(key):
    assert part_of(key, 3) == key


def test_a_key_that_looks_like_a_copy_is_a_key_all_the_same():
    keys = [f"{RANK_LOCAL}0", f"={RANK_LOCAL}0", f"=={RANK_LOCAL}0", f"{RANK_LOCAL}1", RANK_LOCAL]
    reported = [part_of(key, 0) for key in keys]
    assert not any(text.startswith(RANK_LOCAL) for text in reported)
    assert len(set(reported)) == len(keys)
    assert reported == [part_of(key, 5) for key in keys]


def test_a_monitor_that_is_switched_off_takes_the_same():
    plain, watching = (inspect.signature(m.replicas) for m in (NullMonitor, TorchMonitor))
    assert plain == watching == inspect.signature(ArrayMonitor.replicas)
    assert NullMonitor("run", 0).replicas(None, "embedding.*") is None
