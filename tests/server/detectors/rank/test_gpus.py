"""A straggler whose GPU throttles."""

import numpy as np

from rankscope.server.detectors.rank.gpus import Gpus
from rankscope.server.detectors.rank.straggler import RankStraggler
from tests.support.judging import judge
from tests.support.runs.timings import timings


def with_gpus(reasons, *, ranks=4, errors=0.0):
    """The timings of a straggler, and readings of every rank's GPU at one step in ten."""
    trace = timings(3, fault="computes")
    shape = ranks, len(trace.steps)
    read = np.zeros(shape, dtype=bool)
    read[:, ::10] = True
    of_rank = np.array([reasons.get(r, 0) for r in range(ranks)], float)
    for name, values in {
        "gpu_throttle_reasons": of_rank,
        "gpu_sm_clock_mhz": np.where(of_rank > 0, 780.0, 1980.0),
        "gpu_temperature_celsius": np.where(of_rank > 0, 91.0, 60.0),
        "gpu_ecc_uncorrected": np.array([0.0, errors, 0.0, 0.0]),
    }.items():
        trace.series[name] = values[:, None].repeat(shape[1], axis=1)
        trace.present[name] = read
    return trace


def alert(trace):
    (found,) = judge(trace, [RankStraggler()]).alerts
    assert (found.kind, found.ranks) == ("rank.straggler", (1,))
    return found


def test_a_straggler_whose_gpu_throttles_says_so():
    found = alert(with_gpus({1: 0x48}, errors=3.0))
    assert (
        "The GPU of rank 1 throttles (hardware slowdown and thermal slowdown by the hardware): "
        "780 MHz, the others' 1,980 MHz." in found.cause.replace("1980", "1,980")
    )
    assert "rank 1 has counted 3 memory errors that ECC could not correct." in found.cause
    assert found.evidence["gpus"] == {
        "1": {
            "gpu_temperature_celsius": 91.0,
            "gpu_sm_clock_mhz": 780.0,
            "gpu_throttle_reasons": 72.0,
            "gpu_ecc_uncorrected": 3.0,
            "throttles": [
                "hardware slowdown",
                "thermal slowdown by the hardware",
            ],
        }
    }


def test_what_the_others_gpus_do_as_well_is_said():
    found = alert(with_gpus({0: 0x04, 1: 0x04, 2: 0x04, 3: 0x04}))
    assert "The GPU of rank 1 throttles (power cap), as do those of" in found.cause


def test_a_gpu_that_runs_as_it_should_is_evidence_and_no_cause():
    found = alert(with_gpus({}))  # idle clocks and the like are no throttling
    assert "GPU" not in found.cause
    assert found.evidence["gpus"]["1"]["throttles"] == []


def test_without_readings_nothing_is_said():
    found = alert(timings(3, fault="computes"))
    assert "gpus" not in found.evidence


def test_readings_are_bounded():
    gpus = Gpus()
    for window in with_gpus({1: 0x40}).windows(range(0, 200, 20)):
        gpus.take(window)
    assert gpus.throttles(1) == ("thermal slowdown by the hardware",)
    assert {len(v) for of in gpus.readings.values() for v in of.values()} == {16}
