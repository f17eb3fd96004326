"""Hooks that take a host out of service: a command of the server's, or a webhook.

They are targets as those of people are, with the same outbox, retries and log, but for three
things: they are called for alerts that accuse a host alone, once an alert, when it opens.

A command is named by a target (`cordon-command://NAME`) and stands in the settings of the server
(`--cordon-command NAME=PROGRAM`): neither a route nor the database says what is executed.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rankscope.server.alerts.fields import alert_fields
from rankscope.server.notifications.message import Message, time_text
from rankscope.server.outbound_post import NotTaken
from rankscope.server.window import Alert

COMMAND = "cordon-command"
WEBHOOKS = {"cordon-webhook": "http", "cordon-webhooks": "https"}

# What is of the machine far more often than of the program: a rank that computes later than its
# peers, and one that is gone while they are heard of. A rank that fails or stalls mostly does so
# by its program.
_KINDS = ("rank.straggler", "rank.silent")
# NVML's count of memory errors that ECC could not correct, beside what is found of a rank.
_GPU_ERRORS = "gpu_ecc_uncorrected"
# What DNS and schedulers take for the name of a host. A trainer says what its host is called, and
# programs are given it: nothing else goes through.
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
# As long as a receiver gets for its answer: who takes longer has to do it in the background.
TIMEOUT_S = 10.0
# How often a program that writes nothing is polled.
_POLL_S = 0.05
_MOST_OF_ERROR = 300
_VERSION = 1


def is_cordon(url: str) -> bool:
    """Whether a target's address is one of a hook."""
    scheme = urlsplit(url).scheme
    return scheme == COMMAND or scheme in WEBHOOKS


def accused(alert: Alert, hosts: Mapping[int, str], *, chosen: bool) -> dict[str, list[int]]:
    """Hosts that an alert accuses, each with the suspect ranks that it has.

    Empty where it names more than half of the ranks: that says nothing of a machine.

    Args:
        hosts: of each rank of the run that was heard of.
        chosen: whether the target says which kinds it wants: those stand for the ones that are of
            a machine by themselves.
    """
    if not (chosen or alert.kind in _KINDS or _has_gpu_errors(alert)):
        return {}
    if 2 * len(alert.ranks) > len(hosts):
        return {}
    found: dict[str, list[int]] = {}
    for rank in sorted(alert.ranks):
        host = hosts.get(rank, "")
        if _HOST.fullmatch(host):
            found.setdefault(host, []).append(rank)
    return dict(sorted(found.items()))


def _has_gpu_errors(alert: Alert) -> bool:
    """Whether the GPU of a suspect rank has lost memory contents."""
    gpus = alert.evidence.get("gpus")
    if not isinstance(gpus, Mapping):
        return False
    readings = [gpus.get(str(rank)) for rank in alert.ranks]
    return any(isinstance(r, Mapping) and (r.get(_GPU_ERRORS) or 0) > 0 for r in readings)


def payload(message: Message) -> dict[str, Any]:
    """The JSON that a hook gets; docs/notifications.md has the fields."""
    fields = alert_fields(message.news[0].alert)
    for name in ("opened_at", "resolved_at"):
        if fields[name] is not None:
            fields[name] = time_text(fields[name])
    return {
        "version": _VERSION,
        "id": message.id,
        "test": message.is_test,
        "run": message.run,
        "project": message.project,
        "url": message.link,
        "hosts": [{"host": host, "ranks": ranks} for host, ranks in message.hosts.items()],
        "alert": fields,
    }


def check_name(name: str) -> None:
    """Raises ValueError where this is no name of a command."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,39}", name):
        raise ValueError(f"{name[:60]!r} is no name of a command: up to 40 of a-z, 0-9 and '-'")


def check_commands(commands: Mapping[str, str]) -> None:
    """Makes sure that commands can be called.

    Args:
        commands: path of the program, by its name.

    Raises:
        ValueError: one cannot.
    """
    for name, program in commands.items():
        check_name(name)
        if not os.path.isabs(program) or not os.path.isfile(program):
            raise ValueError(f"--cordon-command {name}: {program!r} is no full path of a program")
        if not os.access(program, os.X_OK):
            raise ValueError(f"--cordon-command {name}: {program} may not be executed")


def call(url: str, message: Message, commands: Mapping[str, str]) -> None:
    """Calls the command that a target names; takes `TIMEOUT_S` at most.

    Its standard input has the JSON of `payload`; the environment, besides the server's own, the
    names in it that are letters, digits and points by themselves. No shell is in between.

    Raises:
        NotTaken: this server has no such command, or it failed.
    """
    name = command_name(url)
    if name not in commands:
        raise NotTaken(
            f"{COMMAND}://{name} is called by servers that were started with "
            f"--cordon-command {name}=PROGRAM, and this process was not"
        )
    body = payload(message)
    alert = body["alert"]
    variables = {
        "HOSTS": " ".join(message.hosts),
        "RANKS": " ".join(str(rank) for ranks in message.hosts.values() for rank in ranks),
        "KIND": alert["kind"],
        "SEVERITY": alert["severity"],
        "ALERT": alert["id"],
        "URL": message.link,
        **({"TEST": "1"} if message.is_test else {}),
    }
    environment = {**os.environ, **{f"RANKSCOPE_{k}": v for k, v in variables.items()}}
    try:
        _run(name, commands[name], json.dumps(body).encode(), environment)
    except OSError as error:
        raise NotTaken(f"{name} cannot be started: {error.strerror or error}") from error


def command_name(url: str) -> str:
    """The command that a target's address names."""
    return url.partition("://")[2]


def _run(name: str, program: str, given: bytes, environment: Mapping[str, str]) -> None:
    """Runs a program; one that takes too long is ended with all that it has started.

    Raises:
        NotTaken: it took too long, or its exit code is not 0.
    """
    with tempfile.TemporaryFile() as stdin:
        stdin.write(given)
        stdin.seek(0)
        process = subprocess.Popen(
            [program],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            # A group of its own, so that it can be ended with its children.
            start_new_session=True,
        )
    assert process.stderr is not None
    with process.stderr:
        said = _stderr_of(process, process.stderr.fileno(), time.monotonic() + TIMEOUT_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise NotTaken(f"{name} was ended after {TIMEOUT_S:.0f} s {said}".strip())
    code = process.returncode
    if code:
        how = f"ended with {code}" if code > 0 else f"was ended by signal {-code}"
        raise NotTaken(f"{name} {how} {said}".strip())


def _stderr_of(process: subprocess.Popen[bytes], stderr: int, deadline: float) -> str:
    """The end of what a program says until it ends, or until a time of the monotonic clock.

    What it leaves running may keep the pipe open: that is not waited for.
    """
    os.set_blocking(stderr, False)
    last, is_open = b"", True
    with selectors.DefaultSelector() as selector:
        selector.register(stderr, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            # Before it is read: what it says last is there once it has ended.
            ended = process.poll() is not None
            if is_open and selector.select(0 if ended else min(left, _POLL_S)):
                part = os.read(stderr, 65_536)
                last, is_open = (last + part)[-_MOST_OF_ERROR:], bool(part)
            elif ended:
                break
            elif not is_open:
                time.sleep(min(left, _POLL_S))
    return last.decode("utf-8", "replace").strip()
