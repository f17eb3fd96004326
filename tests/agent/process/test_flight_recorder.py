"""What is posted of PyTorch's flight recorder."""

import pickle

import pytest
import torch
import torch.distributed as dist

from rankscope.agent.process.flight_recorder import last_collectives, shortened
from rankscope.agent.wire import limits


def entry(sequence, *, group="0", retired=True, **more):
    """As torch 2.13 records gloo's."""
    return {
        "process_group": (group, "default_pg"),
        "collective_seq_id": sequence,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[4, 2]],
        "state": "scheduled",
        "retired": retired,
        "is_p2p": False,
        **more,
    }


def test_nothing_without_process_groups():
    assert last_collectives() == []


def test_what_is_not_over_and_the_last_of_each_group_are_kept():
    many = [entry(n, retired=n != 2) for n in range(1, 101)]
    found = shortened([entry(1, group="1"), *many])
    assert len(found) == limits.COLLECTIVES
    assert [(one["group"], one["sequence"], one["state"]) for one in found] == [
        ("1 default_pg", 1, "completed"),
        ("0 default_pg", 2, "scheduled"),
        *(("0 default_pg", n, "completed") for n in range(95, 101)),
    ]


def test_what_is_long_is_cut():
    sizes = [[1] * 9] * 9
    (found,) = shortened([entry(1, input_sizes=sizes, profiling_name="x" * 999, state="completed")])
    assert found["shapes"] == [[1] * 4] * 4
    assert len(found["name"]) == limits.STACK_CHARACTERS


def test_messages_between_two_ranks_have_numbers_of_their_own():
    assert shortened([entry(7, is_p2p=True)]) == []


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_gloo_and_nccl_record_stands_in_one_order(group, monkeypatch):
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch does not record gloo")
    dist.all_reduce(torch.ones(3, 2))
    mine = entry(9, group="7", profiling_name="nccl:all_reduce", retired=False, state="started")
    dumped = pickle.dumps({"entries": [{**mine, "time_created_ns": 2**62}]})
    monkeypatch.setattr(
        torch._C._distributed_c10d, "_dump_nccl_trace", lambda *given: dumped, raising=False
    )
    *_, of_gloo, of_nccl = last_collectives()
    assert of_gloo == {
        "group": of_gloo["group"],
        "name": "gloo:all_reduce",
        "sequence": 1,
        "state": "completed",
        "shapes": [[3, 2]],
    }
    assert (of_nccl["name"], of_nccl["state"], of_nccl["sequence"]) == (
        *("nccl:all_reduce", "started"),
        9,
    )
