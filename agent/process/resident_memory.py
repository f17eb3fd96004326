"""How much memory this process has resident, and how much there is: what the system counts."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

# Of control groups: version 2, and version 1, which writes a huge number where there is no limit.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class ResidentMemory:
    """The resident set size of the process that reads it, and how much of it are mapped files.

    A reading is one system call, three to five microseconds on Linux (`/proc/self/status`). The
    file is opened at the first one, and anew after a fork; the kernel makes it up, so that no disk
    is waited for. Elsewhere it is the largest that the process has had so far (`getrusage`), and
    mapped files are not known.
    """

    def __init__(self) -> None:
        self._file = -1
        self._process = -1

    def read(self) -> dict[str, float]:
        """Name of a series -> bytes; empty where the system does not say."""
        process = os.getpid()
        if process != self._process:
            self.close()
            self._process = process
            # Other systems have no such file.
            with contextlib.suppress(OSError):
                self._file = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        status = os.pread(self._file, 4096, 0) if self._file >= 0 else b""
        resident = _bytes_in(status, b"\nVmRSS:") or _largest_so_far()
        found = {
            "process_resident_memory_bytes": resident,
            "process_mapped_file_bytes": _bytes_in(status, b"\nRssFile:"),
        }
        return {name: float(amount) for name, amount in found.items() if amount is not None}

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._process = -1


def memory_limit() -> int:
    """Bytes that the processes of this machine, or of this container, have together; 0: unknown.

    The smallest of the machine's own memory and the limits of the control groups it is in.
    """
    known = [_sysconf("SC_PHYS_PAGES") * _sysconf("SC_PAGE_SIZE")]
    for path in (*_LIMITS, _own_group()):
        # There need not be such a file, and what is in it may be "max".
        with contextlib.suppress(OSError, ValueError):
            known.append(int(Path(path).read_text(encoding="ascii")))
    return min((limit for limit in known if limit > 0), default=0)


def _own_group() -> str:
    """The file with the limit of this process's control group, version 2, seen from the host."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::/"):
                return f"/sys/fs/cgroup/{line[4:].strip('/')}/memory.max"
    return _LIMITS[0]


def _sysconf(name: str) -> int:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return max(os.sysconf(name), 0)
    return 0


def _bytes_in(status: bytes, name: bytes) -> int | None:
    """A line of `/proc/self/status`; None where it has none of that name."""
    _, there, line = status.partition(name)
    return 1024 * int(line.split(maxsplit=1)[0]) if there else None


def _largest_so_far() -> int | None:
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    # Kilobytes, but for macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
