"""What is read of a GPU through NVML, of which the module alone is replaced."""

import sys
from types import SimpleNamespace

import pytest
import torch

from rankscope.agent.process.gpu_health import GpuHealth

GPU = torch.device("cuda", 1)


class Denied(Exception):
    pass


def denied(*arguments):
    raise Denied


@pytest.fixture
def nvml(monkeypatch):
    def by_uuid(uuid):
        if uuid != "GPU-the-one":
            raise Denied
        return "handle"

    def errors(gpu, kind, counter):
        return {(0, 0): 7, (1, 0): 2}[kind, counter]

    module = SimpleNamespace(
        NVMLError=Denied,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetTemperature=lambda gpu, sensor: 91 if sensor == 0 else 0,
        nvmlDeviceGetClockInfo=lambda gpu, kind: 780 if kind == 1 else 0,
        nvmlDeviceGetTotalEccErrors=errors,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0x48,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = {GPU: SimpleNamespace(uuid="the-one")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.get)
    return module


def test_what_the_driver_has(nvml):
    assert GpuHealth().read(GPU) == {
        "gpu_temperature_celsius": 91.0,
        "gpu_sm_clock_mhz": 780.0,
        "gpu_ecc_corrected": 7.0,
        "gpu_ecc_uncorrected": 2.0,
        "gpu_throttle_reasons": 72.0,
    }


def test_it_is_asked_every_ten_seconds(nvml):
    now = [0.0]
    health = GpuHealth(lambda: now[0])
    assert health.read(GPU)
    now[0] = 9.9
    assert health.read(GPU) == {}
    now[0] = 10.0
    assert health.read(GPU)


def test_what_is_denied_is_left_out_and_not_asked_again(nvml):
    now = [0.0]
    asked = []

    def no_ecc(*arguments):
        asked.append(arguments)
        raise Denied

    nvml.nvmlDeviceGetTotalEccErrors = no_ecc
    health = GpuHealth(lambda: now[0])
    for now[0] in (0.0, 10.0):
        assert health.read(GPU).keys() == {
            "gpu_temperature_celsius",
            "gpu_sm_clock_mhz",
            "gpu_throttle_reasons",
        }
    assert len(asked) == 2


@pytest.mark.parametrize("what", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_a_driver_nothing_is_known(nvml, what):
    setattr(nvml, what, denied)
    assert GpuHealth().read(GPU) == {}


def test_without_the_package_and_on_a_cpu_nothing_is_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuHealth().read(GPU) == {}
    assert GpuHealth().read(torch.device("cpu")) == {}


def test_the_monitor_records_it_beside_the_step_in_progress(nvml, watching):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watching.attach(model, optimizer)
    read = monitor._gpu.read
    monitor._gpu.read = lambda device: read(GPU)  # as if the parameters were there
    for _ in range(3):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    asked = monitor.phase  # as the sender does
    assert asked
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert set(watching.points("gpu_temperature_celsius").values()) == {91.0}
    assert not watching.events("agent.fault")
