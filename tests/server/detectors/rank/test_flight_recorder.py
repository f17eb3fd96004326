"""Who is in which collective, by what the agents report of the flight recorder."""

import pytest

from rankscope.server.detectors.rank.recorder import Collective, collectives_of, compared

GROUP = "0 default_pg"


def of(*sequences, state="completed", group=GROUP, name="nccl:all_reduce"):
    return tuple(Collective(group, name, n, state) for n in sequences)


def test_who_is_in_a_collective_and_who_has_not_come_to_it():
    waits = (*of(7), *of(8, 9, state="started"))
    assert compared({0: waits, 1: waits, 2: of(6, 7), 3: ()}) == (
        "By PyTorch's flight recorder, ranks 0 and 1 are in nccl:all_reduce 8 of group "
        "0 default_pg, to which rank 2 has not come."
    )


def test_ranks_in_different_collectives_of_one_number():
    said = compared({0: of(8, state="started"), 1: of(8, state="started", name="nccl:broadcast")})
    assert "rank 0 is in nccl:all_reduce 8" in said
    assert "rank 1 is in nccl:broadcast 8" in said
    assert "not come" not in said


def test_a_rank_outside_of_a_group_is_not_missed_in_it():
    assert "not come" not in compared({0: of(8, state="started", group="1 mine"), 1: of(3)})


@pytest.mark.parametrize("collectives", [{}, {0: ()}, {0: of(1, 2), 1: of(1, 2)}])
def test_nothing_is_said_where_nobody_is_in_a_collective(collectives):
    assert compared(collectives) == ""


@pytest.mark.parametrize("given", [None, "abc", 3, [1, None, {"sequence": "x"}, {}]])
def test_what_no_agent_reports_is_left_out(given):
    assert collectives_of(given) == ()


def test_what_is_too_long_is_cut():
    one = {"group": "g" * 999, "name": "n", "sequence": 1, "state": "s", "shapes": [[2] * 9] * 9}
    found = collectives_of([one] * 99)
    assert len(found) == 8
    assert (len(found[0].group), found[0].shapes) == (80, ((2,) * 4,) * 4)
