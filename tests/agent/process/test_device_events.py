"""Events of CUDA: how many there are, and which are used again."""

import pytest
import torch

from rankscope.agent.process.device_events import CudaEvents


class Event:
    """As torch's, without a device."""

    made = 0

    def __init__(self, *, enable_timing):
        assert enable_timing
        type(self).made += 1
        self.recorded = []

    def record(self, stream):
        self.recorded.append(stream)

    def elapsed_time(self, other):
        return 2.5 * (len(other.recorded) - len(self.recorded))

    def query(self):
        return len(self.recorded) > 1


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Event, "made", 0)
    return CudaEvents(most=2)


def test_events_are_bounded_and_used_again(cuda):
    tensor = torch.ones(1)
    first, second = cuda.mark(tensor), cuda.mark(tensor)
    assert cuda.mark(tensor) is None
    assert not second.passed()
    second.record()
    assert second.passed()
    assert second.seconds_since(first) == pytest.approx(0.0025)
    del first
    third = cuda.mark(tensor)
    assert third is not None
    assert third.passed()  # its event was recorded before
    assert Event.made == 2


def test_in_a_graph_under_capture_nothing_is_recorded(cuda, monkeypatch):
    mark = cuda.mark(torch.ones(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    mark.record()
    assert not mark.passed()
    assert cuda.mark(torch.ones(1)) is None


def test_on_a_cpu_the_host_has_the_time():
    assert not CudaEvents().measure(torch.ones(1))
