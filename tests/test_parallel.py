"""The suite runs in several workers: who is to be alone is, and nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import parallel


def test_the_files_that_come_first_are_there() -> None:
    folder = Path(__file__).parent
    assert [name for name in parallel.LONGEST if not (folder / name).exists()] == []
    assert len(set(parallel.LONGEST)) == len(parallel.LONGEST)


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[list[parallel.Turns]]:
    """Of three workers."""
    made = [parallel.Turns(tmp_path) for _ in range(3)]
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize(("held", "wanted"), [(True, False), (False, True), (True, True)])
def test_who_is_to_be_alone_is(turns: list[parallel.Turns], held: bool, wanted: bool) -> None:
    one, other, _ = turns
    order = []

    def come() -> None:
        with other.turn(alone=wanted):
            order.append("second")

    second = threading.Thread(target=come)
    with one.turn(alone=held):
        second.start()
        second.join(0.2)
        order.append("first")
    second.join()

    assert order == ["first", "second"]


def test_others_run_beside_each_other(turns: list[parallel.Turns]) -> None:
    one, other, _ = turns
    order = []

    def come() -> None:
        with other.turn(alone=False):
            order.append("second")

    second = threading.Thread(target=come)
    with one.turn(alone=False):
        second.start()
        second.join()
        order.append("first")

    assert order == ["second", "first"]


def test_who_waits_to_be_alone_is_not_overtaken(turns: list[parallel.Turns]) -> None:
    one, alone, third = turns
    order = []

    def come(turns: parallel.Turns, wanted: bool, name: str) -> None:
        with turns.turn(alone=wanted):
            order.append(name)

    threads = [
        threading.Thread(target=come, args=(alone, True, "alone")),
        threading.Thread(target=come, args=(third, False, "third")),
    ]
    with one.turn(alone=False):
        for thread in threads:
            thread.start()
            thread.join(0.2)  # it waits
        assert order == []
    for thread in threads:
        thread.join()

    assert order == ["alone", "third"]


def test_what_is_left_behind_is_named_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(parallel.RUN, str(tmp_path))
    assert parallel.left_behind(0.0) == []
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=dict(os.environ)
    ) as process:
        assert parallel.left_behind(0.0) == [f"{process.pid}: {sys.executable} -c input()"]
        assert process.wait() == -9
