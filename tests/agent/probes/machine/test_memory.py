"""Memory in use, against what is really taken."""

import os
import resource

import numpy as np
import pytest
import torch
from torch import nn

from rankscope.agent.probes.machine.memory import Memory
from rankscope.agent.process.device_memory import DeviceMemory, series_of
from rankscope.agent.process.resident_memory import ResidentMemory, memory_limit
from tests.support.probe_harness import Harness

TAKEN = 200 * 2**20


@pytest.fixture
def resident():
    made = ResidentMemory()
    yield made
    made.close()


def test_what_is_taken_and_given_back_shows(resident):
    before = resident.read()["process_resident_memory_bytes"]
    held = torch.ones(TAKEN // 4)
    taken = resident.read()["process_resident_memory_bytes"]
    del held
    assert taken - before == pytest.approx(TAKEN, rel=0.1)
    assert resident.read()["process_resident_memory_bytes"] - before < TAKEN / 2


def test_pages_of_files_are_told_from_what_is_taken(resident, tmp_path):
    (tmp_path / "tokens.bin").write_bytes(bytes(TAKEN))
    before = resident.read()
    tokens = np.memmap(tmp_path / "tokens.bin", dtype=np.uint8, mode="r")
    tokens[::4096].sum()
    after = resident.read()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["process_resident_memory_bytes"] == pytest.approx(TAKEN, rel=0.1)
    assert grown["process_mapped_file_bytes"] == pytest.approx(TAKEN, rel=0.1)


def test_a_forked_child_reads_its_own(resident):
    resident.read()
    child = os.fork()
    if not child:
        before = resident.read()["process_resident_memory_bytes"]
        held = torch.ones(TAKEN // 4)
        more = resident.read()["process_resident_memory_bytes"] - before
        os._exit(0 if TAKEN / 2 < more and len(held) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_without_the_file_it_is_the_largest_so_far(resident, monkeypatch):
    def missing(*given):
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", missing)
    largest = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (posted,) = resident.read().values()
    assert posted >= largest > 5e7


def test_the_limit_is_at_most_what_the_machine_has():
    assert 2**28 < memory_limit() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_its_file_is_closed(resident):
    resident.read()
    held = resident._file
    os.fstat(held)
    resident.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)


def test_it_is_posted_at_sampled_steps_alone():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    harness = Harness(model, optimizer, probes=[Memory], sampled=lambda step: step % 2 == 0)
    for _ in range(4):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    harness.close()
    posted = [step.scalars for step in harness.steps]
    series = {"process_resident_memory_bytes", "process_mapped_file_bytes"}
    assert [set(scalars) for scalars in posted] == [series, set()] * 2
    assert posted[0]["process_resident_memory_bytes"] > 5e7
    assert harness.steps[0].tiers["signals"] < 0.001


# As torch.cuda.memory_stats_as_nested_dict gives it, shortened.
COUNTED = {
    "allocated_bytes": {
        "all": {"current": 1024, "peak": 4096, "allocated": 9000, "freed": 7976},
        "large_pool": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
    },
    "reserved_bytes": {"all": {"current": 2097152, "peak": 2097152}},
    "num_ooms": 0,
}


def test_of_a_device_it_is_what_the_allocator_counts():
    assert series_of(COUNTED) == {
        "cuda_memory_allocated_bytes": 1024,
        "cuda_max_memory_allocated_bytes": 4096,
        "cuda_memory_reserved_bytes": 2097152,
    }
    assert series_of({}) == {}


def test_without_cuda_there_is_none_of_a_device():
    for device in (torch.device("cpu"), torch.device("cuda:0"), None):
        counters = DeviceMemory(device)
        assert counters.read() == {}
        assert counters.limit() == 0


def test_an_allocator_that_does_not_count_is_asked_once(monkeypatch):
    def refused(device):
        asked.append(device)
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    asked = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refused)
    counters = DeviceMemory(torch.device("cuda:0"))
    assert counters.read() == counters.read() == {}
    assert len(asked) == 1
