"""Real training jobs: one process for each rank, gloo between them, a deadline over all."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rankscope.server.demo.processes import PYTHON, Job, job_environment, own_environment
from tests.support import forked

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "examples" / "train_ddp.py"
TORCHRUN = Path(sys.executable).with_name("torchrun")

# What is given to `forked_ranks` to bring something back comes from it.
forking = multiprocessing.get_context("forkserver")
_PRELOAD = ["tests.support.jobs.preloaded"]


@dataclass(frozen=True)
class Finished:
    """A job that has ended: exit code and output of each rank."""

    exit_codes: list[int]
    outputs: list[str]

    def check(self) -> Finished:
        """Itself, where every rank ended with 0."""
        reported = "\n".join(f"--- rank {r}\n{text}" for r, text in enumerate(self.outputs))
        assert not any(self.exit_codes), f"exit codes {self.exit_codes}\n{reported}"
        return self


@contextmanager
def started_ranks(
    script: Path,
    *arguments: str,
    ranks: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
):
    """The running job of a script that reads RANK and WORLD_SIZE; whatever happens, it is stopped.

    `folder` takes the outputs, and what an agent without a server leaves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"RANKSCOPE_SPOOL": str(folder / "spool"), **(environment or {})}
    with Job(
        [*PYTHON, str(script), *arguments], ranks=ranks, folder=folder, environment=kept
    ) as job:
        yield job


def finished(job: Job | ForkedJob, *, timeout_s: float = 90.0) -> Finished:
    """Waits for the job's end."""
    codes = job.wait(timeout_s)
    return Finished(codes, [output(rank) for rank in job.ranks])


class ForkedRank:
    """A process of `forked_job`; `log` is the file with what it prints."""

    def __init__(self, script: Path, arguments: Sequence[str], environment, log: Path) -> None:
        self.log = log
        forking.set_forkserver_preload(_PRELOAD)
        self._process = forking.Process(
            target=_run, args=(str(script), arguments, dict(environment), str(log))
        )
        self._process.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.exitcode

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code; None where it still runs after `timeout_s`."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def kill(self) -> None:
        """Ends it at once, where it still runs."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@dataclass(frozen=True)
class ForkedJob:
    """The ranks of a job of `forked_job`."""

    ranks: list[ForkedRank]

    @property
    def running(self) -> bool:
        """Whether a rank is still there."""
        return any(rank.exit_code is None for rank in self.ranks)

    def wait(self, timeout_s: float) -> list[int]:
        """Exit codes, once all ranks have ended; fails where one has not after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        codes = [rank.wait(max(deadline - time.monotonic(), 0.0)) for rank in self.ranks]
        texts = "\n".join(output(rank) for rank in self.ranks)
        assert None not in codes, f"still running after {timeout_s} s: {codes}\n{texts}"
        return [code for code in codes if code is not None]


@contextmanager
def forked_job(
    script: Path,
    *arguments: str,
    ranks: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
):
    """As `started_ranks`, in processes that are forked from one which has imported torch.

    That, and the agent, take each of them 3 seconds of a core. How an interpreter ends by itself,
    and what its command line says, is for `started_ranks` to try.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"RANKSCOPE_SPOOL": str(folder / "spool"), **(environment or {})}
    shared = {**os.environ, **job_environment(ranks, kept)}
    job = ForkedJob([])
    try:
        for rank in range(ranks):
            own, log = {**shared, **own_environment(rank)}, folder / f"rank{rank}.log"
            job.ranks.append(ForkedRank(script, arguments, own, log))
        yield job
    finally:
        for rank in job.ranks:
            rank.kill()


def run_ranks(
    script: Path,
    *arguments: str,
    ranks: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 90.0,
) -> Finished:
    """Runs a job of `forked_job` to its end."""
    with forked_job(script, *arguments, ranks=ranks, folder=folder, environment=environment) as job:
        return finished(job, timeout_s=timeout_s)


def forked_ranks(worker: Callable[..., None], *arguments: object, ranks: int) -> None:
    """Calls `worker(rank, *arguments)` in processes that are forked as those of `forked_job`.

    Raises:
        ProcessException: of torch, where one fails.
    """
    import torch.multiprocessing

    forking.set_forkserver_preload(_PRELOAD)
    torch.multiprocessing.start_processes(
        worker, arguments, nprocs=ranks, start_method="forkserver"
    )


def _run(script: str, arguments: Sequence[str], environment: dict[str, str], log: str) -> None:
    """As an interpreter runs a script, in a process that was forked."""
    forked.take_over(environment, log)
    sys.argv = [script, *arguments]
    # Workers of a loader begin as they do anywhere, and not each with an interpreter of its own.
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]

    def program() -> None:
        runpy.run_path(script, run_name="__main__")

    forked.run(program)


def output(rank) -> str:
    """What a rank has printed so far."""
    return rank.log.read_text(encoding="utf-8", errors="replace")


def printed_losses(texts: Sequence[str]) -> dict[int, dict[int, float]]:
    """Rank -> step -> loss, as `examples/train_ddp.py --print-losses` prints them."""
    losses: dict[int, dict[int, float]] = {}
    for line in "\n".join(texts).splitlines():
        words = line.split()
        if len(words) == 6 and words[0] == "rank" and words[4] == "loss":
            losses.setdefault(int(words[1]), {})[int(words[3])] = float(words[5])
    return losses
