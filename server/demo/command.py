"""`rankscope demo`: server, training, fault, alerts, and whether they were the right ones."""

from __future__ import annotations

import argparse
import importlib.util
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rankscope.server.demo.client import Client, ServerAway
from rankscope.server.demo.comparison import compare, describe
from rankscope.server.demo.faults import DEFAULT_FAULT, FAULTS, decide
from rankscope.server.demo.local_server import LocalServer, NotStarted
from rankscope.server.demo.processes import (
    PYTHON,
    Job,
    Process,
    handling_sigterm,
    is_free,
)
from rankscope.server.demo.screen import Screen
from rankscope.server.demo.watch import DemoFailed, Watch, check_exit_codes

DEFAULT_PORT = 8642
DEFAULT_RANKS = 4
DEFAULT_STEPS = 600
MAX_RANKS = 64

_POLL_SECONDS = 0.3


def main(argv: Sequence[str]) -> int:
    """Runs the demo.

    Returns:
        Exit code: 0 when what was found is what was injected, 1 when not or when a process of the
        demo failed, 2 for arguments that cannot work, 130 when it was interrupted before its end.
    """
    arguments = _parser().parse_args(argv)
    if arguments.list_faults:
        print(faults_listed())
        return 0
    if problem := _problem(arguments):
        print(f"rankscope demo: {problem}", file=sys.stderr)
        return 2
    screen = Screen()
    try:
        with handling_sigterm():
            return _demo(arguments, screen)
    except KeyboardInterrupt:
        screen.say()
        screen.say("Stopped.")
        return 130
    except (DemoFailed, ServerAway) as error:
        screen.say()
        print(f"rankscope demo: {error}", file=sys.stderr)
        return 1


def faults_listed() -> str:
    """The table of faults as text."""
    lines = []
    for fault in FAULTS.values():
        default = " (default)" if fault.name == DEFAULT_FAULT else ""
        expected = " or ".join(fault.kinds) or "no alert"
        lines += [f"{fault.name}{default}", f"    {fault.what}", f"    -> {expected}"]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankscope demo",
        description=(
            "Starts a server, trains a small network on several processes, breaks one of them "
            "midway and shows what Rankscope says about it."
        ),
    )
    parser.add_argument(
        "--fault",
        metavar="NAME",
        default=DEFAULT_FAULT,
        help=f"what to break; see --list-faults (default: {DEFAULT_FAULT})",
    )
    parser.add_argument(
        "--list-faults", action="store_true", help="print what can be broken, and end"
    )
    parser.add_argument(
        "--ranks", type=int, default=DEFAULT_RANKS, help=f"processes (default: {DEFAULT_RANKS})"
    )
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help=f"to train (default: {DEFAULT_STEPS})"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the training, and of the rank, step and tensor to break (default: 0)",
    )
    parser.add_argument(
        "--port",
        type=int,
        help=f"of the server (default: {DEFAULT_PORT}, or another where that is taken)",
    )
    parser.add_argument(
        "--exit",
        action="store_true",
        help="stop when the training ends; exit code 0 when what was found is what was injected",
    )
    return parser


def _problem(arguments: argparse.Namespace) -> str | None:
    """Why these arguments cannot work, None if they can."""
    fault = FAULTS.get(arguments.fault)
    if fault is None:
        return f"there is no fault {arguments.fault!r}; choose from: {', '.join(FAULTS)}"
    if not fault.min_ranks <= arguments.ranks <= MAX_RANKS:
        return f"--ranks {arguments.ranks}: {fault.name} needs {fault.min_ranks} to {MAX_RANKS}"
    if arguments.steps < fault.min_steps:
        return f"--steps {arguments.steps}: {fault.name} needs {fault.min_steps} at least"
    if arguments.seed < 0:
        return f"--seed {arguments.seed}: must be 0 or more"
    if arguments.port is not None and not 1 <= arguments.port <= 65535:
        return f"--port {arguments.port}: must be 1 to 65535"
    if arguments.port is not None and not is_free(arguments.port):
        return f"--port {arguments.port}: something else listens there"
    missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install 'rankscope[demo]'"
    return None


def _demo(arguments: argparse.Namespace, screen: Screen) -> int:
    fault = FAULTS[arguments.fault]
    injection = decide(fault, ranks=arguments.ranks, steps=arguments.steps, seed=arguments.seed)
    run = f"demo-{fault.name}-{secrets.token_hex(2)}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankscope-demo-")))
        server = stack.enter_context(_start_server(folder, arguments.port))
        url = server.url
        client = Client(url)
        screen.say(f"Server     {url}")
        screen.say(f"Dashboard  {url}/runs/{run}")
        screen.say(
            f"Training   {arguments.steps} steps on {arguments.ranks} ranks, seed {arguments.seed}"
        )
        screen.say(f"Injecting  {describe(injection)}")
        screen.paragraph("           ", fault.what)
        screen.say()
        job = stack.enter_context(
            Job(
                [
                    *PYTHON,
                    "-m",
                    "rankscope.server.demo.training",
                    *("--fault", fault.name),
                    *("--steps", str(arguments.steps)),
                    *("--seed", str(arguments.seed)),
                ],
                ranks=arguments.ranks,
                folder=folder,
                environment={
                    "RANKSCOPE_SERVER": url,
                    "RANKSCOPE_RUN": run,
                    "RANKSCOPE_PROJECT": "demo",
                    "RANKSCOPE_MODE": "online",
                    "RANKSCOPE_SPOOL": str(folder / "spool"),
                },
            )
        )
        watch = Watch(client, run, screen)
        watch.follow(job, server, steps=arguments.steps)
        check_exit_codes(job, injection)
        alerts = watch.settle(job, server, injection)
        comparison = compare(injection, alerts, world_size=arguments.ranks)
        screen.say(f"injected:  {comparison.injected}")
        for line in comparison.found:
            screen.say(f"found:     {line}")
        for line in comparison.wrong:
            screen.say(f"WRONG:     {line}")
        if comparison.as_injected:
            screen.say("as expected")
        if not arguments.exit:
            _leave_running(screen, server, f"{url}/runs/{run}")
    return 0 if comparison.as_injected else 1


def _start_server(folder: Path, port: int | None) -> LocalServer:
    """A server at the port, or at the usual one, or where somebody has that at any free one."""
    try:
        try:
            return LocalServer(folder, DEFAULT_PORT if port is None else port)
        except NotStarted as failed:
            if port is not None or not failed.is_address_taken:
                raise
            return LocalServer(folder)
    except NotStarted as failed:
        raise DemoFailed(f"the server did not start:\n{failed}") from failed


def _leave_running(screen: Screen, server: Process, address: str) -> None:
    screen.say()
    screen.say(f"The dashboard stays at {address} until Ctrl-C.")
    try:
        while server.exit_code is None:
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        screen.say()
        return
    raise DemoFailed(f"the server ended:\n{server.tail()}")
