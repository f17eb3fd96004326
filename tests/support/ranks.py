"""Real training jobs: one process for each rank, gloo between them, a deadline over all."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rankscope.server.demo.processes import PYTHON, Job

REPOSITORY = Path(__file__).parent.parent.parent
EXAMPLE = REPOSITORY / "examples" / "train_ddp.py"
TORCHRUN = Path(sys.executable).with_name("torchrun")


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


def finished(job: Job, *, timeout_s: float = 90.0) -> Finished:
    """Waits for the job's end."""
    codes = job.wait(timeout_s)
    return Finished(codes, [output(rank) for rank in job.ranks])


def run_ranks(
    script: Path,
    *arguments: str,
    ranks: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 90.0,
) -> Finished:
    """Runs a job to its end."""
    with started_ranks(
        script, *arguments, ranks=ranks, folder=folder, environment=environment
    ) as job:
        return finished(job, timeout_s=timeout_s)


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
