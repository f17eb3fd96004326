"""Alerts over the steps of a run: when they open, change, resolve, and what hangs under what."""

import pytest

from rankscope.server.alerts import lifecycle
from tests.support.incidents import TimeLine, finding, timeless


def test_opens_once_is_extended_and_resolves():
    line = TimeLine()
    assert line.through(9) == []
    opened = line.through(10, finding("loss.spike", 10, clear_after=5), now=100.0)
    assert opened == ["10 opened loss.spike"]
    assert line.through(12, finding("loss.spike", 12, clear_after=5)) == []
    assert line.through(17) == []
    assert line.through(18, now=200.0) == ["18 resolved loss.spike"]
    alert = line.one("loss.spike")
    assert (alert.state, alert.first_step, alert.seen_step, alert.last_step) == (
        "resolved",
        10,
        10,
        12,
    )
    assert (alert.opened_at, alert.resolved_at) == (100.0, 200.0)
    assert line.through(100) == []


def test_the_newest_finding_is_reported_and_a_further_fault_takes_nothing_back():
    line = TimeLine()
    first = finding("desync.parameters", 10, stage="parameters", ranks=(1,), clear_after=None)
    line.through(10, first)
    worse = finding(
        "desync.parameters",
        11,
        first_step=7,
        severity="critical",
        stage="start",
        ranks=(1, 2),
        tensors=("a", "b"),
        evidence={"distance": 2.0},
        clear_after=None,
    )
    assert line.through(11, worse) == ["11 updated severity desync.parameters"]
    assert line.through(12, finding("desync.parameters", 12, ranks=(2,), clear_after=None)) == []
    alert = line.one("desync.parameters")
    assert (alert.severity, alert.first_step, alert.last_step) == ("critical", 7, 12)
    assert (alert.ranks, alert.tensors, alert.evidence) == ((2,), (), {})
    assert alert.stage == "parameters"
    assert alert.title == "desync.parameters seen at 12; first at step 7"


def test_a_detector_may_take_back_what_it_said_of_the_same_incident():
    """While the size of a difference was not known, it might have been anything."""
    line = TimeLine()
    line.through(10, finding("desync.parameters", 10, severity="critical", clear_after=8))
    smaller = finding(
        "desync.parameters", 10, 16, severity="info", clear_after=8, stage="outside_optimizer"
    )
    assert line.through(16, smaller) == ["16 updated severity desync.parameters"]
    alert = line.one("desync.parameters")
    assert (alert.severity, alert.stage) == ("info", "outside_optimizer")


def test_never_resolves_by_itself_without_clear_after():
    line = TimeLine()
    line.through(10, finding("desync.parameters", 10, clear_after=None))
    assert line.through(100_000) == []
    assert line.through(100_001, finding("desync.parameters", 100_001, clear_after=None)) == []
    assert line.one("desync.parameters").last_step == 100_001


def test_comes_again_as_a_new_alert():
    line = TimeLine()
    line.through(10, finding("desync.parameters", 10, clear_after=3))
    assert line.through(30, finding("desync.parameters", 20, clear_after=3)) == [
        "14 resolved desync.parameters",
        "20 opened desync.parameters",
        "24 resolved desync.parameters",
    ]
    assert len(line.alerts) == 2


@pytest.mark.parametrize(("gap", "alerts"), [(1, 1), (4, 1), (5, 2)])
def test_clear_after_is_the_longest_gap_within_one_alert(gap, alerts):
    for blocks in ([50], range(10, 51)):
        line = TimeLine()
        found = [finding("loss.spike", s, clear_after=4) for s in (10, 10 + gap)]
        for step in blocks:
            line.through(step, *(f for f in found if f.seen_step == step or len(blocks) == 1))
        assert len(line.alerts) == alerts


def test_steps_in_a_row_are_one_alert_even_if_it_clears_at_once():
    line = TimeLine()
    for step in (10, 11, 12):
        line.through(step, finding("loss.nonfinite", step))
    assert line.through(13) == ["13 resolved loss.nonfinite"]
    assert len(line.alerts) == 1


