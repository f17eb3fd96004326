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

from rankscope.server.demo.client import Client, Json, ServerAway
from rankscope.server.demo.comparison import compare, describe
from rankscope.server.demo.faults import DEFAULT_FAULT, FAULTS, Injection, decide
from rankscope.server.demo.processes import (
    PYTHON,
    RANKSCOPE,
    Job,
    Process,
    free_port,
    handling_sigterm,
    is_free,
)
from rankscope.server.demo.screen import Screen

DEFAULT_PORT = 8642
DEFAULT_RANKS = 4
DEFAULT_STEPS = 600
MAX_RANKS = 64

_POLL_SECONDS = 0.3
# Ranks post about twice a second: the latest step of one may lie so far behind that of another.
_BEHIND_STEPS = 200
_SERVER_START_SECONDS = 60.0
# Without a new step for so long, the training hangs.
_STUCK_SECONDS = 180.0
# After the training: how long the server may take to see that it has ended, or that a rank is gone.
_SETTLE_SECONDS = 90.0


class DemoFailed(Exception):
    """The demo itself did not work; the message says which part and shows what it printed."""


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
        port = arguments.port or (DEFAULT_PORT if is_free(DEFAULT_PORT) else free_port())
        url = f"http://127.0.0.1:{port}"
        server = stack.enter_context(
            Process(
                [
                    *RANKSCOPE,
                    "serve",
                    *("--host", "127.0.0.1"),
                    *("--port", str(port)),
                    *("--db", f"sqlite:///{folder / 'demo.db'}"),
                ],
                log=folder / "server.log",
            )
        )
        client = Client(url)
        _wait_until_ready(client, server)
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
        watch = _Watch(client, run, screen)
        _train(watch, job, server, steps=arguments.steps)
        _check_exit_codes(job, injection)
        alerts = _settled(watch, job, server, injection)
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


class _Watch:
    """Asks the server how far the run is, and prints what is new."""

    def __init__(self, client: Client, run: str, screen: Screen) -> None:
        self.client = client
        self.run = run
        self.screen = screen
        self.last_step = -1
        self._printed: dict[str, str] = {}
        self._followed: set[str] = set()

    def progress(self, steps: int) -> None:
        """Shows the latest step and losses."""
        facts = self.client.run(self.run)
        if facts is None or facts["last_step"] is None or facts["last_step"] < 0:
            return
        self.last_step = int(facts["last_step"])
        losses = self.client.losses(self.run, from_step=max(self.last_step - _BEHIND_STEPS, 0))
        self.screen.progress(step=self.last_step, steps=steps, losses=losses)

    def alerts(self) -> list[Json]:
        """Prints the alerts that are new; returns all of them."""
        alerts = self.client.alerts(self.run)
        for alert in alerts:
            if alert["id"] not in self._printed:
                self._printed[alert["id"]] = alert["kind"]
                self.screen.alert(alert, f"{self.client.url}/runs/{self.run}#alert-{alert['id']}")
            # A cause may be understood later than what follows from it.
            for consequence in alert["consequences"]:
                if consequence in self._printed and consequence not in self._followed:
                    self._followed.add(consequence)
                    kind = self._printed[consequence]
                    self.screen.say(f"       {kind} (above) follows from {alert['kind']}")
        return alerts


def _wait_until_ready(client: Client, server: Process) -> None:
    deadline = time.monotonic() + _SERVER_START_SECONDS
    while not client.ready():
        if server.exit_code is not None or time.monotonic() > deadline:
            raise DemoFailed(f"the server did not start:\n{server.tail()}")
        time.sleep(0.1)


def _train(watch: _Watch, job: Job, server: Process, *, steps: int) -> None:
    """Follows the training to its end."""
    last_step, since = -1, time.monotonic()
    while job.running:
        if server.exit_code is not None:
            raise DemoFailed(f"the server ended:\n{server.tail()}")
        watch.progress(steps)
        watch.alerts()
        if watch.last_step != last_step:
            last_step, since = watch.last_step, time.monotonic()
        elif time.monotonic() - since > _STUCK_SECONDS:
            raise DemoFailed(f"no step for {_STUCK_SECONDS:.0f} s:\n{job.ranks[0].tail()}")
        time.sleep(_POLL_SECONDS)
    watch.progress(steps)


def _check_exit_codes(job: Job, injection: Injection) -> None:
    """The training has to end as the fault makes it end."""
    deadly = injection.fault.name == "dead-rank"
    for rank, (process, code) in enumerate(zip(job.ranks, job.exit_codes, strict=True)):
        if code != 0 and not deadly:
            raise DemoFailed(f"rank {rank} ended with exit code {code}:\n{process.tail()}")


def _settled(watch: _Watch, job: Job, server: Process, injection: Injection) -> list[Json]:
    """The alerts of the run, once the server has judged all of it.

    An alert may still come after the last step: a dead rank is told from a slow one by waiting.

    Raises:
        DemoFailed: the server has not judged the run in time; "not checked" is no success.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    judged = False
    while time.monotonic() < deadline:
        facts = watch.client.run(watch.run)
        judged = (
            facts is not None
            and facts["state"] != "running"
            and facts["evaluated_step"] >= facts["last_step"]
        )
        alerts = watch.alerts()
        if judged and (alerts or not injection.fault.kinds):
            return alerts
        time.sleep(_POLL_SECONDS)
    if not judged:
        raise DemoFailed(
            f"the server has not judged the run within {_SETTLE_SECONDS:.0f} s\n"
            f"--- server\n{server.tail()}\n--- rank 0\n{job.ranks[0].tail()}"
        )
    return watch.alerts()


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
