"""Fixtures for pytest: a test trains, and fails where Rankscope finds something in the training.

`pip install rankscope[server]` makes them known to pytest. Nothing is imported, and no server
started, before a test asks for one.
"""

from __future__ import annotations

import contextlib
import io
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rankscope.server.gate.formats import Report


class RankscopeRun:
    """One run, for one test: what posts to it, and what is said of it.

    Attributes:
        run: its id.
        server: URL of the server.
        environment: what a process has to have in its environment for its agent to post to this
            run. The test's own has it, so that processes that inherit it need nothing more.
    """

    def __init__(self, run: str, server: str, environment: Mapping[str, str]) -> None:
        self.run = run
        self.server = server
        self.environment = dict(environment)

    @property
    def address(self) -> str:
        """Of the run's page."""
        return f"{self.server}/runs/{self.run}"

    def report(
        self,
        *,
        fail_on: str = "warning",
        kinds: Sequence[str] = (),
        ignore: Sequence[str] = (),
        against: str | None = None,
        wait: float = 60.0,
    ) -> Report:
        """The verdict on the run, with its reasons, checks and alerts.

        Args:
            fail_on: lowest severity that fails: `warning` or `critical`.
            kinds: kinds of alerts to judge by, which are then required; empty: all.
            ignore: kinds of alerts to leave out.
            against: also compare with earlier runs, as `rankscope gate --against` does.
            wait: for the run and its end, seconds.

        Raises:
            RuntimeError: there is no verdict: nothing was posted, or the server is gone.
            ValueError: one of the arguments cannot be.
        """
        from rankscope.server.gate.gate import NoVerdict, verdict_on

        arguments = ["--server", self.server, "--wait", str(wait), "--fail-on", fail_on]
        for kind in kinds:
            arguments += ["--kind", kind]
        for kind in ignore:
            arguments += ["--ignore", kind]
        if against is not None:
            arguments += ["--against", against]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                return verdict_on(self.run, arguments)
        except NoVerdict as none:
            raise RuntimeError(f"no verdict on run {self.run}: {none}") from none
        except SystemExit:
            raise ValueError(said.getvalue().strip().rpartition("error: ")[2]) from None

    def check(self, **asked: Any) -> None:
        """Fails the test unless the run passes; the failure is what `rankscope gate` would print.

        Args:
            asked: as of `report`, and with its errors.
        """
        __tracebackhide__ = True
        from rankscope.server.gate.formats import text

        report = self.report(**asked)
        if report.verdict != "pass":
            pytest.fail(text(report), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that names a server which is there already."""
    parser.getgroup("rankscope").addoption(
        "--rankscope-server",
        metavar="URL",
        help="the server that runs of tests are posted to, where their pages stay; "
        "default: one of their own, that ends with the tests",
    )


@pytest.fixture(scope="session")
def rankscope_server(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """URL of the server that runs of tests are posted to: one for all of them."""
    given = pytestconfig.getoption("--rankscope-server")
    if given:
        yield str(given).rstrip("/")
        return
    from rankscope.server.demo.local_server import LocalServer

    with LocalServer(tmp_path_factory.mktemp("rankscope-server")) as server:
        yield server.url


@pytest.fixture
def rankscope_run(
    request: pytest.FixtureRequest,
    rankscope_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> RankscopeRun:
    """A run of its own for the test: whatever trains with an agent meanwhile posts to it."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", request.node.name).strip("-")
    run = f"{name[:100]}-{secrets.token_hex(4)}"
    environment = {
        "RANKSCOPE_SERVER": rankscope_server,
        "RANKSCOPE_RUN": run,
        "RANKSCOPE_MODE": "online",
        "RANKSCOPE_SPOOL": str(tmp_path / "rankscope-spool"),
    }
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    return RankscopeRun(run, rankscope_server, environment)
