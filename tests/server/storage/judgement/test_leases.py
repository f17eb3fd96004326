"""Who evaluates a run: one server at a time, and no other one writes."""

import threading

import pytest
from sqlalchemy import update

from rankscope.server.evaluation.leases import Leases
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.judgement import leases


def beat(engine, *servers):
    for server in servers:
        with writing(engine) as connection:
            leases.beat(connection, server=server)


def take(engine, server, run=1):
    with writing(engine) as connection:
        return leases.take(connection, run=run, server=server)


def die(engine, server):
    with engine.begin() as connection:
        connection.execute(
            update(schema.server).where(schema.server.c.id == server).values(until=0.0)
        )


def test_a_run_is_one_living_server_s(engine):
    beat(engine, "a", "b")
    assert take(engine, "a") == leases.Lease(run=1, server="a", number=1)
    assert take(engine, "b") is None
    with reading(engine) as connection:
        assert leases.holders(connection, runs=[1, 2]) == {1: "a"}
        assert leases.living(connection) == {"a", "b"}


def test_who_was_suspended_finds_out_when_it_writes(engine):
    beat(engine, "a", "b")
    first = take(engine, "a")
    with writing(engine) as connection:
        leases.hold(connection, first)
    die(engine, "a")
    second = take(engine, "b")
    assert second.number == first.number + 1
    beat(engine, "a")  # it comes back
    assert take(engine, "a") is None
    with pytest.raises(leases.Lost), writing(engine) as connection:
        leases.hold(connection, first)
    with writing(engine) as connection:
        leases.release(connection, first)  # it is not its own any more
        leases.hold(connection, second)


def test_nobody_waits_for_who_is_writing(engine):
    beat(engine, "a", "b")
    lease = take(engine, "a")
    die(engine, "a")
    if engine.dialect.name == "sqlite":
        pytest.skip("one writer at a time")
    with writing(engine) as connection:
        leases.hold(connection, lease)
        assert take(engine, "b") is None
    assert take(engine, "b") is not None


def test_servers_that_take_at_once_are_not_both_given_it(engine):
    names = [f"s{n}" for n in range(6)]
    beat(engine, *names)
    together = threading.Barrier(len(names))
    got = []

    def want(name):
        together.wait()
        for run in range(10):
            got.append((run, take(engine, name, run)))

    threads = [threading.Thread(target=want, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = [run for run, lease in got if lease is not None]
    assert sorted(taken) == sorted(set(taken))


def test_runs_are_shared_out_and_move_only_from_who_goes():
    servers = ["a", "b", "c", "d"]
    before = {run: leases.preferred(run, servers) for run in range(1000)}
    counts = [list(before.values()).count(server) for server in servers]
    assert min(counts) > 200
    after = {run: leases.preferred(run, servers[:3]) for run in range(1000)}
    assert all(after[run] == who for run, who in before.items() if who != "d")


def test_leases_leave_to_others_and_get_what_is_left(engine):
    one, other = Leases(engine), Leases(engine)
    runs = list(range(1, 21))
    assert set(one.of(runs)) == set(runs)  # nobody else is there
    assert other.of(runs) == {}
    one.stop()
    other._checked_at = 0.0
    assert set(other.of(runs)) == set(runs)
    other.stop()
    with reading(engine) as connection:
        assert leases.living(connection) == frozenset()
