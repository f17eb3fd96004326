"""A part of the fault lab: real jobs on two ranks, broken at each link of the chain."""

import json

import pytest

from tests.support.faultlab import ran

pytestmark = pytest.mark.e2e

# A fault before the first step, one at each link that is compared bit by bit, one that all ranks
# share.
FAULTS = ("F06", "F18", "F24", "F35", "F60", "F62")
BENIGN = ("B00", "B04")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    options = ("--ranks", "2", "--full-sampling", "--case", *FAULTS, *BENIGN)
    folder = ran(tmp_path_factory.mktemp("faultlab"), *options)
    assert (folder / "table.md").read_text(encoding="utf-8").count("\n| F") == len(FAULTS)
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_named_and_dated(results, fault):
    (result,) = [r for r in results["results"] if r["case"] == fault]
    assert result["score"]["right"], result
    assert result["score"]["onset"], result
    assert result["score"]["extra"] == 0, result


@pytest.mark.parametrize("case", BENIGN)
def test_there_is_no_false_alarm(results, case):
    (result,) = [r for r in results["results"] if r["case"] == case]
    assert result["score"]["false_alarms"] == 0, result


def test_the_summary_counts_what_there_is(results):
    summary = results["summary"]
    assert summary["faults"] == summary["detected"] == summary["right"] == len(FAULTS)
    assert summary["benign"] == len(BENIGN)
    assert summary["benign_with_alarm"] == summary["not_judged"] == 0
