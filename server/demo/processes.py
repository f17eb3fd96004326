"""Processes of the demo: the server, and one training process for each rank."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

# `-P` keeps the folder in which the user happens to stand off the module path.
PYTHON = (sys.executable, "-P")
# The command `rankscope` of this very installation, also where it is not on the PATH.
RANKSCOPE = (*PYTHON, "-c", "from rankscope.agent.cli import main; raise SystemExit(main())")
_STOP_SECONDS = 5.0


class _StoppedOnExit(ABC):
    """What a `with` block stops at its end."""

    @abstractmethod
    def stop(self) -> None:
        """Ends it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class Process(_StoppedOnExit):
    """One child with its output in a file; stopped with the block that holds it.

    It has a session of its own: Ctrl-C in the terminal reaches the demo alone, which then stops its
    children in order.
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        child: subprocess.Popen[bytes] | None = None
        try:
            with log.open("ab") as output, _signals_wait():
                self._child = child = subprocess.Popen(
                    command,
                    env={**os.environ, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            if child is not None:
                self.stop()
            raise

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._child.poll()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def kill(self) -> None:
        """Ends it at once, without notice (SIGKILL)."""
        self._child.kill()
        self._child.wait()

    def wait(self, timeout_s: float) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout_s`.
        """
        return self._child.wait(timeout_s)

    def stop(self, timeout_s: float = _STOP_SECONDS) -> None:
        """Asks it to end (SIGTERM), and ends it where it has not done so in `timeout_s`."""
        self.ask_to_end()
        self.end_within(timeout_s)

    def ask_to_end(self) -> None:
        """Sends SIGTERM, where it still runs."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def end_within(self, timeout_s: float) -> None:
        """Waits for its end, and ends it then (SIGKILL)."""
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def tail(self, lines: int = 12) -> str:
        """The last lines it printed."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])


class Job(_StoppedOnExit):
    """The ranks of one training run, started as torchrun would start them, on this machine.

    Args:
        command: what to run for each rank.
        ranks: world size.
        folder: where each rank's output goes, as `rank<r>.log`.
        environment: further variables.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        ranks: int,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        shared = job_environment(ranks, environment)
        self.ranks: list[Process] = []
        try:
            for rank in range(ranks):
                own = {**shared, **own_environment(rank)}
                log = folder / f"rank{rank}.log"
                self.ranks.append(Process(command, log=log, environment=own))
        except BaseException:
            self.stop()
            raise

    @property
    def exit_codes(self) -> list[int | None]:
        """Of each rank; None while it runs."""
        return [rank.exit_code for rank in self.ranks]

    @property
    def running(self) -> bool:
        """Whether a rank is still there."""
        return any(code is None for code in self.exit_codes)

    def wait(self, timeout_s: float) -> list[int]:
        """Exit codes, once all ranks have ended.

        Raises:
            subprocess.TimeoutExpired: one still runs after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        return [rank.wait(max(deadline - time.monotonic(), 0.0)) for rank in self.ranks]

    def stop(self) -> None:
        """Ends all ranks."""
        # All at once: each may take some seconds to send what it has.
        for rank in self.ranks:
            rank.ask_to_end()
        for rank in self.ranks:
            rank.end_within(_STOP_SECONDS)


def job_environment(ranks: int, further: Mapping[str, str] | None = None) -> dict[str, str]:
    """What all ranks of a job on this machine are told, as torchrun tells them."""
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        # Several processes share the cores: more threads in each would only be in the way.
        "OMP_NUM_THREADS": "1",
        # Else gloo looks for the address of the host's name, which not every machine has.
        "GLOO_SOCKET_IFNAME": _loopback_interface(),
        **(further or {}),
    }


def own_environment(rank: int) -> dict[str, str]:
    """What a rank alone is told."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def free_port() -> int:
    """A port of this machine on which nobody listens right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Whether a server could listen on a port of this machine."""
    with socket.socket() as probe:
        # As servers do: a port that was just left is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])


@contextlib.contextmanager
def handling_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the block as an exception does, so that no child is left behind."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Acts upon SIGTERM and SIGINT after the block: what is being started has no owner yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [
        signal.signal(number, lambda number, frame: came.append(number)) for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    for one in came:
        signal.raise_signal(one)