def test_different_keys_are_different_incidents():
    line = TimeLine()
    found = [finding("rank.loss_outlier", 10, key=f"rank:{r}", ranks=(r,)) for r in (0, 3)]
    line.through(10, *found)
    assert sorted(a.ranks for a in line.alerts.values()) == [(0,), (3,)]


def test_a_silent_rank_is_over_when_it_is_heard_again():
    line = TimeLine()
    silent = finding("rank.silent", 40, key="rank:2", ranks=(2,), clear_after=None)
    assert line.through(50, silent) == ["40 opened rank.silent"]
    # No step passes while all wait for it.
    assert line.through(50, silent) == []
    assert line.through(50) == ["50 resolved rank.silent"]


def test_a_rank_that_falls_silent_again_at_the_same_step_is_the_same_alert():
    line = TimeLine()
    silent = finding("rank.silent", 40, key="rank:2", ranks=(2,))
    line.through(50, silent, now=100.0)
    line.through(50, now=200.0)
    line.through(50, silent, now=300.0)
    alert = line.one("rank.silent")
    assert (alert.state, alert.opened_at, alert.resolved_at) == ("open", 100.0, None)


def test_ids_are_those_of_the_data():
    story = [(10, finding("loss.spike", 10)), (30, finding("loss.nonfinite", 30))]
    first, again, other = TimeLine(), TimeLine(), TimeLine("another run")
    for line in (first, again, other):
        for now, (step, found) in enumerate(story):
            line.through(step, found, now=float(now + 100 * (line is again)))
    assert timeless(first.alerts.values()) == timeless(again.alerts.values())
    assert not set(first.alerts) & set(other.alerts)
    assert all(len(i) == 16 and int(i, 16) >= 0 for i in first.alerts)


def test_what_a_second_evaluation_does_not_show_is_resolved():
    before, again = TimeLine(), TimeLine()
    spike = finding("loss.spike", 20, clear_after=100)
    before.through(20, finding("desync.parameters", 10, clear_after=None, ranks=(1,)))
    before.through(20, spike)
    again.through(20, finding("desync.parameters", 10, clear_after=None, ranks=(1,)))
    folded = lifecycle.unconfirmed(
        tuple(before.alerts.values()), tuple(again.alerts.values()), through_step=20, now=5.0
    )
    (alert,) = folded.alerts
    assert (alert.kind, alert.state, alert.resolved_at) == ("loss.spike", "resolved", 5.0)
    assert [t.what for t in folded.transitions] == ["resolved"]


def test_a_root_found_later_takes_its_consequence():
    line = TimeLine()
    line.through(110, finding("loss.spike", 110, ranks=()))
    assert line.roots() == ["loss.spike"]
    late = finding("rank.loss_outlier", 150, first_step=100, ranks=(2,), key="rank:2")
    assert line.through(150, late) == [
        "150 opened rank.loss_outlier",
        "111 resolved loss.spike",
        "150 linked loss.spike",
    ]
    assert line.roots() == ["rank.loss_outlier"]
    outlier = line.one("rank.loss_outlier")
    assert outlier.consequences == (line.one("loss.spike").id,)
    assert line.reasons[-1] == (
        "It follows from rank.loss_outlier since step 100: "
        "the loss of that rank alone moves the mean over the ranks."
    )


def test_a_rate_that_is_too_high_makes_one_alert():
    """Spike at once, then a divergence dated back, then the end."""
    line = TimeLine()
    line.through(121, finding("loss.spike", 121, clear_after=16))
    line.through(150, finding("loss.diverging", 150, first_step=118, clear_after=90))
    line.through(180, finding("loss.nonfinite", 171, 180, severity="critical", clear_after=50))
    assert line.roots() == ["loss.diverging"]
    assert len(line.one("loss.diverging").consequences) == 2


