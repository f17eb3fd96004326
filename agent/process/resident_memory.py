"""How much memory this process has resident, and how much there is: what the system counts."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

# Of control groups: version 2, and version 1, which writes a huge number where there is no limit.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class ResidentMemory:
    """The resident set size of the process that reads it.

    A reading is one system call, one to two microseconds on Linux (`/proc/self/statm`). The file is
    opened at the first one, and anew after a fork; the kernel makes it up, so that no disk is
    waited for. Elsewhere it is the largest that the process has had so far (`getrusage`).
    """

    def __init__(self) -> None:
        self._file = -1
        self._process = -1
        self._page = _sysconf("SC_PAGE_SIZE") or 4096

    def read(self) -> int | None:
        """Bytes; None where the system does not say."""
        process = os.getpid()
        if process != self._process:
            self.close()
            self._process = process
            # Other systems have no such file.
            with contextlib.suppress(OSError):
                self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        if self._file < 0:
            return _largest_so_far()
        return int(os.pread(self._file, 64, 0).split()[1]) * self._page

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


def _largest_so_far() -> int | None:
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    # Kilobytes, but for macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
