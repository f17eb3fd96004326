"""What a real device says of itself."""

import torch

from rankscope.agent.process.device_events import CudaEvents
from rankscope.agent.process.device_memory import DeviceMemory
from rankscope.agent.process.gpu_health import GpuHealth
from tests.support.watching import Watching

# Read here, not when the module is imported: without a device there is none.
ON = "cuda:0"


def test_how_it_is():
    found = GpuHealth().read(torch.device(ON))
    assert 5 < found["gpu_temperature_celsius"] < 110
    assert 100 < found["gpu_sm_clock_mhz"] < 4000
    assert found["gpu_ecc_uncorrected"] == 0
    assert found["gpu_throttle_reasons"] >= 0


def test_its_memory():
    held = torch.zeros(1 << 20, device=ON)
    memory = DeviceMemory(torch.device(ON))
    found = memory.read()
    assert found["cuda_memory_allocated_bytes"] >= held.numel() * 4
    assert found["cuda_memory_reserved_bytes"] >= found["cuda_memory_allocated_bytes"]
    assert memory.limit() > 1 << 30


def test_time_between_marks_is_the_devices():
    events, tensor = CudaEvents(), torch.zeros(1, device=ON)
    first = events.mark(tensor)
    torch.cuda._sleep(200_000_000)
    second = events.mark(tensor)
    assert not second.passed()
    torch.cuda.synchronize()
    assert second.passed()
    assert 0.05 < second.seconds_since(first) < 0.5


def test_times_of_a_training_are_the_devices(tmp_path):
    layer = torch.nn.Linear(8, 2).to(ON)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    with Watching(tmp_path) as watching:
        watching.attach(layer, optimizer)
        for step in range(20):
            torch.cuda._sleep(20_000_000)  # before the pass: 10 ms
            optimizer.zero_grad()
            output = layer(torch.ones(4, 8, device=ON))
            torch.cuda._sleep(60_000_000)
            output.square().mean().backward()
            optimizer.step()
            if step % 5 == 4:
                torch.cuda.synchronize()
        data, compute = watching.points("data_seconds"), watching.points("compute_seconds")
    assert len(data) >= 15
    middle = sorted(data.values())[len(data) // 2], sorted(compute.values())[len(compute) // 2]
    assert 0.007 < middle[0] < 0.03
    assert 0.02 < middle[1] < 0.09
    assert 2 < middle[1] / middle[0] < 4.5
