"""Pass, fail or pending, as a table."""

from dataclasses import replace

import pytest

from rankscope.server.alerts.verdict import counted, judge, least_sampled, not_seen
from rankscope.server.window import Check, Status
from tests.support.incidents import alert

OK = Check(Status.OK, "Nothing in 300 steps.")
OPEN = Check(Status.OPEN, "There is an alert.")
SHORT = Check(Status.INSUFFICIENT_DATA, "32 steps are needed, 12 are there.")
ALONE = Check(Status.NOT_APPLICABLE, "There is one rank.")
SELDOM = Check(Status.INSUFFICIENT_DATA, "`loss` is recorded at one of 8 steps.")
OTHER_PROFILE = Check(Status.NOT_APPLICABLE, "Profile reinforcement.")
BROKEN = Check(Status.ERROR, "It raised.")

GOOD = dict.fromkeys(("desync.parameters", "loss.nonfinite", "loss.spike", "rank.loss_outlier"), OK)
DESYNC = alert("desync.parameters", 50, severity="critical", ranks=(2,), clear_after=None)
SPIKE = alert("loss.spike", 60)
INFO = alert("loss.oscillating", 60, severity="info")
CHILD = alert("loss.spike", 60, parent=DESYNC.id)
PARENT = alert(
    "desync.parameters", 50, severity="warning", clear_after=None, consequences=("loss.spike@60",)
)

