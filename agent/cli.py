"""The command `rankscope`: a table of commands, each imported when it is called."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from rankscope import agent


@dataclass(frozen=True, slots=True)
class Command:
    """One line of the table.

    Attributes:
        home: `module:function`; the function takes the arguments after the command's name and
            returns the exit code.
        extra: what has to be installed for it besides the agent.
    """

    name: str
    home: str
    help: str
    extra: str = ""


COMMANDS = (
    Command("serve", "rankscope.server.cli:serve", "start the server", "server"),
    Command(
        "demo",
        "rankscope.server.demo.command:main",
        "train a real model on four ranks, break it midway, and show what is found",
        "demo",
    ),
    Command(
        "gate",
        "rankscope.server.gate.gate:gate",
        "pass or fail a run, for CI: exit code 0, 1, or 2 to 4 where it cannot say",
        "server",
    ),
    Command("runs", "rankscope.server.commands.lists:runs", "list runs", "server"),
    Command(
        "alerts", "rankscope.server.commands.lists:alerts", "list the alerts of a run", "server"
    ),
    Command(
        "tag",
        "rankscope.server.commands.tag:tag",
        "words by which a run is found again: give, take off, list",
        "server",
    ),
    Command("show", "rankscope.server.commands.show:show", "a run in the terminal", "server"),
    Command("watch", "rankscope.server.commands.watch:watch", "the same while it trains", "server"),
    Command(
        "report", "rankscope.server.commands.report:report", "a run as one HTML file", "server"
    ),
    Command(
        "compare", "rankscope.server.commands.compare:compare", "two runs side by side", "server"
    ),
    Command(
        "baseline",
        "rankscope.server.commands.baseline:baseline",
        "which runs others of their project are compared with",
        "server",
    ),
    Command(
        "export",
        "rankscope.server.commands.export:export",
        "all points of a run as TensorBoard events, CSV or Parquet",
        "server",
    ),
    Command(
        "import",
        "rankscope.server.commands.importing:import_",
        "what TensorBoard's writers have logged, as a run of the server",
        "server",
    ),
    Command(
        "check",
        "rankscope.server.commands.check:check",
        "judge what another tool has logged, without a server",
        "server",
    ),
    Command(
        "sync",
        "rankscope.agent.delivery.sync:main",
        "send what an offline or cut-off run left on disk",
    ),
    Command(
        "verify",
        "rankscope.agent.checkpoints.command:main",
        "whether two checkpoints are the same, tensor by tensor, and where not",
        "torch",
    ),
    Command("doctor", "rankscope.agent.doctor:main", "what works here, and what will be measured"),
    Command(
        "mcp",
        "rankscope.server.commands.mcp:main",
        "tools by which coding agents ask a server",
        "mcp",
    ),
    Command(
        "db",
        "rankscope.server.commands.db:db",
        "maintain the database",
        "server",
    ),
    Command(
        "token",
        "rankscope.server.commands.token:token",
        "who may read, write and administer",
        "server",
    ),
    Command(
        "completion",
        "rankscope.agent.completion:completion",
        "a script by which bash, zsh or fish completes all this",
    ),
    Command(
        "notify",
        "rankscope.server.commands.notify:notify",
        "who is notified of alerts: chat, mail, pagers, webhooks",
        "server",
    ),
)

USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if given else USAGE_ERROR
    if given[0] in ("-V", "--version"):
        print(f"rankscope {agent.__version__}")
        return 0
    command = next((c for c in COMMANDS if c.name == given[0]), None)
    if command is None:
        close = difflib.get_close_matches(given[0], [c.name for c in COMMANDS], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        print(
            f"rankscope: there is no command {given[0]!r}{hint}\n"
            "`rankscope --help` lists the commands.",
            file=sys.stderr,
        )
        return USAGE_ERROR
    return _call(command, given[1:])


def _call(command: Command, arguments: Sequence[str]) -> int:
    module, function = command.home.split(":")
    try:
        called = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        # A module of ours that is missing is a fault of ours, not of the installation.
        if not command.extra or (error.name or "").startswith("rankscope"):
            raise
        print(
            f"rankscope {command.name}: the package {error.name} is not installed.\n"
            f"Install it with: pip install 'rankscope[{command.extra}]'",
            file=sys.stderr,
        )
        return USAGE_ERROR
    try:
        code: int = called(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader had enough (`rankscope runs | head`). Python flushes once more at exit, and
        # would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _help() -> str:
    width = max(len(c.name) for c in COMMANDS)
    lines = [f"  {c.name:<{width}}  {c.help}" for c in COMMANDS]
    return "\n".join(
        [
            "usage: rankscope COMMAND [ARGUMENTS]",
            "",
            "Watches every rank of a distributed training job and says, while it runs, what went",
            "wrong, where and why.",
            "",
            "commands:",
            *lines,
            "",
            "`rankscope COMMAND --help` says more about a command; `rankscope --version` its",
            "version.",
        ]
    )
