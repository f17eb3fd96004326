"""Servers that are forked from a process which has imported them: each begins within milliseconds.

As a program it takes orders, a line of JSON each, and reports what became of them: who has begun,
and who has ended how.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope.server.demo.processes import PYTHON, Process
from tests.support import forked

_REPOSITORY = Path(__file__).parents[3]
_PATIENCE_SECONDS = 300.0


def _of_python(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


_AT_START = _of_python(os.environ)


class WarmProcess(Process):
    """`rankscope` with some arguments, which does as one that was started by a shell does."""

    def __init__(
        self, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        order = {
            "arguments": list(arguments),
            "environment": {**os.environ, **(environment or {})},
            "log": str(log),
            "folder": str(Path.cwd()),
        }
        # What `Process` asks of its child is what a child of somebody else can do as well.
        self._child = _parent().fork(order)  # type: ignore[assignment]


def warm_enough(environment: Mapping[str, str] | None) -> bool:
    """Whether an interpreter with these further variables would import the same as a warm one."""
    return _of_python({**os.environ, **(environment or {})}) == _AT_START


class _Child:
    """What is asked of `subprocess.Popen`, of a process that another one has to wait for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._over = threading.Event()

    def ended(self, code: int) -> None:
        self._code = code
        self._over.set()

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout_s: float | None = None) -> int:
        if not self._over.wait(timeout_s):
            raise subprocess.TimeoutExpired("rankscope", timeout_s or 0.0)
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Parent:
    """The process from which servers are forked, and the thread that hears of them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*PYTHON, "-m", "tests.support.servers.warm"],
            cwd=_REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(_REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.close)
        self._begun: queue.SimpleQueue[_Child | None] = queue.SimpleQueue()
        self._one_at_a_time = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, order: dict[str, Any]) -> _Child:
        """Carries out an order."""
        assert self._process.stdin is not None
        with self._one_at_a_time:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            child = self._begun.get(timeout=_PATIENCE_SECONDS)
        assert child is not None, "the process from which servers are forked has ended"
        return child

    def close(self) -> None:
        """What it has forked and nobody has stopped goes on."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        children: dict[int, _Child] = {}
        for line in self._process.stdout:
            pid, code = json.loads(line)
            if code is None:
                children[pid] = _Child(pid)
                self._begun.put(children[pid])
            else:
                children.pop(pid).ended(code)
        # Nobody can tell how what is left has ended, or will.
        for child in children.values():
            child.ended(-signal.SIGKILL)
        self._begun.put(None)


@functools.cache
def _parent() -> _Parent:
    return _Parent()


def main() -> None:
    """Carries out orders until there can be no more of them."""
    import rankscope.server.app
    import rankscope.server.cli
    import rankscope.server.evaluation.worker  # noqa: F401
    from rankscope.agent.cli import main as command

    # What is printed by accident must not be read as a report.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    speaks = threading.Lock()

    def report(pid: int, code: int | None) -> None:
        with speaks, contextlib.suppress(BrokenPipeError):
            reports.write(json.dumps([pid, code]) + "\n")
            reports.flush()

    def bury(pid: int) -> None:
        report(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    for line in sys.stdin:
        order = json.loads(line)
        # Nobody speaks while a child is made: it would hold the lock for ever.
        with speaks:
            pid = os.fork()
        if pid == 0:
            reports.close()
            _become(order, command)
        report(pid, None)
        threading.Thread(target=bury, args=(pid,), daemon=True).start()


def _become(order: dict[str, Any], command: Callable[[list[str]], int]) -> None:
    """In the child: what a shell does before it starts a program, and then the program."""
    os.setsid()
    os.chdir(order["folder"])
    forked.take_over(order["environment"], order["log"])
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # Processes that it starts anew look for what they are to import as the main program.
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["rankscope", *order["arguments"]]
    forked.run(lambda: command(order["arguments"]))


if __name__ == "__main__":
    main()
