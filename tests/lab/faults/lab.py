"""Runs cases one after the other; holds what the server says against what is expected."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rankscope.server.demo.processes import RANKSCOPE, Process
from tests.lab.faults.case import REGISTRY, Case, Setting
from tests.lab.faults.optimizer import HANG_SECONDS
from tests.lab.faults.ranks import RankFailed, Ranks, launch
from tests.lab.faults.rest import Json, Server
from tests.lab.faults.score import Score, score

_LISTENS = re.compile(r"listens on (http://\S+)")
_START_SECONDS = 60.0
# Only a busy machine takes as long: a rank that hangs gives up by itself, and much sooner.
_JUDGE_SECONDS = 180.0
_LAUNCH_SECONDS = 180.0
_HANGING_AT_ONCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of one case."""

    case: str
    world: int
    model: str
    seed: int


class Trained(NamedTuple):
    """A job that has ended.

    Attributes:
        seconds: that it took.
        error: what went wrong with the lab itself.
    """

    job: Job
    setting: Setting
    seconds: float
    error: str


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
    first_seed: int = 0,
) -> list[Job]:
    """What is to be run: each case with each number of ranks and each seed.

    Models take turns, unless all of them are asked for.
    """
    jobs = []
    allowed, sizes = tuple(models), sorted(set(worlds), reverse=True)
    for number, case in enumerate(cases):
        fitting = [m for m in case.models if m in allowed]
        for world in [w for w in sizes if w in case.worlds]:
            for seed in range(first_seed, first_seed + seeds):
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
        """Runs them all; the results of those that hang come last, which cost no time of their own.

        The server judges one run while the next one is trained.
        """
        with ThreadPoolExecutor(_HANGING_AT_ONCE) as threads:
            hanging: list[Future[Result]] = []
            before: Trained | None = None
            for job in jobs:
                if REGISTRY.cases[job.case].hangs:
                    hanging.append(threads.submit(self._alone, job))
                    continue
                trained = self._trained(job)
                if before is not None:
                    yield self._result(before)
                before = trained
            if before is not None:
                yield self._result(before)
            for future in hanging:
                yield future.result()

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

    def _alone(self, job: Job) -> Result:
        return self._result(self._trained(job))

    def _trained(self, job: Job) -> Trained:
        setting = self._setting(job)
        Path(setting.folder).mkdir(parents=True)
        began = time.monotonic()
        error = self._train(job, setting)
        return Trained(job, setting, time.monotonic() - began, error)

    def _train(self, job: Job, setting: Setting) -> str:
        """Trains; returns what went wrong with the lab itself."""
        case = REGISTRY.cases[job.case]
        if case.launches:
            ended = launch(
                job.case,
                setting,
                Path(setting.folder),
                launches=case.launches,
                timeout=_LAUNCH_SECONDS,
                **({"patience": HANG_SECONDS} if case.hangs else {}),
            )
            return case(setting).complaint(ended)
        if self._pool is None or self._pool.world != job.world:
            if self._pool is not None:
                self._pool.close()
            self._pool = Ranks(job.world, self.folder / f"pool{job.world}")
        try:
            self._pool.run(job.case, setting)
        except RankFailed as error:
            # The group may be out of step: the next case gets a new one.
            self._pool.kill()
            self._pool = None
            return str(error)
        return ""

    def _result(self, trained: Trained) -> Result:
        job, setting, error = trained.job, trained.setting, trained.error
        case = REGISTRY.cases[job.case](setting)
        expected = case.expected()
        state = self.server.judged(setting.run, timeout=_JUDGE_SECONDS, settle=case.settle)
        if not error and not state:
            error = "the server has not judged the run in time"
        every = self.server.alerts(setting.run, consequences=True)
        roots = [alert for alert in every if alert["parent"] is None]
        slack = 0 if self.full else self.server.interval(setting.run)
        scored, alert = score(expected, roots, slack=slack)
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
                "ceiling": expected.ceiling,
            },
            score=scored,
            alert=alert,
            others=tuple(_short(other) for other in every if other is not alert),
            seconds=trained.seconds,
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
