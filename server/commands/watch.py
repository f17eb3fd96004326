"""`rankscope watch RUN`: a run in the terminal while it trains, until it ends."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import chain

from rich.console import Console, RenderableType
from rich.live import Live

from rankscope.client.errors import ClientError
from rankscope.server.commands import client
from rankscope.server.commands.run_facts import RunFacts, load, serious
from rankscope.server.commands.terminal import alert_lines, console, view

# A stream says something at least every 15 s; one that does not is asked for again.
_QUIET_SECONDS = 40.0
# How often the screen is drawn at least, should no event get through, and at most.
_POLL_SECONDS = 5.0
_INTERVAL_S = 1.0
# How long a server that went away is waited for.
_PATIENCE_S = 60.0
# After the end of a run its last steps are evaluated; more than this takes none.
_EVALUATION_S = 60.0


@client.command
def watch(argv: Sequence[str]) -> int:
    """Follows a run to its end; exit code 0 whatever its verdict."""
    parser = client.parser(
        "watch",
        "Shows a run while it trains, until it ends or Ctrl-C. Where the output is no terminal: a "
        "line for each alert as it opens, and the whole at the end.",
        prints_json=False,
    )
    parser.add_argument("run", metavar="RUN", type=client.run_id, help="id of the run")
    options = parser.parse_args(argv)
    server, screen = client.server_of(options), console()
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        # It is lost where it hits what reports errors and goes on, as a weak reference's callback.
        interrupted.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    if screen.is_terminal:
        return _live(server, options.run, screen, interrupted)
    return _lines(server, options.run, screen, interrupted)


def _live(server: client.Server, run: str, screen: Console, interrupted: threading.Event) -> int:
    def drawn(facts: RunFacts) -> RenderableType:
        return view(facts, width=screen.width, plain=not screen.encoding.startswith("utf"))

    first = load(server, run)
    # Text that is taller than the terminal would scroll away with each refresh: cut at its end.
    with Live(
        drawn(first), console=screen, auto_refresh=False, vertical_overflow="ellipsis"
    ) as live:
        for facts in _changes(server, run, first, interrupted):
            live.update(drawn(facts), refresh=True)
    return client.OK


def _lines(server: client.Server, run: str, screen: Console, interrupted: threading.Event) -> int:
    facts = load(server, run)
    reported: set[str] = set()
    for changed in chain([facts], _changes(server, run, facts, interrupted)):
        facts = changed
        for alert in serious(facts.roots):
            if alert["id"] not in reported:
                reported.add(alert["id"])
                screen.print(*alert_lines(alert), sep="\n")
    screen.print(view(facts, width=screen.width, plain=not screen.encoding.startswith("utf")))
    return client.OK


def _changes(
    server: client.Server, run: str, facts: RunFacts, interrupted: threading.Event
) -> Iterator[RunFacts]:
    """The facts after each change, until the run has ended and is evaluated."""
    listener = _Listener(server, run)
    listener.start()
    heard = time.monotonic()
    while facts.run["state"] == "running":
        listener.changed.wait(_POLL_SECONDS)
        listener.changed.clear()
        if interrupted.is_set():
            raise KeyboardInterrupt
        try:
            facts = load(server, run)
        except client.Refused as refused:
            if refused.code != client.UNREACHABLE or time.monotonic() > heard + _PATIENCE_S:
                raise
        else:
            heard = time.monotonic()
            yield facts
        time.sleep(_INTERVAL_S)
    patience = time.monotonic() + _EVALUATION_S
    while not facts.verdict["evaluated"] and time.monotonic() < patience:
        time.sleep(_INTERVAL_S / 2)
        facts = load(server, run)
    yield facts


class _Listener(threading.Thread):
    """Hears the server-sent events of a run.

    In a thread of its own, so that events that come while the screen is drawn are one change, and
    none of them has to wait. It ends with the process.

    Attributes:
        changed: set by each event.
    """

    def __init__(self, server: client.Server, run: str) -> None:
        super().__init__(daemon=True)
        self.changed = threading.Event()
        self._http = server.http
        self._path = f"/api/v1{client.run_path(run)}/stream"

    def run(self) -> None:
        """Listens, and again where the stream has ended."""
        while True:
            # What is wrong with the server the requests for the facts report.
            with contextlib.suppress(ClientError):
                self._listen()
            time.sleep(_INTERVAL_S)

    def _listen(self) -> None:
        for line in self._http.lines(self._path, timeout=_QUIET_SECONDS):
            # All but the pings, which are comments, and the ends of events.
            if line and not line.startswith(":"):
                self.changed.set()
