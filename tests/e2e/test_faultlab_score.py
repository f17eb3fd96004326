"""How the fault lab counts: a score that is too kind would be worth nothing."""

import importlib.util

import pytest

from rankscope.agent.wire import STAGES
from tests.lab.faults import case, lab
from tests.lab.faults import score as scoring
from tests.lab.faults.families import REGISTRY

CASES = REGISTRY.cases

EXPECTED = case.Expected(
    kinds=("desync.gradients",),
    stages=("reduced_gradient",),
    ranks=(frozenset({1}),),
    tensors=frozenset({"head.weight"}),
    step=30,
)

# The numbers of the catalogue's section 3, and those of the look-alikes in section 4.
FAULTS = [*range(1, 9), 10, 11, 12, 14, 15, 17, 18, 19, 20, 22, 23, 24, *range(25, 30), 31, 32]
FAULTS += [33, 34, 35, 37, 38, 39, 40, 42, 43, 45, 46, *range(50, 58), 60, 62, 64]
FAULTS += [*range(70, 75), *range(80, 86)]


def alert(**changes):
    right = {
        "kind": "desync.gradients",
        "severity": "critical",
        "stage": "reduced_gradient",
        "ranks": [1],
        "tensors": ["head.weight"],
        "first_step": 30,
    }
    return right | changes


def test_the_right_alert_is_right():
    found, judged = scoring.score(EXPECTED, [alert()], slack=0)
    assert judged == alert()
    assert (found.detected, found.right, found.onset, found.severity) == (True,) * 4
    assert (found.delay, found.extra) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"kind": "desync.parameters"}, "kind"),
        ({"stage": "parameters"}, "stage"),
        ({"stage": None}, "stage"),
        ({"ranks": [0]}, "ranks"),
        ({"ranks": [0, 1]}, "ranks"),
        ({"tensors": ["head.bias"]}, "tensors"),
        ({"tensors": ["head.weight", "head.bias"]}, "tensors"),
        ({"tensors": []}, "tensors"),
    ],
)
def test_each_wrong_answer_counts(changes, wrong):
    found, _ = scoring.score(EXPECTED, [alert(**changes)], slack=0)
    assert found.detected
    assert not found.right
    assert not getattr(found, wrong)


def test_an_alert_from_before_the_fault_detects_nothing():
    found, judged = scoring.score(EXPECTED, [alert(first_step=29)], slack=0)
    assert judged is None
    assert not found.detected
    assert found.extra == 1


def test_a_late_alert_is_right_and_not_in_time():
    found, _ = scoring.score(EXPECTED, [alert(first_step=33)], slack=2)
    assert found.right
    assert not found.onset
    assert found.delay == 3
    assert scoring.score(EXPECTED, [alert(first_step=33)], slack=4)[0].onset


def test_a_whisper_does_not_count_where_a_warning_is_due():
    assert not scoring.score(EXPECTED, [alert(severity="info")], slack=0)[0].detected


def test_a_further_root_alert_is_counted():
    others = [
        alert(kind="loss.spike", first_step=31),
        alert(kind="rank.straggler", severity="info"),
    ]
    found, judged = scoring.score(EXPECTED, [*others, alert()], slack=0)
    assert judged == alert()
    assert found.right
    assert found.extra == 1


def test_without_a_fault_every_serious_alert_is_a_false_alarm():
    alerts = [alert(), alert(severity="warning"), alert(severity="info")]
    found, _ = scoring.score(case.Expected(), alerts, slack=0)
    assert found.false_alarms == 2
    assert not found.detected


def test_an_alarm_about_mere_information_is_too_loud():
    quiet = case.Expected(kinds=("desync.parameters",), severity="info", ceiling="info")
    made = alert(kind="desync.parameters", first_step=0)
    assert not scoring.score(quiet, [made], slack=0)[0].severity
    assert scoring.score(quiet, [made | {"severity": "info"}], slack=0)[0].severity


def test_every_fault_and_every_look_alike_has_a_case():
    numbers = {(i[0], int(i[1:3])) for i in CASES}
    assert numbers >= {("F", n) for n in FAULTS}
    assert numbers >= {("B", n) for n in range(1, 26)}


@pytest.mark.parametrize("kind", CASES.values(), ids=CASES)
def test_what_is_expected_of_a_case_can_be_said(kind):
    jobs = lab.jobs_of([kind], worlds=(2, 4), models=kind.models, seeds=3, all_models=True)
    assert {job.world for job in jobs} == set(kind.worlds)
    for job in jobs:
        made = kind(case.Setting(world=job.world, model=job.model, seed=job.seed))
        expected = made.expected()
        assert set(expected.stages) <= set(STAGES)
        assert case.SEVERITIES.index(expected.severity) <= case.SEVERITIES.index(expected.ceiling)
        assert 0 <= expected.step < kind.steps
        assert all(ranks <= frozenset(range(job.world)) for ranks in expected.ranks)
        assert bool(expected.kinds) == (kind.id[0] == "F")
        assert kind.what
        assert importlib.util.find_spec(f"tests.lab.faults.{kind.family}") is not None
