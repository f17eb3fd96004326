"""Every kind has cases: runs on which it must speak, and runs on which it must be quiet."""

from functools import cache
from pathlib import Path

import pytest
import yaml

from rankscope.server.detectors import DETECTORS
from tests.support.judging import judge
from tests.support.runs.scenarios import GENERATORS

CASES = Path(__file__).parent / "cases"
BY_NAME = {detector.__name__: detector for detector in DETECTORS}


def load():
    for path in sorted(CASES.glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for case in content["cases"]:
            yield pytest.param(
                path.stem, content["detector"], case, id=f"{path.stem}: {case['name']}"
            )


@cache
def judgement(detector, generator, arguments, seed):
    scenario = GENERATORS[generator](seed, **dict(yaml.safe_load(arguments)))
    return judge(scenario, [BY_NAME[detector]()], range(0, 2000, 33))


@pytest.mark.parametrize(("kind", "detector", "case"), list(load()))
def test_case(kind, detector, case):
    seed = case.get("seed", 0)
    found = judgement(detector, case["generator"], yaml.safe_dump(case.get("with", {})), seed)
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
            content = yaml.safe_load((CASES / f"{kind}.yaml").read_text(encoding="utf-8"))
            assert content["detector"] == detector.__name__
            quiet = [case["finds"] == "nothing" for case in content["cases"]]
            assert any(quiet), kind
            assert not all(quiet), kind


def test_every_case_file_is_of_a_kind():
    kinds = {kind for detector in DETECTORS for kind in detector.kinds}
    assert {path.stem for path in CASES.glob("*.yaml")} == kinds
