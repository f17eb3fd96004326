"""Which processes of a run belong to one launch of the whole job."""

from types import SimpleNamespace

import pytest

from rankscope.server.storage.ingest.starts import starts


def process(
    rank,
    attempt,
    begin,
    end,
    first=0,
    *,
    state="finished",
    host="a",
    sent=0.0,
    began=0.0,
    boot="",
    steady=0.0,
):
    """As the server saw it from `begin` to `end`; by its own clock from `began` to `sent`."""
    return SimpleNamespace(
        rank=rank,
        session=f"{rank}-{attempt}",
        attempt=attempt,
        host=host,
        started_at=began,
        sent_at=sent,
        boot=boot,
        steady=steady,
        set_ahead=began - steady if boot else 0.0,
        first_seen=begin,
        last_seen=end,
        first_step=first,
        last_step=-1 if first is None else first + 50,
        state=state,
        typical_gap=1.0,
        longest_gap=1.0,
    )


def found(*processes, world_size=2):
    made = starts(processes, world_size)
    return [made.of[p.rank, p.session] for p in processes], made.resumed_step


FIRST = (process(0, 0, 0, 10), process(1, 0, 1, 10))
KILLED = (process(0, 0, 0, 10, state="running"), process(1, 0, 1, 10, state="running"))


def test_a_job_that_is_launched_again_from_step_0_is_another_start():
    assert found(*FIRST, process(0, 1, 20, 30), process(1, 1, 21, 30)) == ([0, 0, 1, 1], None)


def test_and_a_third_time():
    second = (process(0, 1, 20, 30), process(1, 1, 21, 30))
    third = (process(0, 2, 40, 50, state="running"), process(1, 2, 41, 50, state="running"))
    assert found(*FIRST, *second, *third) == ([0, 0, 1, 1, 2, 2], None)


def test_so_is_one_that_begins_again_where_the_first_one_went_on_from_a_checkpoint():
    first = (process(0, 0, 0, 10, 500), process(1, 0, 1, 10, 500))
    again = (process(0, 1, 20, 30, 500), process(1, 1, 21, 30, 500))
    assert found(*first, *again) == ([0, 0, 1, 1], None)


def test_one_that_goes_on_from_a_checkpoint_is_the_same_start():
    again = (process(0, 1, 20, 30, 40), process(1, 1, 21, 30, 40))
    assert found(*FIRST, *again) == ([0, 0, 0, 0], 40)


def test_one_rank_that_does_not_load_the_checkpoint_is_a_fault_and_no_start():
    again = (process(0, 1, 20, 30, 40), process(1, 1, 21, 30, 0))
    assert found(*FIRST, *again) == ([0, 0, 0, 0], 0)


def test_a_rank_that_is_replaced_while_others_live_is_no_start():
    lives = process(0, 0, 0, 60)
    assert found(lives, process(1, 0, 1, 10), process(1, 1, 20, 60)) == ([0, 0, 0], None)


def test_ranks_that_are_replaced_one_after_another_are_no_start():
    one = (process(0, 0, 0, 40), process(0, 1, 50, 90))
    other = (process(1, 0, 1, 10), process(1, 1, 20, 90))
    assert found(*one, *other) == ([0, 0, 0, 0], None)


def test_of_processes_that_were_killed_all_have_to_be_replaced():
    first_back = process(0, 1, 15, 20, state="running")
    assert found(*KILLED, first_back) == ([0, 0, 0], None)
    both = (first_back, process(1, 1, 17, 20, state="running"))
    assert found(*KILLED, *both) == ([0, 0, 1, 1], None)


def test_or_silent_for_long():
    assert found(*KILLED, process(0, 1, 45, 50, state="running")) == ([0, 0, 1], None)


def test_or_of_no_rank_of_the_job_as_it_is_now():
    alone = process(0, 1, 15, 20, state="running")
    assert found(*KILLED, alone, world_size=1) == ([0, 0, 1], None)


def test_ranks_of_a_job_that_come_after_another_has_ended_are_of_its_start():
    assert found(process(0, 0, 0, 2), process(1, 0, 5, 7)) == ([0, 0], None)
    again = (process(0, 1, 20, 22), process(1, 1, 25, 27))
    assert found(process(0, 0, 0, 2), process(1, 0, 5, 7), *again) == ([0, 0, 1, 1], None)


def test_a_process_that_has_said_nothing_of_steps_yet_begins_no_start():
    assert found(*FIRST, process(0, 1, 20, 21, None, state="running")) == ([0, 0, 0], None)


def test_after_a_start_that_came_to_no_step_any_is_another_one():
    first = (process(0, 0, 0, 10, None, state="failed"), process(1, 0, 1, 10, None, state="failed"))
    again = (process(0, 1, 20, 30, 70), process(1, 1, 21, 30, 70))
    assert found(*first, *again) == ([0, 0, 1, 1], None)


@pytest.mark.parametrize("skew", [0.0, -3600.0])
def test_what_came_from_the_disk_when_the_next_start_ran_is_sorted_by_the_ranks_clocks(skew):
    """Seen by the server, all four overlap."""

    def late(rank, attempt, began, sent, host):
        own = {"host": host, "began": began + 1e6, "sent": sent + 1e6}
        if host == "b":
            own |= {"began": began + 1e6 + skew, "sent": sent + 1e6 + skew}
        return process(rank, attempt, 1e6 + 100 + attempt, 1e6 + 110, **own)

    first = (late(0, 0, 0, 10, "a"), late(1, 0, 1, 10, "b"))
    second = (late(0, 1, 20, 30, "a"), late(1, 1, 21, 30, "b"))
    assert found(*first, *second) == ([0, 0, 1, 1], None)


def test_a_clock_that_was_set_back_between_two_launches_makes_one_of_them_no_part_of_the_other():
    def launched(attempt, begin, ahead):
        return [
            process(
                rank,
                attempt,
                1e6 + begin,
                1e6 + begin + 10,
                began=1e6 + begin + ahead,
                sent=1e6 + begin + 10 + ahead,
                boot="x",
                steady=begin + 50.0,
            )
            for rank in range(2)
        ]

    both = (*launched(0, 0, 0.0), *launched(1, 20, -3600.0))
    assert found(*both) == ([0, 0, 1, 1], None)


def test_one_row_alone():
    assert found(process(0, 0, 0, 10), world_size=1) == ([0], None)
    assert starts([], 1).last == 0


def test_what_one_process_trains_one_after_the_other_is_one_launch():
    def trained(session, attempt, begin):
        made = process(0, attempt, begin, begin + 5)
        made.session = session
        return made

    launches = [trained("aa.0", 0, 0), trained("aa.1", 1, 10), trained("bb.0", 2, 20)]
    for known, expected in ((1, (0, 0)), (2, (1, 0)), (3, (2, 2))):
        made = starts(launches[:known], 1)
        assert (made.last, made.first) == expected
