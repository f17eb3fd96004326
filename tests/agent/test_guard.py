"""What fails inside the agent stays inside, is reported once, and switches off what failed."""

from __future__ import annotations

import threading
import time
import tracemalloc

import pytest

from rankscope.agent.guard import Guard, describe

pytestmark = pytest.mark.contained


@pytest.fixture
def reported() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def guard(reported: list[tuple[str, str]]) -> Guard:
    return Guard(lambda probe, text: reported.append((probe, text)))


def test_a_fault_is_contained_and_reported_once(
    guard: Guard, reported: list[tuple[str, str]]
) -> None:
    for _ in range(3):
        with guard.probe("loss"):
            raise RuntimeError("no loss")

    assert [probe for probe, _ in reported] == ["loss"]
    assert reported[0][1].startswith("RuntimeError: no loss at ")
    assert "test_guard.py" in reported[0][1]
    assert guard.faults == {"loss": 3}


def test_only_the_probe_that_failed_is_switched_off(guard: Guard) -> None:
    with guard.probe("loss"):
        raise ValueError

    assert not guard.enabled("loss")
    assert guard.enabled("gradients")
    assert not guard.probe("loss").enabled


def test_a_tolerant_probe_bears_some_faults(guard: Guard) -> None:
    states = []
    for _ in range(3):
        with guard.probe("phase", tolerance=3):
            raise ValueError
        states.append(guard.enabled("phase"))

    assert states == [True, True, False]


def test_a_decorated_function_does_nothing_after_a_fault(guard: Guard) -> None:
    calls = []

    @guard.probe("hook")
    def hook(value: int) -> int:
        calls.append(value)
        return 10 // value

    assert [hook(5), hook(0), hook(5)] == [2, None, None]
    assert calls == [5, 0]


@pytest.mark.parametrize("passing", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_fault_passes(guard: Guard, passing: type[BaseException]) -> None:
    with pytest.raises(passing), guard.probe("loss"):
        raise passing

    assert guard.enabled("loss")


def test_a_report_that_fails_stays_inside() -> None:
    def report(probe: str, text: str) -> None:
        raise OSError("disk full")

    guard = Guard(report)
    with guard.probe("loss"):
        raise ValueError

    assert guard.faults == {"loss": 1}


def test_a_message_that_fails_is_described() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe(Broken()) == "Broken: (its message cannot be read)"
    assert "\n" not in describe(ValueError("two\nlines"))


def test_a_probe_nests(guard: Guard) -> None:
    outer = []
    with guard.probe("loss"):
        with guard.probe("loss"):
            raise ValueError
        outer.append("went on")

    assert outer == ["went on"]
    assert guard.faults == {"loss": 1}


def test_threads_share_a_probe(guard: Guard) -> None:
    probe = guard.probe("loss", tolerance=10**9)
    start = threading.Barrier(4)

    def fail() -> None:
        start.wait()
        for _ in range(200):
            with probe:
                raise ValueError

    threads = [threading.Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 0 < probe.faults <= 800
    assert probe.enabled


def test_the_way_through_costs_next_to_nothing(guard: Guard) -> None:
    probe = guard.probe("loss")
    rounds = 20_000
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(rounds):
            with guard.probe("loss"):
                pass
        best = min(best, (time.perf_counter() - began) / rounds)
    assert best < 2e-6  # 0.3 us here; the margin is for slow machines

    tracemalloc.start()
    try:
        for _ in range(10):  # the first rounds warm up tracemalloc itself
            with probe:
                pass
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(100):
            with probe:
                pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - before < 256
