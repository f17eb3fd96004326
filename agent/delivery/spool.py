"""Batches on disk, where they wait while the server is away: `<spool>/<run>/<rank>-<session>/`.

One file a batch, named after its sequence number, written beside and renamed, so that a file is
whole or not there; a checksum shows what a crash of the machine left half-written. There is no
fsync: what a killed process wrote survives it, and a trainer should not wait for a disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

SUFFIX = ".batch"
_MAGIC = b"RSB1"
_NAME = re.compile(r"(\d+)(?:-(\d+))?\.batch")
_LOCK = ".lock"


class DamagedFile(ValueError):
    """A file of the spool that does not hold what was written."""


def folder_of(spool: Path, run: str, rank: int, session: str) -> Path:
    """Folder of one process."""
    return _run_folder(spool, run) / f"{rank}-{session}"


def folders_of_rank(spool: Path, run: str, rank: int) -> list[Path]:
    """Folders that processes of this rank left, the oldest first."""
    return _by_age(p for p in _run_folder(spool, run).glob(f"{rank}-*") if p.is_dir())


def folders_below(folder: Path) -> list[Path]:
    """All folders with batches at or below `folder`, the oldest first."""
    return _by_age({path.parent for path in folder.rglob(f"*{SUFFIX}")})


class SpoolFolder:
    """The files of one process.

    While the object lives it holds a lock, so that two processes do not send the same files; one
    that dies, however it dies, loses it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None

    def acquire(self) -> bool:
        """Create the folder and lock it; False where another process holds it.

        Raises:
            OSError: it cannot be created.
        """
        if self._lock is not None:
            return True
        # Loss values are nobody else's business.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            # A file system without locks: batches may be sent twice, which does no harm.
            pass
        self._lock = descriptor
        return True

    def write(self, seq: int, body: bytes) -> int:
        """Write a batch; returns the number of bytes on disk.

        Raises:
            OSError: disk full, no right to write, ...
        """
        try:
            return self._write(seq, body)
        except FileNotFoundError:
            # Somebody has cleaned up and taken our folder along.
            self.forget_lock()
            if not self.acquire():
                raise
            return self._write(seq, body)

    def _write(self, seq: int, body: bytes) -> int:
        path = self.path(seq)
        beside = path.with_suffix(".part")
        try:
            with open(beside, "wb") as file:
                file.write(_MAGIC + zlib.crc32(body).to_bytes(4, "little") + body)
            os.replace(beside, path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        return len(body) + 8

    def read(self, seq: int) -> bytes:
        """The batch as it was written.

        Raises:
            FileNotFoundError: somebody else sent or removed it.
            DamagedFile: it is not whole.
        """
        content = self.path(seq).read_bytes()
        body = content[8:]
        if content[:4] != _MAGIC or content[4:8] != zlib.crc32(body).to_bytes(4, "little"):
            raise DamagedFile(f"{self.path(seq)} is not whole")
        return body

    def remove(self, seq: int) -> None:
        """Remove a batch; harmless where it is gone."""
        with contextlib.suppress(OSError):
            self.path(seq).unlink()

    def set_aside(self, seq: int, why: str) -> None:
        """Keep a file for a person to examine, as `NNNNNN.<why>`, out of the way of the others."""
        with contextlib.suppress(OSError):
            self.path(seq).rename(self.path(seq).with_suffix(f".{why}"))

    def sequence(self) -> list[int]:
        """Sequence numbers of the batches that are there, in the order in which to send them."""
        found = []
        for path in self.folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.append((int(match[1]), int(match[2] or 0)))
        return [low + (piece << 32) for low, piece in sorted(found)]

    def size(self, seq: int) -> int:
        """Bytes of a batch on disk; 0 where it is gone."""
        try:
            return self.path(seq).stat().st_size
        except OSError:
            return 0

    def path(self, seq: int) -> Path:
        """Where a batch is: pieces of a split one (upper 32 bits) come right after it."""
        low, piece = seq & 0xFFFFFFFF, seq >> 32
        return self.folder / (f"{low:06d}-{piece}{SUFFIX}" if piece else f"{low:06d}{SUFFIX}")

    def forget_lock(self) -> None:
        """Close the lock without giving it up: for a forked child, whose parent holds it still."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def close(self) -> None:
        """Give the lock back, and remove the folder where nothing is left in it."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            if [path.name for path in self.folder.iterdir()] == [_LOCK]:
                (self.folder / _LOCK).unlink()
                self.folder.rmdir()
                self.folder.parent.rmdir()
        os.close(self._lock)
        self._lock = None


def _run_folder(spool: Path, run: str) -> Path:
    name = quote(run, safe=" ")
    if len(name) > 200 or name.startswith("."):
        # Longer than a file system takes, or a name with a meaning of its own.
        name = f"{name[:100].lstrip('.')}-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
    return spool / name


def _by_age(folders: Iterable[Path]) -> list[Path]:
    def age(folder: Path) -> tuple[float, str]:
        times = []
        for path in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # sent and removed in the meantime
                times.append(path.stat().st_mtime)
        return (min(times, default=0.0), str(folder))

    return sorted(folders, key=age)
