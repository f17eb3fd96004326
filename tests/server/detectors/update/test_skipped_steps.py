"""Passes go on, and no step comes any more."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors.rank.stalled import RankStalled
from rankscope.server.detectors.runner import Evaluation
from rankscope.server.detectors.update.missing import UpdateMissing
from rankscope.server.window import Occurrence, RankLiveness, Series, Window

LAST = 49


def series(values):
    return Series(values, np.isfinite(values))


def window(events, *, seconds=0.5, ranks=2, now=100.0, last=LAST, steps=True, micro=1, state=""):
    at = np.arange(last + 1) if steps else np.zeros(0, np.int64)
    posted = {"step_seconds": seconds, "micro_steps": micro}
    return Window(
        world_size=ranks,
        ranks=np.arange(ranks),
        steps=at,
        series={n: series(np.full((ranks, len(at)), float(v))) for n, v in posted.items() if steps},
        events=tuple(events),
        liveness=tuple(
            RankLiveness(r, 0.0, now, last, **({"state": state} if state else {}))
            for r in range(ranks)
        ),
        begins=dict.fromkeys(range(ranks), (0,)),
        now=now,
        last_step=last,
    )


def unstepped(rank, **more):
    data = {"passes": 60, "discarded": 59, "forwards": 60, "seconds": 40, "steps": 50} | more
    return Occurrence(rank, LAST + 1, "unstepped", "", data, 99.0)


def found(events, **more):
    evaluation = Evaluation([UpdateMissing()], strict=True)
    findings, _ = evaluation.advance(window(events, **more))
    return [f for f in findings if f.key == "unstepped"]


def test_backward_passes_without_a_step_after_steps_that_came_are_critical():
    (finding,) = found([unstepped(0), unstepped(1)])
    assert (finding.severity, finding.first_step, finding.ranks) == ("critical", LAST + 1, (0, 1))
    assert finding.title == "No optimizer step has ended since step 49 in 60 backward passes"


@pytest.mark.parametrize(
    "more",
    [
        {"seconds": 20},  # an evaluation, say
        {"discarded": 0},  # accumulation
        {"passes": 0, "discarded": 0, "forwards": 300},
    ],
)
def test_what_may_be_ordinary_is_not(more):
    assert not found([unstepped(0, **more)])


def test_of_steps_that_take_long_more_is_allowed():
    assert not found([unstepped(0)], seconds=10.0)
    assert found([unstepped(0, seconds=110)], seconds=10.0)


@pytest.mark.parametrize(("ahead", "passes"), [(32, 40), (31, 40), (32, 31)])
def test_other_ranks_that_go_on_show_it_sooner(ahead, passes):
    event = unstepped(1, passes=0, discarded=0, forwards=passes, seconds=3)
    made = window([event], last=LAST + 1 + ahead, state="finished")
    life = tuple(replace(one, last_step=LAST) if one.rank == 1 else one for one in made.liveness)
    findings, _ = Evaluation([UpdateMissing()], strict=True).advance(replace(made, liveness=life))
    found = [f.ranks for f in findings if f.key == "unstepped"]
    assert found == ([(1,)] if ahead >= 32 and passes >= 32 else [])


def test_forward_passes_alone_are_a_warning_when_they_are_many():
    (finding,) = found([unstepped(0, passes=0, discarded=0, forwards=600)])
    assert finding.severity == "warning"
    assert "it may be an evaluation" in finding.cause


@pytest.mark.parametrize("discarded", [99, 0])
def test_a_run_that_ended_with_as_many_passes_in_vain(discarded):
    short = unstepped(0, passes=101, discarded=discarded, seconds=3)
    (finding,) = found([short], micro=4, state="finished")
    assert (finding.severity, finding.first_step) == ("critical", LAST + 1)
    assert (
        finding.title
        == "No optimizer step has ended since step 49 in 101 backward passes on rank 0"
    )


@pytest.mark.parametrize(
    "more",
    [{"passes": 100}, {"state": ""}, {"state": "failed"}, {"micro": 8}],
    ids=["a report", "goes on", "fails", "many"],
)
def test_what_else_is_computed_at_the_end_is_not(more):
    given = {"passes": 101, "micro": 4, "state": "finished"} | more
    short = unstepped(0, passes=given.pop("passes"), discarded=0, seconds=3)
    assert not found([short], **given)


@pytest.mark.parametrize(("at_end", "number"), [(1, 1), (0, 0)])
def test_what_was_logged_in_the_step_that_never_came(at_end, number):
    # A step that a rank has posted something about: it may have come after an earlier report.
    short = unstepped(0, passes=101, seconds=3, at_end=at_end)
    assert len(found([short], state="finished", last=LAST + 1)) == number


def test_it_is_over_with_the_next_step():
    evaluation = Evaluation([UpdateMissing()], strict=True)
    assert evaluation.advance(window([unstepped(0)]))[0]
    # Something that is logged in it says nothing of its end; the step after it does.
    findings, _ = evaluation.advance(window([], last=LAST + 1, steps=False))
    assert [f for f in findings if f.key == "unstepped"]
    findings, _ = evaluation.advance(window([], last=LAST + 2, steps=False))
    assert not [f for f in findings if f.key == "unstepped"]


def test_ranks_whose_steps_are_all_skipped_have_not_stalled():
    standing = [
        Occurrence(r, LAST - 1, "stalled", "", {"phase": "passes", "step": LAST + 1}, 40.0)
        for r in range(2)
    ]
    findings, checks = Evaluation([RankStalled()], strict=True).advance(window(standing, now=900.0))
    assert not findings
    assert "making forward passes without a step" in checks["rank.stalled"].why


def test_since_when_one_stands_counts_from_its_last_pass():
    def stalled(phase, at, seconds):
        data = {"phase": phase, "step": LAST + 1, "seconds": seconds}
        return [Occurrence(r, LAST - 1, "stalled", "", data, at) for r in range(2)]

    evaluation = Evaluation([RankStalled()], strict=True)
    evaluation.advance(window(stalled("passes", 110.0, 10.0), now=120.0))
    findings, _ = evaluation.advance(
        window(stalled("backward", 1000.0, 12.0), now=1020.0, steps=False)
    )
    assert not findings
    findings, _ = evaluation.advance(window([], now=1400.0, steps=False))
    assert [f.kind for f in findings] == ["rank.stalled"]


def test_parameters_that_move_without_a_step_are_trained_by_something_else():
    def first(rank):
        return unstepped(rank, steps=0)

    moved = [Occurrence(r, 0, "parameters.moved", "", {}, 98.0) for r in (0, 1)]
    (finding,) = found([first(0), first(1)])
    assert finding.severity == "critical"
    (finding,) = found([*moved, first(0), first(1)])
    assert (finding.severity, finding.ranks) == ("info", (0, 1))
    assert "agent.parameter_server" in finding.remedy
    # Of those ranks alone whose parameters stay as they were it is a fault.
    (finding,) = found([moved[0], first(0), first(1)])
    assert (finding.severity, finding.ranks) == ("critical", (1,))
