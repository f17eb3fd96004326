"""Stacks of threads that go on running."""

import gc
import subprocess
import sys
import threading

import pytest

from rankscope.agent.process import frames
from tests.support.jobs import walks_while_it_runs


def test_a_thread_that_runs_is_read_at_one_moment():
    """What reads frame by frame ends in a segmentation fault, within seconds."""
    program = [sys.executable, "-X", "faulthandler", walks_while_it_runs.__file__, "8"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_the_own_stack_from_the_innermost_function_outwards():
    def inner():
        return frames.stack_of(threading.get_ident())

    names = [place.code.co_name for place in inner()]
    at = names.index("inner")
    assert set(names[:at]) == {"stack_of", "_extend"}
    assert names[at + 1] == "test_the_own_stack_from_the_innermost_function_outwards"
    assert inner()[at].line == inner.__code__.co_firstlineno + 1


def test_a_thread_that_does_not_exist_has_no_stack():
    assert frames.stack_of(1) == []


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_as_it_was(monkeypatch, on):
    was = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        assert threading.get_ident() in frames.threads()
        assert gc.isenabled() == on
        assert frames.stack_of(threading.get_ident())
        assert gc.isenabled() == on

        def fails():
            assert not gc.isenabled()
            raise MemoryError

        monkeypatch.setattr(sys, "_current_frames", fails)
        with pytest.raises(MemoryError):
            frames.threads()
        assert gc.isenabled() == on
    finally:
        (gc.enable if was else gc.disable)()
