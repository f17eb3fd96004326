"""A real `rankscope serve`: its own process, its own database file, on a free port."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rankscope.server.demo.processes import RANKSCOPE, Process, free_port
from tests.support.servers.warm import WarmProcess, warm_enough

Found = TypeVar("Found")

# A machine that is busy with other work needs minutes to start a server: no test measures that.
_PATIENCE_S = 300.0


class Service:
    """The server; `kill` and `start` again keep address and database.

    Args:
        database: URL of it; None: an SQLite file in the folder.
        arguments: further ones of `rankscope serve`.

    Attributes:
        url: without a slash at its end.
    """

    def __init__(
        self,
        folder: Path,
        *,
        database: str | None = None,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._database = database or f"sqlite:///{folder / 'rankscope.db'}"
        self._environment = environment
        self._arguments = arguments
        self._folder = folder
        self._port = free_port()
        self._process: Process | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Starts it and waits until it takes requests."""
        serve = ["serve", "--port", str(self._port), "--db", self._database, *self._arguments]
        log, environment = self._folder / "server.log", self._environment
        process = (
            WarmProcess(serve, log=log, environment=environment)
            if warm_enough(environment)
            else Process([*RANKSCOPE, *serve], log=log, environment=environment)
        )
        self._process = process

        def ready() -> bool:
            assert process.exit_code is None, process.tail(40)
            try:
                return httpx.get(f"{self.url}/readyz").status_code == 200
            except httpx.TransportError:
                return False

        try:
            eventually(ready, timeout_s=_PATIENCE_S)
        except BaseException:
            # Nobody has it yet who would end it.
            self.stop()
            raise

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._port

    @property
    def pid(self) -> int:
        """Number of the server's process."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Ends it as a power cut would."""
        assert self._process is not None
        self._process.kill()

    def stop(self) -> None:
        """Asks it to end, and waits."""
        if self._process is not None:
            self._process.stop()

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def get(self, path: str, **query: Any) -> Any:
        """JSON of a route under /api/v1 that must answer 200."""
        answer = httpx.get(f"{self.url}/api/v1{path}", params=query, timeout=30)
        assert answer.status_code == 200, f"{answer.url} {answer.status_code} {answer.text}"
        return answer.json()

    def run(self, run: str) -> dict[str, Any] | None:
        """The run, None while the server has not heard of it."""
        answer = httpx.get(f"{self.url}/api/v1/runs/{run}", timeout=30)
        return answer.json() if answer.status_code == 200 else None

    def last_step(self, run: str) -> int:
        """Last step of a run, -1 before the first."""
        found = self.run(run)
        return -1 if found is None or found["last_step"] is None else found["last_step"]

    def wait_for_step(self, run: str, step: int, timeout_s: float = 60) -> None:
        """Waits until a run has come to a step."""
        eventually(lambda: self.last_step(run) >= step, timeout_s=timeout_s)

    def wait_for_state(self, run: str, state: str, timeout_s: float = 60) -> dict[str, Any]:
        """The run, once it is in a state, and judged to its end where that is `finished`."""

        def reached() -> Any:
            found = self.run(run)
            if not found or found["state"] != state:
                return None
            # What was posted last is stored at once, and judged a moment later.
            judged = (found["evaluated_step"] or 0) >= (found["last_step"] or 0)
            return found if judged or state != "finished" else None

        found: dict[str, Any] = eventually(reached, timeout_s=timeout_s)
        return found

    def alerts(self, run: str) -> list[dict[str, Any]]:
        """Root alerts of severity warning and above."""
        items = self.get(f"/runs/{run}/alerts", limit=100)["items"]
        return [alert for alert in items if alert["severity"] != "info"]

    def series(self, run: str, metric: str = "loss") -> dict[int, dict[int, float]]:
        """Rank -> step -> value, every point of it; a step that comes twice fails."""
        answer = self.get(f"/runs/{run}/series", metric=metric, max_points=100_000)
        found = {}
        for line in answer["series"]:
            assert len(set(line["steps"])) == len(line["steps"])
            values = [float(value) for value in line["values"]]
            found[line["rank"]] = dict(zip(line["steps"], values, strict=True))
        return found


def eventually(what: Callable[[], Found], *, timeout_s: float) -> Found:
    """The first answer of `what` that is true; asks again until then."""
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)
    return found
