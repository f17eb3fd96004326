"""`rankscope doctor`: what works here, and what will be measured, before a job is started."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from importlib import metadata, util
from pathlib import Path

import urllib3

from rankscope import agent
from rankscope.agent import wire
from rankscope.agent.delivery.spool import SpoolFolder, folders_below
from rankscope.agent.fingerprint import kernel
from rankscope.agent.launcher import identify
from rankscope.agent.options import Options, resolve

OK, WARNING, FAILED, INFO = "ok", "warning", "failed", "info"
_SIGNS = {OK: "ok", WARNING: "!!", FAILED: "XX", INFO: "--"}
# What comes of that the Date of an answer has whole seconds is far below.
_CLOCK_WARNING_S = 5.0
_TIMEOUT_S = 10.0
# Links of the chain within a step; what comes after them in `STAGES` stands beside it.
_CHAIN = wire.STAGES.index("parameters") + 1
_PACKAGES = ("torch", "numpy", "msgpack", "urllib3", "tensorboard", "nvidia-ml-py")
_SERVER_PACKAGES = ("fastapi", "sqlalchemy", "alembic", "uvicorn", "plotly")


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was examined.

    Attributes:
        name: what.
        state: `ok`, `warning` (it works, but), `failed` or `info`.
        text: how it stands.
        remedy: what to do, or empty.
    """

    name: str
    state: str
    text: str
    remedy: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 0, or 1 where something has failed."""
    parser = argparse.ArgumentParser(
        prog="rankscope doctor",
        description="Examines this machine as `attach` would find it: versions, fingerprint "
        "kernel, server, clock, spool, and what will be measured. Exit code 1 where something "
        "does not work.",
    )
    parser.add_argument("--server", help="URL of the server (RANKSCOPE_SERVER)")
    parser.add_argument("--token", help="bearer token (RANKSCOPE_TOKEN)")
    parser.add_argument("--spool", help="folder of waiting batches (RANKSCOPE_SPOOL)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    given = parser.parse_args(arguments)
    asked = {"server": given.server, "token": given.token, "spool": given.spool}
    lines = list(examine(asked, os.environ))
    healthy = not any(line.state == FAILED for line in lines)
    if given.json:
        shown = {"healthy": healthy, "checks": [asdict(line) for line in lines]}
        sys.stdout.write(f"{json.dumps(shown, indent=2)}\n")
    else:
        sys.stdout.write("".join(f"{text}\n" for text in _texts(lines, healthy)))
    return 0 if healthy else 1


def examine(asked: Mapping[str, object], environ: Mapping[str, str]) -> Iterator[Line]:
    """All lines, in the order in which they are shown.

    Args:
        asked: options, as `attach` takes them; None: not given.
    """
    yield from _versions()
    yield _kernel()
    yield _torch()
    try:
        options = resolve(asked, environ)
    except (OSError, TypeError, ValueError) as error:
        # Without options there is no server to ask and no spool to examine.
        yield Line("options", FAILED, str(error), "attach would raise the same")
        return
    yield Line("options", INFO, _said(options))
    if options.mode == "disabled":
        yield Line("mode", WARNING, "disabled: attach does nothing", "unset RANKSCOPE_MODE")
        return
    if options.mode == "online":
        yield from _server(options)
    else:
        yield Line("server", INFO, "not asked, as the mode is offline: `rankscope sync` sends")
    yield _spool(options.spool)
    yield from _waiting(options.spool)
    yield from _measured(options, environ)


def _versions() -> Iterator[Line]:
    yield Line("rankscope", OK, agent.__version__)
    version = platform.python_version()
    yield Line("python", OK, f"{version} on {platform.system()} {platform.machine()}")
    there = [f"{name} {v}" for name in _PACKAGES if (v := _version(name)) is not None]
    yield Line("packages", INFO, ", ".join(there))
    missing = [name for name in _SERVER_PACKAGES if _version(name) is None]
    server = f"no: {', '.join(missing)} missing" if missing else "yes"
    hint = "pip install 'rankscope[server]', where the server is to run" if missing else ""
    yield Line("server part installed", INFO, server, hint)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _kernel() -> Line:
    if kernel.load() is not None:
        return Line("fingerprint kernel", OK, "compiled")
    built = Path(kernel.__file__).with_name("_kernel.so").exists()
    why = "the compiled one does not fit this machine or version" if built else "none was built"
    return Line(
        "fingerprint kernel",
        WARNING,
        f"numpy, several times slower: {why}",
        "install again where there is a C compiler",
    )


def _torch() -> Line:
    if util.find_spec("torch") is None:
        text = "not installed: `agent.start` works, `agent.attach` needs it"
        return Line("torch", INFO, text)
    try:
        import torch
    except (ImportError, OSError) as error:
        return Line("torch", FAILED, f"cannot be imported: {error}", "install it again")
    devices = "CPU alone"
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        devices = f"{count} x {torch.cuda.get_device_name(0)}"
    distributed = "" if torch.distributed.is_available() else ", without torch.distributed"
    return Line("torch", OK, f"{torch.__version__}, {devices}{distributed}")


def _said(options: Options) -> str:
    token = "set" if options.token else "none"
    return (
        f"server {options.server}, token {token}, project {options.project}, mode {options.mode}, "
        f"overhead {options.overhead:g}, allowance {options.allowance:g} s"
    )


def _server(options: Options) -> Iterator[Line]:
    headers = {"Authorization": f"Bearer {options.token}"} if options.token else {}

    def ask(method: str, path: str) -> urllib3.BaseHTTPResponse:
        return urllib3.request(
            method, f"{options.server}{path}", headers=headers, timeout=_TIMEOUT_S, retries=False
        )

    try:
        began = time.time()
        answer = ask("GET", "/readyz")
        ended = time.time()
        # Readiness is said to everybody, batches are taken from those who may write. This is none.
        refusal = ask("POST", "/api/v1/ingest").status if answer.status == 200 else 0
    except urllib3.exceptions.HTTPError as error:
        reason = str(getattr(error, "reason", None) or error).rstrip(".")
        yield Line(
            "server",
            FAILED,
            f"{options.server} does not answer: {reason}",
            "start it with `rankscope serve`, or give its address in RANKSCOPE_SERVER; a training "
            "goes on without it, and keeps its batches in the spool",
        )
        return
    yield _ready(options.server, answer, ended - began)
    if refusal in (401, 403):
        yield Line(
            "token",
            FAILED,
            f"the server takes no batches {'by this token' if options.token else 'without a token'}"
            f" (status {refusal})",
            "give RANKSCOPE_TOKEN a token with the scope write (`rankscope token create`), of this "
            "project",
        )
    yield from _clock(answer.headers.get("Date"), began, ended)


def _ready(address: str, answer: urllib3.BaseHTTPResponse, took: float) -> Line:
    try:
        body = json.loads(answer.data)
    except ValueError:
        body = None
    if not isinstance(body, dict) or not {"status", "title"} & body.keys():
        text = f"{address} is something else than a Rankscope server (status {answer.status})"
        return Line("server", FAILED, text, "look at the address in RANKSCOPE_SERVER")
    if answer.status != 200:
        return Line("server", FAILED, f"{address} is not ready: {body.get('detail', body)}")
    return Line("server", OK, f"{address} is ready, answered in {1000 * took:.0f} ms")


def _clock(date: str | None, began: float, ended: float) -> Iterator[Line]:
    try:
        there = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return
    # The server's time lies in [there, there + 1), and was read between the two of ours.
    ahead = max(0.0, there - ended) - max(0.0, began - (there + 1))
    if abs(ahead) < _CLOCK_WARNING_S:
        yield Line("clock", OK, f"within {_CLOCK_WARNING_S:.0f} s of the server's")
        return
    which = "behind" if ahead > 0 else "ahead of"
    yield Line(
        "clock",
        WARNING,
        f"{abs(ahead):.0f} s {which} the server's",
        "set the clocks by NTP: times of ranks on several machines are compared",
    )


def _spool(folder: Path) -> Line:
    # As the agent would make it; the folder itself is its business.
    place = folder
    try:
        while not place.exists():
            place = place.parent
        with tempfile.NamedTemporaryFile(dir=place):
            pass
    except OSError as error:
        return Line(
            "spool",
            FAILED,
            f"{folder}: cannot be written to: {error.strerror or error}",
            "name another folder in RANKSCOPE_SPOOL",
        )
    return Line("spool", OK, f"{folder}: can be written to")


def _waiting(folder: Path) -> Iterator[Line]:
    by_process: list[list[int]] = []
    # That it cannot be read is said of the spool; of a process that ends, its folder may be gone.
    with contextlib.suppress(OSError):
        for place in folders_below(folder):
            with contextlib.suppress(OSError):
                one = SpoolFolder(place)
                by_process.append([one.size(seq) for seq in one.sequence()])
    sizes = [size for of_process in by_process for size in of_process]
    if not sizes:
        yield Line("waiting batches", OK, "none")
        return
    number = f"{len(sizes)} batch{'es' if len(sizes) > 1 else ''}, {sum(sizes) / 1e6:.1f} MB"
    processes = f"{len(by_process)} process{'es' if len(by_process) > 1 else ''}"
    yield Line(
        "waiting batches",
        WARNING,
        f"{number}, of {processes}",
        "`rankscope sync` sends what no living process sends by itself",
    )


def _measured(options: Options, environ: Mapping[str, str]) -> Iterator[Line]:
    who = identify(environ, run=options.run)
    run = "a fresh id, made at attach" if who.fresh else f"run {who.run}"
    launcher = who.launcher or "no launcher"
    text = f"{launcher}, rank {who.rank} of {who.world_size}, {run}"
    yield Line("launcher", WARNING if who.warning else OK, text, who.warning)
    if options.allowance == float("inf"):
        steps = "every step in full"
    elif options.allowance > 0:
        steps = (
            f"every step in full until {options.allowance:g} s of the agent's time are spent, then "
            f"as often as {100 * options.overhead:g} % of the step time allow"
        )
    else:
        steps = f"as often as {100 * options.overhead:g} % of the step time allow"
    yield Line("sampled", INFO, f"{steps}; losses and rates of the first 1,024 steps in any case")
    if util.find_spec("torch") is None:
        text = "what is handed to `monitor.step`: losses, digests of gradients and parameters"
        yield Line("measured", INFO, text)
        return
    yield from _probes()


def _probes() -> Iterator[Line]:
    try:
        from rankscope.agent.probes import PROBES
    except (ImportError, OSError) as error:
        yield Line("measured", FAILED, f"the probes cannot be loaded: {error}")
        return
    names = ", ".join(probe.name.replace("_", " ") for probe in PROBES)
    stages = ", ".join(stage.replace("_", " ") for stage in wire.STAGES[:_CHAIN])
    yield Line("measured", INFO, f"{len(PROBES)} families of signals: {names}")
    yield Line("compared", INFO, f"between ranks, where there are several: {stages}")


def _texts(lines: Sequence[Line], healthy: bool) -> Iterator[str]:
    width = max(len(line.name) for line in lines)
    for line in lines:
        yield f"{_SIGNS[line.state]}  {line.name:<{width}}  {line.text}"
        if line.remedy:
            yield f"    {'':<{width}}  {line.remedy}"
    warnings = sum(line.state == WARNING for line in lines)
    failed = sum(line.state == FAILED for line in lines)
    yield ""
    if healthy:
        notes = f", with {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
        yield f"All works here{notes}."
    else:
        yield f"{failed} thing{'s do' if failed > 1 else ' does'} not work: see XX above."