def test_an_incident_that_is_reported_again_after_its_end_stays_over():
    line = TimeLine()
    spike = finding("loss.spike", 10, 12, clear_after=5)
    line.through(12, spike)
    assert line.through(18, spike) == ["18 resolved loss.spike"]
    before = dict(line.alerts)
    assert line.through(40, spike, now=99.0) == []
    assert line.alerts == before


def test_an_incident_that_goes_on_after_all_is_the_same_alert():
    """Its detector found meanwhile that observations are rarer than it had thought."""
    line = TimeLine()
    line.through(10, finding("loss.nonfinite", 10, clear_after=0), now=1.0)
    assert line.through(15) == ["11 resolved loss.nonfinite"]
    assert line.through(20, finding("loss.nonfinite", 10, 20, clear_after=50), now=2.0) == [
        "10 opened loss.nonfinite"
    ]
    alert = line.one("loss.nonfinite")
    assert (alert.state, alert.opened_at, alert.last_step) == ("open", 1.0, 20)


def test_a_server_that_has_just_started_does_not_take_a_silent_rank_for_heard():
    silent = finding("rank.silent", 40, key="host:a", ranks=(2, 3), clear_after=0)
    before = TimeLine()
    before.through(50, silent, finding("loss.spike", 30, clear_after=90), now=100.0)
    again = TimeLine()
    again.alerts = {a.id: a for a in lifecycle.carried(tuple(before.alerts.values()))}
    assert [a.kind for a in again.alerts.values()] == ["rank.silent"]
    heard_at = {0: 500.0, 1: 500.0, 2: 60.0}
    assert again.through(50, now=501.0, heard_at=heard_at) == []
    # It is found again: the same alert. Then one of its ranks is heard of.
    assert again.through(50, silent, now=530.0, heard_at=heard_at) == []
    assert again.one("rank.silent").opened_at == 100.0
    assert again.through(50, now=541.0, heard_at={**heard_at, 2: 540.0}) == [
        "50 resolved rank.silent"
    ]


def test_ranks_that_the_job_went_on_without_are_over_when_the_others_are_heard():
    line = TimeLine()
    line.through(37, finding("rank.failed", 37, ranks=(2, 3), clear_after=0), now=100.0)
    heard_at = {0: 99.0, 1: 99.0, 2: 99.0, 3: 99.0}
    assert line.through(37, now=101.0, heard_at=heard_at, world_size=2) == []
    heard_at |= {0: 110.0}
    assert line.through(40, now=111.0, heard_at=heard_at, world_size=4) == []
    assert line.through(40, now=111.0, heard_at=heard_at, world_size=2) == [
        "40 resolved rank.failed"
    ]


def test_the_first_host_that_falls_silent_stops_the_others():
    line = TimeLine()
    first = finding("rank.silent", 41, key="host:b", ranks=(2, 3))
    line.through(41, first, now=100.0)
    line.through(41, first, finding("rank.silent", 40, key="host:a", ranks=(0,)), now=130.0)
    (root,) = (a for a in line.alerts.values() if a.parent is None)
    assert root.ranks == (2, 3)


def test_hosts_that_fall_silent_at_once_are_both_named():
    line = TimeLine()
    both = [finding("rank.silent", 41, key=f"host:{h}", ranks=(r,)) for r, h in enumerate("ab")]
    line.through(41, *both, now=100.0)
    assert line.roots() == ["rank.silent", "rank.silent"]


def test_numbers_that_nobody_knows_are_left_out_of_the_evidence():
    line = TimeLine()
    evidence = {
        "relative": float("nan"),
        "sizes": [(137, 0.5, float("inf"))],
        "details": [{"distance": 0.5, "factor": float("nan")}],
        # What the trainer had.
        "value": "NaN",
    }
    line.through(8, finding("desync.gradients", 7, evidence=evidence))
    line.through(16, finding("desync.gradients", 7, 15, evidence=evidence))
    [alert] = line.alerts.values()
    assert alert.evidence == {
        "relative": None,
        "sizes": [[137, 0.5, None]],
        "details": [{"distance": 0.5, "factor": None}],
        "value": "NaN",
    }
