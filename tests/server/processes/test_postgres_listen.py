"""Run events between servers on one PostgreSQL."""

from contextlib import ExitStack, contextmanager

import pytest

from rankscope.server.processes.events import RunEvents
from rankscope.server.processes.postgres_listen import Messenger
from tests.support.servers.collector import wait_until

pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@contextmanager
def talking(engine):
    run_events = RunEvents()
    messenger = Messenger(engine, run_events)
    messenger.start()
    try:
        # It has asked everybody to check once by the time it listens.
        assert run_events.wake.wait(30)
        run_events.wake.clear()
        yield run_events
    finally:
        messenger.stop()


@pytest.fixture
def two(engine):
    with ExitStack() as stack:
        yield [stack.enter_context(talking(engine)) for _ in range(2)]


def test_what_one_stores_the_other_hears(two):
    here, there = two
    before = there.number("run")
    here.announce("run", points=3)
    wait_until(lambda: there.number("run") != before)
    assert there.wake.wait(30)


def test_many_runs_at_once_and_long_names(two):
    here, there = two
    names = [f"{n:03}" + "\N{SNOWMAN}" * 247 for n in range(40)]
    for name in names:
        here.announce(name, points=1)
    wait_until(lambda: all(there.number(name) for name in names))
    # In the order in which they were announced, none of them twice.
    numbers = [there.number(name) for name in names]
    assert len(set(numbers)) == len(names)


def test_nobody_hears_himself(two):
    here, there = two
    here.announce("mine", points=1)
    number = here.number("mine")
    wait_until(lambda: there.number("mine"))
    there.announce("theirs", points=1)
    wait_until(lambda: here.number("theirs"))
    assert here.number("mine") == number
