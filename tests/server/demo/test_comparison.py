"""When the demo is content with what was found, and what it says when not."""

import pytest

from rankscope.server.demo.comparison import compare
from rankscope.server.demo.faults import FAULTS, Injection

FLIP = Injection(FAULTS["bitflip"], rank=2, step=300, tensor="conv2.weight")
LABELS = Injection(FAULTS["bad-labels"], rank=1, step=300)
RATE = Injection(FAULTS["high-lr"], step=300)
NONE = Injection(FAULTS["none"])


def alert(**changes):
    return {
        "kind": "desync.parameters",
        "severity": "critical",
        "ranks": [2],
        "first_step": 300,
        "tensors": ["conv2.weight"],
        **changes,
    }


def test_the_right_alert_is_as_injected():
    comparison = compare(FLIP, [alert()], world_size=4)
    assert comparison.as_injected
    assert comparison.injected == "bitflip at step 300 on rank 2, tensor conv2.weight"
    assert comparison.found == ("desync.parameters since step 300 on rank 2, tensor conv2.weight",)


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"kind": "desync.gradients"}, "kind"),
        ({"ranks": [3]}, "ranks"),
        ({"ranks": [2, 3]}, "ranks"),
        ({"ranks": []}, "ranks"),
        ({"first_step": 301}, "first step"),
        ({"first_step": 299}, "first step"),
        ({"tensors": []}, "tensors"),
        ({"tensors": ["conv2.weight", "conv1.weight"]}, "tensors"),
        ({"severity": "info"}, "no alert"),
    ],
)
def test_anything_else_about_it_is_wrong(changes, phrase):
    comparison = compare(FLIP, [alert(**changes)], world_size=4)
    assert not comparison.as_injected
    assert len(comparison.wrong) == 1
    assert phrase in comparison.wrong[0]


def test_a_second_root_alert_is_wrong_and_an_info_beside_it_is_not():
    other = alert(kind="loss.spike", severity="warning")
    assert not compare(FLIP, [alert(), other], world_size=4).as_injected
    assert compare(FLIP, [alert(), {**other, "severity": "info"}], world_size=4).as_injected


def test_statistics_may_be_some_steps_beside():
    found = alert(kind="rank.loss_outlier", ranks=[1], tensors=[], first_step=310)
    tolerance = LABELS.fault.tolerance
    assert compare(LABELS, [found], world_size=4).as_injected
    assert compare(LABELS, [{**found, "first_step": 300 - tolerance}], world_size=4).as_injected
    beyond = {**found, "first_step": 301 + tolerance}
    assert not compare(LABELS, [beyond], world_size=4).as_injected


def test_a_fault_of_all_ranks_may_name_any_and_one_of_several_kinds():
    for kind in RATE.fault.kinds:
        found = alert(kind=kind, tensors=[], ranks=[0, 1, 2, 3])
        assert compare(RATE, [found], world_size=4).as_injected


def test_without_a_fault_there_must_be_nothing():
    assert compare(NONE, [], world_size=4).as_injected
    assert compare(NONE, [alert(severity="info")], world_size=4).as_injected
    assert compare(NONE, [], world_size=4).found == ("nothing",)
    assert not compare(NONE, [alert(severity="warning")], world_size=4).as_injected
