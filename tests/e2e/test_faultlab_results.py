"""Runs of the lab side by side: the tables say what the runs said."""

import pytest

from tests.lab.faults import case, results
from tests.lab.faults import score as scoring

RIGHT = {"kind": "update.missing", "severity": "critical", "stage": None, "ranks": [0, 1]}
RIGHT |= {"tensors": [], "first_step": 3}


def run(name, world, alerts, *, expected=None, error=""):
    wanted = expected or case.Expected(kinds=("update.missing",), step=0)
    score, judged = scoring.score(wanted, alerts, slack=0)
    if error:
        score = scoring.Score(error=error)
    return {
        "case": name,
        "world": world,
        "what": f"what {name} is",
        "expected": {"kinds": list(wanted.kinds)},
        "score": score.as_json(),
        "alert": judged,
    }


def lines(*files):
    text = results.as_markdown(*results.together(files))
    return {line.split("|")[1].strip(): line for line in text.splitlines() if line}


def file(*found, full=False):
    return {"full_sampling": full, "results": list(found)}


def test_the_last_run_of_a_fault_counts_and_those_of_both_samplings_stand_beside_each_other():
    table = lines(
        file(run("F33", 4, [])), file(run("F33", 4, [RIGHT])), file(run("F33", 2, []), full=True)
    )
    assert table["F33"] == "| F33 | what F33 is | update.missing +3 |  |  | missed |"


def test_totals_are_of_detected_right_and_right_in_time():
    late, found = run("F33", 4, [RIGHT]), run("F34", 4, [RIGHT | {"first_step": 0}])
    text = results.as_markdown(*results.together([file(late, found, run("F35", 4, []))]))
    assert "| 2, 2, 1 of 3 |  |  |  |" in text


def test_a_wrong_part_is_named():
    wanted = case.Expected(kinds=("update.missing",), ranks=(frozenset({1}),))
    table = lines(file(run("F33", 2, [RIGHT], expected=wanted)))
    assert "update.missing +3 (wrong ranks)" in table["F33"]


def test_what_was_not_judged_is_left_out():
    table = lines(file(run("F33", 2, [RIGHT], error="rank 0 has gone")))
    assert "F33" not in table


@pytest.mark.parametrize(("alerts", "alarms"), [([], 0), ([RIGHT, RIGHT], 1)])
def test_benign_runs_add_up(alerts, alarms):
    quiet = case.Expected()
    runs = [run("B00", 4, [], expected=quiet), run("B00", 4, alerts, expected=quiet)]
    table = lines(file(*runs), file(run("B00", 2, [], expected=quiet)))
    assert table["B00"] == f"| B00 | what B00 is | 2 | {alarms} | 1 | 0 |"
