"""Batches that the server has not acknowledged yet, oldest first: in memory, then on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rankscope.agent import wire
from rankscope.agent.delivery.spool import DamagedFile, SpoolFolder

_READS = 10
# Batches of this process that are kept although the server refuses them: enough for a person to see
# what is wrong with them all.
_MOST_SET_ASIDE = 100


@dataclass(slots=True)
class Entry:
    """One batch in the queue.

    Attributes:
        body: the encoded batch, or None where it is on disk.
        points: points and fingerprints in it (0 where an earlier process wrote it: not known).
        size: bytes.
        hello: whether it says hello: the last to be given up.
        folder: where it is, or goes, on disk.
        own: whether this process made it, and not one before it.
        failed_reads: how often its file could not be read.
    """

    seq: int
    body: bytes | None
    points: int
    size: int
    hello: bool
    folder: SpoolFolder
    own: bool = True
    failed_reads: int = 0


class BatchQueue:
    """The unacknowledged batches of one process; bounded in memory and on disk.

    Not safe for several threads: the sender holds its lock around each call.

    Args:
        folder: where this process's batches go on disk.
        memory_bytes: how much waits in memory before it goes to disk.
        disk_bytes: how much may wait on disk before the oldest is given up.
        lose: called with (reason, points) for whatever is given up.
        on_fault: called with the reason, as a text, for each write that fails.
    """

    def __init__(
        self,
        folder: SpoolFolder,
        *,
        memory_bytes: int = 16 * 2**20,
        disk_bytes: int = 512 * 2**20,
        lose: Callable[[str, int], None],
        on_fault: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._folder = folder
        self._entries: deque[Entry] = deque()
        self._memory_bytes = memory_bytes
        self._disk_bytes = disk_bytes
        self._lose = lose
        self._on_fault = on_fault
        self._in_memory = 0
        self._on_disk = 0
        self._set_aside = 0
        self.disk_problem = ""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def waiting(self) -> int:
        """Points and fingerprints in memory."""
        return sum(e.points for e in self._entries if e.body is not None)

    @property
    def spooled(self) -> int:
        """Points and fingerprints of this process on disk."""
        return sum(e.points for e in self._entries if e.body is None)

    def put(self, seq: int, body: bytes, *, points: int, hello: bool) -> None:
        """Append a batch."""
        self._entries.append(Entry(seq, body, points, len(body), hello, self._folder))
        self._in_memory += len(body)
        if self._in_memory > self._memory_bytes:
            self.spill()

    def adopt(self, folder: SpoolFolder) -> int:
        """Append what an earlier process left; returns the number of batches."""
        found = folder.sequence()
        for seq in found:
            self._entries.append(Entry(seq, None, 0, folder.size(seq), False, folder, own=False))
            self._on_disk += self._entries[-1].size
        return len(found)

    def head(self) -> tuple[Entry, bytes] | None:
        """The oldest batch and its bytes; passes over those whose file is gone or damaged.

        None where there is none, or none can be read at the moment.
        """
        while self._entries:
            entry = self._entries[0]
            if entry.body is not None:
                return entry, entry.body
            try:
                return entry, entry.folder.read(entry.seq)
            except FileNotFoundError:
                self._pop("spool_removed")
            except (OSError, DamagedFile) as error:
                self.disk_problem = str(error)
                entry.failed_reads += 1
                # A trainer may be out of file descriptors for a moment; a damaged file stays so.
                if isinstance(error, OSError) and entry.failed_reads < _READS:
                    return None
                entry.folder.set_aside(entry.seq, "damaged")
                self._pop("spool_damaged")
        return None

    def begins_with(self, entry: Entry) -> bool:
        """Whether an entry is the oldest batch, and not given up meanwhile."""
        return bool(self._entries) and self._entries[0] is entry

    def acknowledge(self, entry: Entry) -> None:
        """The server has it."""
        if self.begins_with(entry):
            self._pop(None)

    def give_up(self, entry: Entry, reason: str) -> bool:
        """The server will never take it: it stays on disk, as `*.refused`, and is sent no more.

        Of this process's the first 100 stay: one that is refused throughout must not fill the disk.

        Returns:
            Whether it stays.
        """
        if not self.begins_with(entry):
            return False
        stays = not entry.own or self._set_aside < _MOST_SET_ASIDE
        stays = stays and (entry.body is None or self._write(entry))
        if stays:
            self._set_aside += entry.own
            entry.folder.set_aside(entry.seq, "refused")
        self._pop(reason)
        return stays

    def split(self, entry: Entry, body: bytes) -> bool:
        """Put two halves in the place of the oldest batch; False where it has but one thing."""
        halves = halve(wire.decode(body))
        if halves is None or not self.begins_with(entry):
            return False
        self._put_in_place(entry, halves)
        return True

    def simplify(self, entry: Entry, body: bytes) -> bool:
        """Put the oldest batch in the place of itself as older servers know it.

        False where it is so already, or of a version that is not known here either.
        """
        try:
            batch = wire.decode(body)
        except wire.WireError:
            return False
        if wire.encode(batch) == body or not self.begins_with(entry):
            return False
        self._put_in_place(entry, [batch])
        return True

    def spill(self) -> None:
        """Write everything that is in memory to disk; gives up the oldest where there is no room.

        What cannot be written stays in memory as long as there is room for it there.
        """
        for entry in self._entries:
            if entry.body is not None and not self._write(entry):
                break
        while self._on_disk > self._disk_bytes and self._evict(on_disk=True):
            continue
        while self._in_memory > self._memory_bytes and self._evict(on_disk=False):
            continue

    def folders(self) -> list[SpoolFolder]:
        """Folders with batches in them."""
        return list({id(e.folder): e.folder for e in self._entries if e.body is None}.values())

    def _put_in_place(self, entry: Entry, batches: Sequence[wire.Batch]) -> None:
        self._entries.popleft()
        self._forget(entry)
        # Of halves the right one first: it keeps a place of its own, the left one takes that of
        # the whole.
        for batch in reversed(batches):
            content = wire.encode(batch)
            piece = Entry(
                batch.seq,
                content,
                weight_of(batch) if entry.own else 0,
                len(content),
                batch.hello is not None,
                entry.folder,
                entry.own,
            )
            self._entries.appendleft(piece)
            self._in_memory += piece.size
            if entry.body is None:
                self._write(piece)

    def _write(self, entry: Entry) -> bool:
        assert entry.body is not None
        try:
            if not entry.folder.acquire():
                raise OSError(f"{entry.folder.folder} is locked by another process")
            written = entry.folder.write(entry.seq, entry.body)
        except OSError as error:
            self.disk_problem = str(error)
            self._on_fault(self.disk_problem)
            return False
        self._in_memory -= entry.size
        entry.body, entry.size = None, written
        self._on_disk += written
        return True

    def _evict(self, *, on_disk: bool) -> bool:
        """Give up the oldest batch of that kind, one that says hello last."""

        def oldest(*, hello: bool) -> int | None:
            return next(
                (
                    index
                    for index, entry in enumerate(self._entries)
                    if (entry.body is None) == on_disk and entry.hello == hello
                ),
                None,
            )

        index = oldest(hello=False)
        if index is None:
            index = oldest(hello=True)
        if index is None:
            return False
        entry = self._entries[index]
        del self._entries[index]
        self._discard(entry, "spool_full" if on_disk else "memory_full")
        return True

    def _pop(self, reason: str | None) -> None:
        self._discard(self._entries.popleft(), reason)

    def _discard(self, entry: Entry, reason: str | None) -> None:
        self._forget(entry)
        if entry.body is None:
            entry.folder.remove(entry.seq)
        if reason is not None:
            self._lose(reason, entry.points)

    def _forget(self, entry: Entry) -> None:
        if entry.body is None:
            self._on_disk -= entry.size
        else:
            self._in_memory -= entry.size


def weight_of(batch: wire.Batch) -> int:
    """Number of points and fingerprints in a batch."""
    return batch.points + len(batch.prints)


def halve(batch: wire.Batch) -> tuple[wire.Batch, wire.Batch] | None:
    """Two batches that together hold what one did; None where there is nothing to share out.

    Always the same two, so that an agent and a later `rankscope sync` that split the same batch
    give the server the same identities. Each thing in the batch (the hello, every point,
    fingerprint, row of layers and event) has a place; the right half's sequence number carries the
    place of its first in the upper 32 bits, so that pieces of pieces never collide.
    """
    batch = wire.in_columns(batch)
    size = (
        (batch.hello is not None)
        + sum(len(c.steps) for c in (*batch.columns.values(), *batch.words.values()))
        + len(batch.prints)
        + len(batch.layers)
        + len(batch.events)
    )
    if size < 2:
        return None
    room = size // 2
    first = batch.hello is not None
    left_columns, right_columns, left = _share(batch.columns, room - first)
    left_digests, right_digests, left = _share(batch.words, left)
    fingerprints = min(left, len(batch.prints))
    layers = min(left - fingerprints, len(batch.layers))
    events = min(left - fingerprints - layers, len(batch.events))
    # Only both halves together complete their steps, so the first must not say so; how the
    # process ended is the last thing to say.
    return (
        replace(
            batch,
            through_step=-1,
            state="running",
            error="",
            columns=left_columns,
            words=left_digests,
            prints=batch.prints[:fingerprints],
            layers=batch.layers[:layers],
            events=batch.events[:events],
        ),
        replace(
            batch,
            seq=batch.seq + (room << 32),
            hello=None,
            columns=right_columns,
            words=right_digests,
            prints=batch.prints[fingerprints:],
            layers=batch.layers[layers:],
            events=batch.events[events:],
        ),
    )


def _share(
    columns: Mapping[str, wire.Column], room: int
) -> tuple[dict[str, wire.Column], dict[str, wire.Column], int]:
    """The first `room` points, the others, and the room that is left."""
    left: dict[str, wire.Column] = {}
    right: dict[str, wire.Column] = {}
    for name, column in columns.items():
        taken = min(room, len(column.steps))
        room -= taken
        if taken:
            left[name] = wire.Column(column.steps[:taken], column.values[:taken])
        if taken < len(column.steps):
            right[name] = wire.Column(column.steps[taken:], column.values[taken:])
    return left, right, room
