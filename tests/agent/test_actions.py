"""`monitor.actions`: what an alert asks for is done by all ranks at the same step, or by none."""

import json
import logging
from pathlib import Path

import pytest

from rankscope import agent
from rankscope.agent.actions import Actions
from tests.support.jobs import acting_job
from tests.support.jobs.ranks import run_ranks


@pytest.mark.e2e
def test_ranks_act_together_though_one_alone_hears_of_it(tmp_path):
    run_ranks(
        Path(acting_job.__file__),
        str(tmp_path),
        ranks=3,
        folder=tmp_path / "logs",
        timeout_s=120,
    ).check()
    done = [json.loads((tmp_path / f"done_{rank}.json").read_text()) for rank in range(3)]
    assert done[0] == done[1] == done[2]
    assert [due for _, due in done[0]] == ["save", "skip", "stop"]
    assert [step for step, _ in done[0]] == sorted({step for step, _ in done[0]})


def test_one_rank_needs_nobody():
    with agent.start(run="r", mode="offline") as monitor:
        actions = monitor.actions()
        assert actions.due() == ""
        actions.save({"kind": "loss.spike"})
        actions.stop({"kind": "loss.nonfinite"})
        assert [actions.due() for _ in range(3)] == ["stop", "save", ""]


def test_several_ranks_without_an_agreement_do_nothing_and_it_is_said(caplog):
    with caplog.at_level(logging.WARNING, "rankscope"):
        with agent.start(run="r", rank=0, world_size=2, mode="offline") as monitor:
            actions = monitor.actions()
            actions.stop({})
            assert actions.due() == ""
    assert "ranks act together only" in caplog.text


def test_a_storm_of_alerts_leaves_something_to_train_on():
    actions = Actions()
    done = []
    for _ in range(30):
        actions.skip({})
        done.append(actions.due())
    assert done == ["skip"] * 10 + [""] * 20
    actions.stop({})
    assert actions.due() == "stop"


def test_an_alert_that_ranks_hear_of_one_after_the_other_is_acted_on_once(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("rankscope.agent.actions.time.monotonic", lambda: now[0])
    actions = Actions()
    done = []
    for rank in range(4):
        actions.skip({"id": f"the same, heard by rank {rank}"})
        done.append(actions.due())
        now[0] += 4.0
    assert done == ["skip", "", "", ""]
    now[0] += 30.0
    actions.skip({"id": "another"})
    assert actions.due() == "skip"


def test_what_was_open_before_the_job_was_started_again_is_not_acted_on():
    actions = Actions()
    actions.stop({"id": "a", "opened_at": "2026-11-01T10:00:00Z"})
    assert actions.due() == ""
    actions.stop({"id": "b", "opened_at": "2100-01-01T10:00:00Z"})
    assert actions.due() == "stop"


def test_they_agree_as_often_as_was_asked_for():
    asked = []

    def agree(number):
        asked.append(number)
        return number

    actions = Actions(agree, every=3, alone=False)
    actions.stop({})
    assert [actions.due() for _ in range(6)] == ["", "", "stop", "", "", ""]
    assert asked == [3, 0]


@pytest.mark.parametrize(("said", "due"), [(7, "stop"), (-1, ""), (2.0, "save")])
def test_an_agreement_that_is_none_of_the_numbers_asks_for_no_more_than_there_is(said, due):
    assert Actions(lambda number: said, alone=False).due() == due


def test_what_the_trainer_s_own_collective_raises_is_the_trainer_s():
    def agree(number):
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        Actions(agree, alone=False).due()
