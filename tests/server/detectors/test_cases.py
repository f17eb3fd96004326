"""Every kind has cases: runs on which it must speak, and runs on which it must be quiet."""

import pytest

from rankscope.server.detectors import DETECTORS
from tests.support.detector_cases import cases
from tests.support.judging import judge
from tests.support.runs.scenarios import GENERATORS

BY_NAME = {detector.__name__: detector for detector in DETECTORS}


def load():
    for kind, content in cases().items():
        for case in content["cases"]:
            yield pytest.param(kind, content["detector"], case, id=f"{kind}: {case['name']}")


_judged = {}


def judgement(detector, case):
    """What a detector says of a run; kinds that it has together share it."""
    seed, arguments = case.get("seed", 0), case.get("with", {})
    run = (detector, case["generator"], repr(arguments), seed)
    if run not in _judged:
        scenario = GENERATORS[case["generator"]](seed, **arguments)
        _judged[run] = judge(scenario, [BY_NAME[detector]()], range(0, 2000, 33))
    return _judged[run]


@pytest.mark.parametrize(("kind", "detector", "case"), list(load()))
def test_case(kind, detector, case):
    found = judgement(detector, case)
    alerts, check, expected = found.of(kind), found.checks[kind], case["finds"]
    if expected == "nothing":
        assert alerts == []
        assert check.status == case.get("answer", "ok")
        assert check.why.endswith(".")
        return
    assert len(alerts) >= 1
    if "alerts" in expected:
        assert len(alerts) == expected["alerts"]
    alert = alerts[-1]
    assert alert.cause.endswith(".")
    assert alert.remedy.endswith(".")
    assert len(alert.title) < 120
    assert not alert.title.endswith(".")
    for attribute in ("severity", "state", "stage"):
        if attribute in expected:
            assert getattr(alert, attribute) == expected[attribute]
    for attribute in ("ranks", "tensors"):
        if attribute in expected:
            assert list(getattr(alert, attribute)) == expected[attribute]
    if "first_step" in expected:
        low, high = expected["first_step"]
        assert low <= alert.first_step <= high
    for name, (low, high) in expected.get("evidence", {}).items():
        assert low <= alert.evidence[name] <= high
    assert expected.get("says", "") in alert.cause + alert.remedy
    if alert.state == "open" and alert.key != "synchronised":
        assert check.status == "open"


def test_every_kind_has_cases_for_both():
    for detector in DETECTORS:
        for kind in detector.kinds:
            content = cases()[kind]
            assert content["detector"] == detector.__name__
            quiet = [case["finds"] == "nothing" for case in content["cases"]]
            assert any(quiet), kind
            assert not all(quiet), kind


def test_every_case_file_is_of_a_kind():
    kinds = {kind for detector in DETECTORS for kind in detector.kinds}
    assert cases().keys() == kinds