TABLE = {
    "nothing found": ("pass", "finished", 4, [], GOOD, {}),
    "still running": ("pending", "running", 4, [], GOOD, {}),
    "failed": ("fail", "failed", 4, [], GOOD, {}),
    "lost": ("fail", "lost", 4, [], GOOD, {}),
    "an alert fails a run before its end": ("fail", "running", 4, [DESYNC], GOOD, {}),
    "resolved is no excuse": (
        "fail",
        "finished",
        4,
        [alert("loss.spike", 60, state="resolved", resolved_at=1.0)],
        GOOD,
        {},
    ),
    "info does not fail": ("pass", "finished", 4, [INFO], GOOD, {}),
    "warning does not fail on critical": (
        "pass",
        "finished",
        4,
        [SPIKE],
        GOOD,
        {"fail_on": "critical"},
    ),
    "critical does": ("fail", "finished", 4, [DESYNC], GOOD, {"fail_on": "critical"}),
    "a warning with a critical consequence does": (
        "fail",
        "finished",
        4,
        [PARENT, alert("loss.spike", 60, severity="critical", parent=PARENT.id)],
        GOOD,
        {"fail_on": "critical"},
    ),
    "ignored": ("pass", "finished", 4, [SPIKE], GOOD, {"ignored": {"loss.spike"}}),
    "silenced": ("pass", "finished", 4, [SPIKE], GOOD, {"silenced": {"loss.spike"}}),
    "silenced with what follows from it": (
        "pass",
        "finished",
        4,
        [DESYNC, CHILD],
        GOOD,
        {"silenced": {"desync.parameters"}},
    ),
    "another kind than asked for": (
        "pass",
        "finished",
        4,
        [SPIKE],
        GOOD,
        {"kinds": {"desync.parameters"}},
    ),
    "asked for, and a consequence of something else": (
        "fail",
        "finished",
        4,
        [DESYNC, CHILD],
        GOOD,
        {"kinds": {"loss.spike"}},
    ),
    "too short": ("pending", "finished", 4, [], GOOD | {"loss.spike": SHORT}, {}),
    "too short, and failing": ("fail", "finished", 4, [DESYNC], GOOD | {"loss.spike": SHORT}, {}),
    "too short for what is ignored": (
        "pass",
        "finished",
        4,
        [],
        GOOD | {"loss.spike": SHORT},
        {"ignored": {"loss.spike"}},
    ),
    "too short for what is not required": (
        "pass",
        "finished",
        4,
        [],
        GOOD | {"rank.loss_outlier": SHORT},
        {},
    ),
    "too short for what is asked for": (
        "pending",
        "finished",
        4,
        [],
        GOOD | {"rank.loss_outlier": SHORT},
        {"kinds": {"rank.loss_outlier"}},
    ),
    "losses are recorded too seldom for a jump, and have not left what they had reached": (
        "pass",
        "finished",
        4,
        [],
        GOOD | {"loss.spike": SELDOM, "loss.diverging": OK},
        {},
    ),
    "... and nobody has compared whether they have": (
        "pending",
        "finished",
        4,
        [],
        GOOD | {"loss.spike": SELDOM, "loss.diverging": SHORT},
        {},
    ),
    "... and whether they have is ignored": (
        "pending",
        "finished",
        4,
        [],
        GOOD | {"loss.spike": SELDOM, "loss.diverging": OK},
        {"ignored": {"loss.diverging"}},
    ),
    "... and a jump was asked for": (
        "pending",
        "finished",
        4,
        [],
        GOOD | {"loss.spike": SELDOM, "loss.diverging": OK},
        {"kinds": {"loss.spike"}},
    ),
    "... of a loss that need not fall": (
        "pass",
        "finished",
        4,
        [],
        GOOD | {"loss.spike": SELDOM, "loss.diverging": OTHER_PROFILE},
        {},
    ),
    "nothing takes the place of a detector that failed": (
        "pending",
        "finished",
        4,
        [],
        GOOD | {"loss.spike": BROKEN, "loss.diverging": OK},
        {},
    ),
    "no two ranks hold the same": (
        "pass",
        "finished",
        4,
        [],
        GOOD | {"desync.parameters": ALONE},
        {},
    ),
    "open, but not severe": ("pass", "finished", 4, [INFO], GOOD | {"loss.spike": OPEN}, {}),
    "a detector that failed": ("pending", "finished", 4, [], GOOD | {"loss.spike": BROKEN}, {}),
    "not a single check": ("pending", "finished", 4, [], {}, {}),
    "one rank": ("pass", "finished", 1, [], GOOD | {"desync.parameters": ALONE}, {}),
    "nothing but what does not apply": (
        "pending",
        "finished",
        1,
        [],
        GOOD | {"desync.parameters": ALONE},
        {"kinds": {"desync.parameters"}},
    ),
    "one of two does not apply": (
        "pass",
        "finished",
        1,
        [],
        GOOD | {"desync.parameters": ALONE},
        {"kinds": {"desync.parameters", "loss.spike"}},
    ),
    "a kind that nobody looks for": (
        "pending",
        "finished",
        4,
        [],
        GOOD,
        {"kinds": {"data.duplicated"}},
    ),
    "everything ignored": (
        "pending",
        "finished",
        1,
        [],
        GOOD,
        {"ignored": {"loss.spike", "loss.nonfinite"}},
    ),
}


@pytest.mark.parametrize(
    ("expected", "state", "ranks", "alerts", "checks", "more"), TABLE.values(), ids=TABLE
)
def test_table(expected, state, ranks, alerts, checks, more):
    verdict = judge(state, ranks, alerts, checks, **more)
    assert verdict.verdict == expected, verdict.reasons
    assert bool(verdict.reasons) is (expected != "pass")
    failed = [line.name for line in verdict.checks if line.state == "failed"]
    assert bool(failed) is (expected == "fail" and state not in ("failed", "lost"))


def test_reasons_say_what_is_the_matter():
    short = GOOD | {"loss.spike": SHORT}
    assert judge("running", 4, [], short).reasons == (
        "the run is still running",
        "loss.spike: too little data to judge: 32 steps are needed, 12 are there.",
    )
    assert judge("finished", 4, [DESYNC], GOOD).reasons == (
        "desync.parameters (critical): desync.parameters seen at 50",
    )
    assert "the run failed" in judge("failed", 4, [], GOOD).reasons[0]


