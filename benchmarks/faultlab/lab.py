"""Runs cases one after the other; holds what the server says against what is expected."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faultlab.case import REGISTRY, Case, Setting
from benchmarks.faultlab.ranks import RankFailed, Ranks, launch
from benchmarks.faultlab.rest import Json, Server
from benchmarks.faultlab.score import Score, score
from rankscope.server.demo.processes import RANKSCOPE, Process

_LISTENS = re.compile(r"listens on (http://\S+)")
_START_SECONDS = 60.0
_JUDGE_SECONDS = 60.0
# At its default the agent looks at these tiny steps at least so often.
DEFAULT_SLACK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of one case."""

    case: str
    world: int
    model: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a job.

    Attributes:
        expected: JSON-able.
        alert: the one that was judged, as the API gives it.
        others: kinds, severities and first steps of all other alerts, consequences included.
        seconds: that the training took.
    """

    job: Job
    run: str
    what: str
    family: str
    expected: Json
    score: Score
    alert: Json | None
    others: tuple[str, ...]
    seconds: float


def jobs_of(
    cases: Iterable[type[Case]],
    *,
    worlds: Iterable[int],
    models: Iterable[str],
    seeds: int,
    all_models: bool,
) -> list[Job]:
    """What is to be run: each case with each number of ranks and each seed.

    Models take turns, unless all of them are asked for.
    """
    jobs = []
    allowed, sizes = tuple(models), sorted(set(worlds), reverse=True)
    for number, case in enumerate(cases):
        fitting = [m for m in case.models if m in allowed]
        for world in [w for w in sizes if w in case.worlds]:
            for seed in range(seeds):
                turn = number + seed + (world == 2)
                chosen = fitting if all_models else fitting[turn % max(len(fitting), 1) :][:1]
                jobs += [Job(case=case.id, world=world, model=m, seed=seed) for m in chosen]
    # Those of the same size share their processes.
    return sorted(jobs, key=lambda job: -job.world)


class Lab:
    """A server, pools of ranks, and the cases that run on them.

    Args:
        folder: for the database, logs and checkpoints.
        full: everything is sampled at every step.
    """

    def __init__(self, folder: Path, *, full: bool) -> None:
        self.folder = folder
        self.full = full
        self._stack = contextlib.ExitStack()
        self._pool: Ranks | None = None

    def __enter__(self) -> Lab:
        self.folder.mkdir(parents=True, exist_ok=True)
        database = f"sqlite:///{self.folder / 'lab.db'}"
        command = (*RANKSCOPE, "serve", "--port", "0", "--db", database)
        self._process = self._stack.enter_context(Process(command, log=self.folder / "server.log"))
        self.server = Server(self._address())
        return self

    def __exit__(self, *error: Any) -> None:
        if self._pool is not None:
            self._pool.close()
        self._stack.close()

    def results(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Runs them all; a result comes when the server has judged the run after the next one."""
        before: tuple[Job, Setting, float, str] | None = None
        for job in jobs:
            setting = self._setting(job)
            began = time.monotonic()
            error = self._trained(job, setting)
            trained = (job, setting, time.monotonic() - began, error)
            # The server judges one run while the next one is trained.
            if before is not None:
                yield self._result(*before)
            before = trained
        if before is not None:
            yield self._result(*before)

    # ------------------------------------------------------------------------------------- inside

    def _setting(self, job: Job) -> Setting:
        token = secrets.token_hex(3)
        name = f"{job.case}-{job.world}-{job.model}-{job.seed}-{token}".lower()
        return Setting(
            world=job.world,
            model=job.model,
            seed=job.seed,
            run=name,
            server=self.server.url,
            full=self.full,
            folder=str(self.folder / "runs" / name),
        )

    def _trained(self, job: Job, setting: Setting) -> str:
        """Trains; returns what went wrong with the lab itself."""
        case = REGISTRY.cases[job.case]
        folder = Path(setting.folder)
        if case.launches:
            folder.mkdir(parents=True)
            ended = launch(job.case, setting, folder, launches=case.launches, timeout=60.0)
            return case(setting).complaint(ended)
        if self._pool is None or self._pool.world != job.world:
            if self._pool is not None:
                self._pool.close()
            self._pool = Ranks(job.world, self.folder / f"pool{job.world}")
        folder.mkdir(parents=True)
        try:
            self._pool.run(job.case, setting)
        except RankFailed as error:
            # The group may be out of step: the next case gets a new one.
            self._pool.kill()
            self._pool = None
            return str(error)
        return ""

    def _result(self, job: Job, setting: Setting, seconds: float, error: str) -> Result:
        case = REGISTRY.cases[job.case](setting)
        expected = case.expected()
        state = self.server.judged(setting.run, timeout=_JUDGE_SECONDS, settle=case.settle)
        if not error and not state:
            error = "the server has not judged the run in time"
        every = self.server.alerts(setting.run, consequences=True)
        roots = [alert for alert in every if alert["parent"] is None]
        scored, alert = score(expected, roots, slack=0 if self.full else DEFAULT_SLACK)
        if error:
            scored = Score(error=error)
        return Result(
            job=job,
            run=setting.run,
            what=case.what,
            family=case.family,
            expected={
                "kinds": list(expected.kinds),
                "stages": list(expected.stages),
                "ranks": [sorted(ranks) for ranks in expected.ranks],
                "tensors": None if expected.tensors is None else sorted(expected.tensors),
                "step": expected.step,
                "tolerance": expected.tolerance,
                "severity": expected.severity,
            },
            score=scored,
            alert=alert,
            others=tuple(_short(other) for other in every if other is not alert),
            seconds=seconds,
        )

    def _address(self) -> str:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.exit_code is None:
            found = _LISTENS.search(self._process.log.read_text(encoding="utf-8"))
            if found:
                return found.group(1)
            time.sleep(0.1)
        raise RuntimeError(f"the server did not start:\n{self._process.tail()}")


def _short(alert: Json) -> str:
    follows = " (follows)" if alert["parent"] else ""
    return f"{alert['kind']} {alert['severity']} @{alert['first_step']}{follows}"
