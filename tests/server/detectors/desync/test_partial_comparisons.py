"""What part of the ranks agree on is no pass, and the answer says how many they were."""

import numpy as np
import pytest

from rankscope.server.app import create_app
from rankscope.server.detectors.desync.coverage import Coverage
from rankscope.server.settings import Settings
from rankscope.server.window import Comparison, Status
from tests.support.runs.fixture_run import SyntheticRun
from tests.support.servers.api import evaluated, get, post
from tests.support.servers.serve_app import serve_app

RANKS, GRACE = 8, 20


def coverage(*there: int) -> Coverage:
    """Of one comparison a step, of so many of the ranks each."""
    made = Coverage()
    for step, ranks in enumerate(there):
        every = np.arange(ranks)
        zeros = np.zeros(ranks)
        made.take(
            Comparison(
                step=step,
                stage="parameters",
                ranks=every,
                clusters=every * 0,
                distance=zeros,
                relative=zeros,
                missing=tuple(range(ranks, RANKS)),
            )
        )
    return made


@pytest.mark.parametrize(
    ("there", "enough"),
    [
        ([8] * 40, True),
        # The last ones of a short run, and of a long one.
        ([8] * 9 + [5], True),
        ([8] * 200 + [5] * 20, True),
        ([8] * 200 + [5] * 21, False),
        ([8] * 40 + [3] * 40, False),
        ([3] * 5, False),
        # What differs stays different: a later comparison of all of them makes up for it.
        ([3] * 40 + [8] * 3, True),
    ],
)
def test_where_it_is_enough(there, enough):
    found = coverage(*there).too_few(len(there), GRACE)
    assert (found is None) == enough


def test_the_answer_says_how_many_and_who_was_missing():
    found = coverage(*[8] * 40, *[3] * 40)
    check = found.too_few(80, GRACE)
    assert check.status is Status.INSUFFICIENT_DATA
    assert check.why == (
        "Only 3 of 8 ranks were compared at 40 of 80 checked steps, from step 40 on: ranks 3-7 had "
        "reported nothing of them."
    )
    assert coverage(*[8] * 40).said() == ""
    later = coverage(*[3] * 40, *[8] * 40).said()
    assert later == " At 40 of these steps fewer ranks had reported, 3 of 8 at least."


def test_ranks_that_post_when_the_others_were_judged_do_not_pass(tmp_path, monkeypatch):
    # They are waited for, else half a minute.
    monkeypatch.setattr("rankscope.server.evaluation.judged_until.UNSEEN_SECONDS", 1.0)
    run = SyntheticRun(run="otter", ranks=RANKS, steps=40)
    with serve_app(create_app(Settings(database=f"sqlite:///{tmp_path / 'x.db'}"))) as client:
        batches = list(run.batches(size=run.steps))
        for sent in batches[:3]:
            post(client, sent)
        evaluated(client)
        for sent in batches[3:]:
            post(client, sent)
        evaluated(client)
        verdict = get(client, "/runs/otter/verdict")
    checks = {check["name"]: check for check in verdict["checks"]}
    assert checks["desync.parameters"]["state"] == "not_run"
    assert "Only 3 of 8 ranks were compared at 40 of 40" in checks["desync.parameters"]["why"]
    assert verdict["verdict"] == "pending"
    assert any("Only 3 of 8 ranks" in reason for reason in verdict["reasons"])