def test_what_was_not_run_does_not_read_as_passed():
    checks = GOOD | {"loss.spike": SHORT, "rank.loss_outlier": ALONE}
    verdict = judge(
        "finished",
        4,
        [DESYNC, CHILD],
        checks,
        silenced={"loss.nonfinite"},
        ignored={"loss.plateau"},
    )
    lines = {line.name: (line.state, line.why) for line in verdict.checks}
    assert lines == {
        "desync.parameters": ("failed", "desync.parameters seen at 50"),
        "loss.nonfinite": ("not_run", "silenced in this run"),
        "loss.spike": ("failed", "since step 60, as a consequence of desync.parameters"),
        "rank.loss_outlier": ("not_run", "does not apply: There is one rank."),
    }


def test_a_pass_says_what_was_required_and_what_stood_for_it():
    checks = GOOD | {"loss.spike": SELDOM, "loss.diverging": OK, "desync.parameters": ALONE}
    verdict = judge("finished", 4, [], checks)
    assert [(r.name, r.state, r.by) for r in verdict.required] == [
        ("desync.parameters", "not_applicable", ""),
        ("loss.nonfinite", "judged", "loss.nonfinite"),
        ("loss.spike", "judged", "loss.diverging"),
    ]
    assert "recorded at one of 8 steps" in verdict.required[2].why
    # What took its place does not make it checked.
    assert {c.name: c.state for c in verdict.checks}["loss.spike"] == "not_run"


def test_kinds_that_were_asked_for_are_listed_even_without_a_detector():
    verdict = judge("finished", 4, [], GOOD, kinds={"data.overlap"})
    assert [(c.name, c.state) for c in verdict.checks] == [("data.overlap", "not_run")]


def test_an_unknown_severity_is_refused():
    with pytest.raises(ValueError, match="none of info, warning, critical"):
        judge("finished", 1, [], GOOD, fail_on="bad")


@pytest.mark.parametrize(
    ("one", "resumed_step", "expected"),
    [
        ({"start": 1}, None, True),
        ({"start": 0}, None, False),
        ({"start": 0, "state": "open"}, None, False),
        ({"start": 1, "last_step": 99}, 100, False),
        ({"start": 1, "last_step": 100}, 100, True),
        ({"start": 1, "last_step": 99, "state": "open"}, 100, True),
    ],
)
def test_alerts_of_the_last_start_count(one, resumed_step, expected):
    found = replace(alert("loss.spike", 10), state="resolved", last_step=120)
    found = replace(found, **one)
    assert counted([found], first=1, last=1, resumed_step=resumed_step) == (
        [found] if expected else []
    )


def test_a_root_counts_where_what_follows_from_it_does():
    root = replace(alert("desync.gradients", 10), state="resolved", last_step=50)
    follows = replace(alert("loss.spike", 10), state="open", parent=root.id)
    assert counted([root, follows], first=0, last=0, resumed_step=100) == [root, follows]
    assert counted([root], first=0, last=0, resumed_step=100) == []


def test_what_one_launch_found_in_any_of_its_trainings_counts():
    found = [alert("loss.spike", 10, id=str(n), start=n, state="resolved") for n in range(4)]
    assert counted(found, first=1, last=2, resumed_step=None) == found[1:3]


def test_a_pass_names_what_could_not_have_been_seen():
    checks = judge("finished", 4, [], GOOD | {"gradient.nonfinite": OK, "desync.rng": SHORT}).checks
    reported = not_seen(checks, sampled=0.125, interval=64)
    assert reported.startswith(
        "In the 88 % of the steps that were not sampled in full (one step in 64"
    )
    # Losses are known of other steps, too, and what was not judged has not passed.
    assert reported.endswith("could not have been seen: desync.parameters, gradient.nonfinite.")
    assert "0.4 %" in not_seen(checks, sampled=0.996, interval=1)
    assert not_seen(checks, sampled=1.0, interval=1) is None
    assert not_seen(checks, sampled=None, interval=1) is None
    assert not_seen(judge("finished", 1, [], {}).checks, sampled=0.5, interval=1) is None
    assert least_sampled([1.0, None, 0.25]) == 0.25
    assert least_sampled([None]) is None
