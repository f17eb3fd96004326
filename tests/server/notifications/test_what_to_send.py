"""What a target is told of an alert, by what it has been told before."""

import pytest

from rankscope.server.notifications.what_to_send import covers, retry_at, what_to_tell
from rankscope.server.storage.judgement.notifications import Notification, Target
from tests.support.incidents import alert

PROJECT = "vision"


def target(**more):
    given = {"projects": None, "kinds": None, "severity": "warning", "created_at": 0.0}
    return Target("t", "ops", "webhook://h", **(given | more))


def made(severity="warning", state="open", **more):
    return alert("loss.spike", 10, severity=severity, state=state, opened_at=100.0, **more)


def told(what):
    return Notification(1, "a", "t", told=what)


@pytest.mark.parametrize(
    ("state", "severity", "before", "what"),
    [
        ("open", "info", "", ""),
        ("open", "warning", "", "opened"),
        ("open", "critical", "", "opened"),
        ("open", "critical", "warning", "raised"),
        ("open", "warning", "warning", ""),
        ("open", "warning", "critical", ""),
        ("open", "warning", "resolved", "reopened"),
        ("resolved", "warning", "warning", "resolved"),
        ("resolved", "warning", "resolved", ""),
        # Over before anybody was told: told all the same.
        ("resolved", "warning", "", "resolved"),
        ("resolved", "info", "", ""),
    ],
)
def test_what_is_told(state, severity, before, what):
    found = what_to_tell(
        made(severity, state), target(), project=PROJECT, quiet=False, before=told(before)
    )
    assert found == what


@pytest.mark.parametrize(
    ("state", "before", "what"),
    [("open", "", ""), ("open", "resolved", ""), ("resolved", "warning", "resolved")],
)
def test_of_what_somebody_knows_only_the_end_is_told(state, before, what):
    found = what_to_tell(
        made("critical", state), target(), project=PROJECT, quiet=True, before=told(before)
    )
    assert found == what


def test_what_opened_before_the_target_was_there_is_not_told():
    late = target(created_at=101.0)
    assert what_to_tell(made(), late, project=PROJECT, quiet=False, before=None) == ""


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({}, True),
        ({"projects": ("vision", "text")}, True),
        ({"projects": ("text",)}, False),
        ({"kinds": ("loss.*",)}, True),
        ({"kinds": ("desync.*", "loss.spike")}, True),
        ({"kinds": ("desync.*",)}, False),
        ({"severity": "critical"}, False),
    ],
)
def test_what_a_target_wants_to_hear_of(limits, wanted):
    assert covers(target(**limits), project=PROJECT, alert=made()) is wanted


def test_tries_come_less_and_less_often_and_end():
    pauses = [
        retry_at(Notification(1, "a", "t", wanted_at=0.0, failures=n), now=100.0) - 100.0
        for n in range(20)
    ]
    assert pauses[:4] == [5.0, 10.0, 20.0, 40.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 900.0
    old = Notification(1, "a", "t", wanted_at=0.0, failures=300)
    assert retry_at(old, now=4 * 86400.0) is None
