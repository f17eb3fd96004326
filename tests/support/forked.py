"""What a forked process does to be like one that a shell has started."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn


def take_over(environment: Mapping[str, str], log: str) -> None:
    """Gives it this environment alone, and its output to the end of a file."""
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)


def run(program: Callable[[], Any]) -> NoReturn:
    """Runs a program that may return an exit code, and ends as an interpreter does then."""
    code: Any = 1
    try:
        code = program()
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001  as the interpreter does
        sys.excepthook(*sys.exc_info())
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
