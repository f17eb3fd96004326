"""What holds for every test."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rankscope.agent import guard
from tests.support import parallel

# How long an example takes says more about the machine than about the code. The same examples each
# time: whether a commit is good must not be a matter of luck. EXPLORE=1 looks for new ones.
settings.register_profile("rankscope", deadline=None, derandomize="EXPLORE" not in os.environ)
settings.load_profile("rankscope")

# A developer's own settings must not reach the agents and servers under test.
for name in [name for name in os.environ if name.startswith("RANKSCOPE_")]:
    del os.environ[name]
# Where it is set every step is sampled by default: tests say themselves where that is to be so.
os.environ.pop("CI", None)

# Of torch and numpy, here and in all that is started: threads that wait for each other in every
# operation on a handful of numbers take, where cores are few, many times as long as one does.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine takes longer for an answer than the five seconds that are httpx's default.
with contextlib.suppress(ImportError):
    from httpx._config import DEFAULT_TIMEOUT_CONFIG

    for part in ("connect", "read", "write", "pool"):
        setattr(DEFAULT_TIMEOUT_CONFIG, part, 60.0)

# Hundreds of processes are started here: each would compile all of our modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_TURNS = pytest.StashKey[parallel.Turns]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[_TURNS] = parallel.Turns(Path(os.environ[parallel.RUN]))
        config.add_cleanup(config.stash[_TURNS].close)
    else:
        folder = tempfile.mkdtemp(prefix="tests-of-rankscope-")
        os.environ[parallel.RUN] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that no worker is left with one of them at the end."""
    places = {Path(__file__).parent / name: n for n, name in enumerate(parallel.LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Many tests collect garbage: let that not look each time at torch and all else imported."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Waits for its turn before its time limit begins."""
    turns = item.config.stash.get(_TURNS, None)
    alone = item.get_closest_marker("alone") is not None
    with contextlib.nullcontext() if turns is None else turns.turn(alone=alone):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """Nothing that the workers have started outlives them."""
    yield
    if not session.config.pluginmanager.hasplugin("dsession"):
        return
    if left := parallel.left_behind():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        report = pytest.TestReport(
            nodeid="processes that were left behind",
            location=("tests", None, "processes that were left behind"),
            keywords={},
            outcome="failed",
            longrepr="\n".join(left),
            when="teardown",
        )
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        terminal.stats.setdefault("error", []).append(report)


@pytest.fixture(autouse=True)
def _strict_agent(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the agent swallows in production fails here, unless the test is about that."""
    contained: list[tuple[str, Exception]] = []

    def observe(probe: str, fault: Exception) -> None:
        contained.append((probe, fault))

    guard.observers.append(observe)
    yield
    guard.observers.remove(observe)
    if contained and request.node.get_closest_marker("contained") is None:
        probe, fault = contained[0]
        raise AssertionError(f"the agent contained a fault of {probe!r}") from fault
