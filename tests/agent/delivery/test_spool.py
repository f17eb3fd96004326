"""Batches on disk: whole or not there, in order, bounded, and shared out exactly when split."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.agent import wire
from rankscope.agent.delivery.queue import BatchQueue, halve
from rankscope.agent.delivery.spool import (
    DamagedFile,
    SpoolFolder,
    folder_of,
    folders_below,
    folders_of_rank,
)
from tests.support.batches import batches, same


@pytest.fixture
def folder(tmp_path: Path) -> SpoolFolder:
    spool = SpoolFolder(tmp_path / "run" / "0-abc")
    assert spool.acquire()
    return spool


def test_what_is_written_is_read(folder: SpoolFolder) -> None:
    size = folder.write(7, b"body")

    assert folder.read(7) == b"body"
    assert folder.size(7) == size == (folder.folder / "000007.batch").stat().st_size


def test_the_order_is_that_of_the_numbers(folder: SpoolFolder) -> None:
    piece = 12 + (5 << 32)
    for seq in (1_000_000, 13, piece, 12, 999_999):
        folder.write(seq, b"")

    assert folder.sequence() == [12, piece, 13, 999_999, 1_000_000]


def test_other_files_are_left_alone(folder: SpoolFolder) -> None:
    for name in ("notes.txt", "x.batch", "000001.part"):
        (folder.folder / name).write_text("mine")
    folder.write(1, b"")

    assert folder.sequence() == [1]
    folder.remove(1)
    folder.close()
    assert (folder.folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("kept", [0, 3, 8, 11])
def test_a_truncated_file_is_noticed(folder: SpoolFolder, kept: int) -> None:
    folder.write(1, b"body")
    path = folder.folder / "000001.batch"
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(DamagedFile):
        folder.read(1)


def test_a_flipped_bit_is_noticed(folder: SpoolFolder) -> None:
    folder.write(1, b"body")
    path = folder.folder / "000001.batch"
    path.write_bytes(path.read_bytes()[:-1] + b"Y")

    with pytest.raises(DamagedFile):
        folder.read(1)


def test_a_folder_is_nobody_elses_business(folder: SpoolFolder) -> None:
    assert folder.folder.stat().st_mode & 0o077 == 0


def test_an_empty_folder_goes_away(folder: SpoolFolder, tmp_path: Path) -> None:
    folder.write(1, b"")
    folder.remove(1)
    folder.close()

    assert list(tmp_path.iterdir()) == []


def test_a_folder_belongs_to_one_at_a_time(folder: SpoolFolder) -> None:
    other = SpoolFolder(folder.folder)

    assert folder.acquire()
    assert not other.acquire()
    folder.write(1, b"")
    folder.close()
    assert other.acquire()
    other.close()


def test_a_killed_process_gives_its_folder_back(tmp_path: Path) -> None:
    place = tmp_path / "run" / "0-abc"
    script = (
        "import os, sys, pathlib\n"
        "from rankscope.agent.delivery.spool import SpoolFolder\n"
        f"folder = SpoolFolder(pathlib.Path({str(place)!r}))\n"
        "assert folder.acquire()\n"
        "folder.write(1, b'body')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        folder = SpoolFolder(place)
        assert not folder.acquire()
        process.kill()
        process.wait()

    assert folder.acquire()
    assert folder.read(1) == b"body"
    folder.close()


def test_a_forked_child_keeps_the_lock_of_its_parent(folder: SpoolFolder) -> None:
    child = os.fork()
    if child == 0:
        folder.forget_lock()
        os._exit(0)
    os.waitpid(child, 0)

    assert not SpoolFolder(folder.folder).acquire()


@pytest.mark.parametrize("run", ["a", "é 漢/字", "..", ".hidden", "x" * 250, "漢" * 250, "a%2Fb"])
def test_every_run_has_a_folder_of_its_own(tmp_path: Path, run: str) -> None:
    place = folder_of(tmp_path, run, 0, "s")
    place.mkdir(parents=True)

    assert place.parent.parent == tmp_path
    assert folders_of_rank(tmp_path, run, 0) == [place]
    assert folders_of_rank(tmp_path, run + "x", 0) == []


def test_ranks_with_a_common_beginning_are_distinguished(tmp_path: Path) -> None:
    folder_of(tmp_path, "run", 11, "s").mkdir(parents=True)

    assert folders_of_rank(tmp_path, "run", 1) == []


def test_the_oldest_folder_comes_first(tmp_path: Path) -> None:
    for session, age in (("new", 100.0), ("old", 50.0)):
        place = folder_of(tmp_path, "run", 0, session)
        folder = SpoolFolder(place)
        assert folder.acquire()
        folder.write(0, b"")
        os.utime(place / "000000.batch", (age, age))
        folder.close()

    assert [p.name for p in folders_below(tmp_path)] == ["0-old", "0-new"]


# ---------------------------------------------------------------------------------- the queue


class Queue:
    """A queue and what it gave up."""

    def __init__(self, place: Path, **bounds: int) -> None:
        self.folder = SpoolFolder(place)
        self.lost: dict[str, int] = {}
        self.batches = BatchQueue(self.folder, lose=self._lose, **bounds)

    def _lose(self, reason: str, points: int) -> None:
        self.lost[reason] = self.lost.get(reason, 0) + points

    def put(self, seq: int, size: int = 100, *, points: int = 1, hello: bool = False) -> None:
        self.batches.put(seq, bytes(size), points=points, hello=hello)

    def sequence(self) -> list[int]:
        found = []
        while (head := self.batches.head()) is not None:
            found.append(head[0].seq)
            self.batches.acknowledge(head[0])
        return found

    def files(self) -> list[int]:
        return self.folder.sequence() if self.folder.folder.exists() else []


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(tmp_path / "run" / "0-abc")


def test_in_memory_nothing_is_written(queue: Queue, tmp_path: Path) -> None:
    queue.put(0)
    queue.put(1)

    assert (len(queue.batches), queue.batches.waiting, queue.batches.spooled) == (2, 2, 0)
    assert queue.sequence() == [0, 1]
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_into_memory_goes_to_disk_in_order(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "run" / "0-abc", memory_bytes=250)
    for seq in range(4):
        queue.put(seq)

    assert queue.files() == [0, 1, 2]
    assert (queue.batches.waiting, queue.batches.spooled) == (1, 3)
    assert queue.sequence() == [0, 1, 2, 3]
    assert queue.files() == []


def test_a_full_spool_gives_up_the_oldest_but_not_the_hello(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "run" / "0-abc", disk_bytes=350)
    for seq in range(6):
        queue.put(seq, points=10, hello=seq == 0)
        queue.batches.spill()

    assert queue.files() == [0, 4, 5]
    assert queue.lost == {"spool_full": 30}
    assert queue.sequence() == [0, 4, 5]


def test_without_a_disk_memory_is_the_bound(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    queue = Queue(tmp_path / "run" / "0-abc", memory_bytes=250)
    for seq in range(5):
        queue.put(seq, points=10, hello=seq == 0)

    assert queue.lost == {"memory_full": 30}
    assert "run" in queue.batches.disk_problem
    assert queue.sequence() == [0, 4]


def test_a_damaged_file_is_passed_over_and_kept(queue: Queue) -> None:
    for seq in range(3):
        queue.put(seq)
    queue.batches.spill()
    (queue.folder.folder / "000001.batch").write_bytes(b"RSB")

    assert queue.sequence() == [0, 2]
    assert queue.lost == {"spool_damaged": 1}
    assert (queue.folder.folder / "000001.damaged").exists()


def test_a_removed_file_is_passed_over(queue: Queue) -> None:
    for seq in range(3):
        queue.put(seq)
    queue.batches.spill()
    (queue.folder.folder / "000000.batch").unlink()

    assert queue.sequence() == [1, 2]
    assert queue.lost == {"spool_removed": 1}


def test_an_unreadable_file_is_tried_again(queue: Queue) -> None:
    queue.put(0)
    queue.put(1)
    queue.batches.spill()
    path = queue.folder.folder / "000000.batch"
    content = path.read_bytes()
    path.unlink()
    path.mkdir()  # reading a folder fails like running out of file descriptors does

    assert queue.batches.head() is None
    path.rmdir()
    path.write_bytes(content)
    assert queue.sequence() == [0, 1]
    assert queue.lost == {}


def test_what_an_earlier_process_left_comes_in_its_order(tmp_path: Path) -> None:
    earlier = Queue(tmp_path / "run" / "0-abc")
    for seq in (3, 4, 11):
        earlier.put(seq)
    earlier.batches.spill()
    earlier.folder.close()

    queue = Queue(tmp_path / "run" / "0-def")
    left = SpoolFolder(earlier.folder.folder)
    assert left.acquire()
    assert queue.batches.adopt(left) == 3
    queue.put(0)

    assert queue.sequence() == [3, 4, 11, 0]
    left.close()
    assert not left.folder.exists()


# ---------------------------------------------------------------------------------- splitting


def things(batch: wire.Batch) -> list[object]:
    """Everything that a batch says, one by one."""
    batch = wire.in_columns(batch)
    found: list[object] = [] if batch.hello is None else ["hello"]
    for kind, columns in (("column", batch.columns), ("digest", batch.words)):
        for name, column in columns.items():
            points = zip(column.steps, column.values, strict=True)
            found += [(kind, name, step, value.tobytes()) for step, value in points]
    return [*found, *map(id, batch.prints), *map(id, batch.layers), *map(id, batch.events)]


def pieces(batch: wire.Batch) -> list[wire.Batch]:
    halves = halve(batch)
    return [batch] if halves is None else [p for half in halves for p in pieces(half)]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches, st.integers(0, 2**20))
def test_pieces_say_everything_once_and_in_order(batch: wire.Batch, seq: int) -> None:
    batch = replace(batch, seq=seq)
    found = pieces(batch)

    assert [t for piece in found for t in things(piece)] == things(batch)
    assert len({piece.seq for piece in found}) == len(found)
    assert found[0].seq == seq
    assert sorted(found, key=lambda p: (p.seq & 0xFFFFFFFF, p.seq >> 32)) == found
    # Only the last piece says that the rank's account is complete, and how it ended.
    assert [p.through_step for p in found] == [-1] * (len(found) - 1) + [batch.through_step]
    assert [p.state for p in found] == ["running"] * (len(found) - 1) + [batch.state]
    assert all(len(things(piece)) <= 1 for piece in found)


@pytest.mark.parametrize("spilled", [False, True])
def test_a_batch_that_is_made_simpler_keeps_its_place(tmp_path: Path, spilled: bool) -> None:
    queue = Queue(tmp_path / "run" / "0-abc")
    batch = wire.Batch(run="r", rank=0, seq=3, rows=((0, {"loss": 0.5}),))
    bodies = [wire.encode(batch), wire.encode(wire.Batch(run="r", rank=0, seq=4)), b"not known"]
    for seq, body in enumerate(bodies, 3):
        queue.batches.put(seq, body, points=1, hello=False)
    if spilled:
        queue.batches.spill()
    simplified = []
    for _ in range(3):
        head = queue.batches.head()
        assert head is not None
        simplified.append(queue.batches.simplify(*head))
        head = queue.batches.head()
        assert head is not None
        if simplified[-1]:
            assert head[0].seq == 3
            assert same(wire.decode(head[1]), wire.in_columns(batch))
            assert not queue.batches.simplify(*head)
        queue.batches.acknowledge(head[0])

    assert simplified == [True, False, False]
    assert queue.batches.head() is None


@pytest.mark.parametrize("spilled", [False, True])
def test_halves_take_the_place_of_the_whole(tmp_path: Path, spilled: bool) -> None:
    queue = Queue(tmp_path / "run" / "0-abc")
    column = wire.Column(np.arange(5), np.arange(5.0))
    batch = wire.Batch(run="r", rank=0, seq=3, columns={"loss": column})
    queue.batches.put(3, wire.encode(batch), points=5, hello=False)
    queue.batches.put(4, b"next", points=1, hello=False)
    if spilled:
        queue.batches.spill()

    head = queue.batches.head()
    assert head is not None
    assert queue.batches.split(*head)

    assert queue.batches.waiting + queue.batches.spooled == 6
    assert queue.files() == ([3, 3 + (2 << 32), 4] if spilled else [])
    assert queue.sequence() == [3, 3 + (2 << 32), 4]
    assert queue.files() == []


def test_a_single_thing_cannot_be_split(queue: Queue) -> None:
    batch = wire.Batch(run="r", rank=0, seq=3)
    queue.batches.put(3, wire.encode(batch), points=0, hello=False)
    head = queue.batches.head()
    assert head is not None

    assert not queue.batches.split(*head)
    assert queue.sequence() == [3]
